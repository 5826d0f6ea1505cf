"""Answers of torch's tracer to a forward that asks whether it is compiled, as by ``torch.compiler.is_compiling()``.

A plan computes what the eager model would, so files of the user's own are told that it is not. Installed packages
are told that it is: their branches compute the same, and those for eager runs often read data. Uses private APIs of
the tracer, checked on torch 2.13.0 (2.11 and 2.12 have the same names).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from hap.capture.source_lines import innermost


@dataclass
class Asked:
    """Whether files of the user's own are told that they are compiled, and the first line that asked, or nothing."""

    compiled: bool
    line: str = ""


@contextlib.contextmanager
def told(compiled: bool) -> Iterator[Asked]:
    """Let the tracer tell files of the user's own that they are compiled, or not."""
    from torch._dynamo import external_utils
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    asked, handlers = Asked(compiled), TorchInGraphFunctionVariable._get_handlers()
    compiler = torch.compiler
    questions = (
        compiler.is_compiling, compiler.is_dynamo_compiling, compiler.is_exporting,
        torch._utils.is_compiling, external_utils.is_compiling,
    )  # fmt: skip

    def answering(usual: Callable[..., Any]) -> Callable[..., Any]:
        def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            line = innermost([(tx.f_code.co_filename, tx.lineno)])
            if not line or "-packages/" in line:
                return usual(self, tx, *args, **kwargs)
            asked.line = asked.line or line
            return ConstantVariable.create(compiled)

        return answer

    with mock.patch.dict(handlers, {f: answering(handlers[f]) for f in questions}):
        yield asked
