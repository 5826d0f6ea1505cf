"""Messages and progress bars in a forward, which change no program: torch's tracer skips them.

Uses private APIs of the tracer, checked on torch 2.13.0 (2.11 and 2.12 have the same names).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


def message_functions() -> set[Callable[..., Any]]:
    """Return the functions that write messages, of which a trace has nothing.

    Libraries add methods to Logger (warning_once).
    """
    names = ("debug", "info", "warning", "error", "critical", "exception", "log")
    of_loggers = {f for f in vars(logging.Logger).values() if callable(f)}
    return {print, warnings.warn, *(getattr(logging, name) for name in names), *of_loggers}


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let the tracer enter ``logging.getLogger``, and take progress bars for what they go through."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.misc import LoggingLoggerVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    class GetLogger(UserFunctionVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            names = [arg.as_python_constant() for arg in [*args, *kwargs.values()]]
            return LoggingLoggerVariable(logging.getLogger(*names))

    class Range(UserFunctionVariable):
        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> Any:
            return UserFunctionVariable(replaced[value])

    found = [vars(sys.modules[name]) for name in _TQDM if name in sys.modules]
    bars = {module["tqdm"] for module in found if "tqdm" in module}
    ranges = {module["trange"] for module in found if "trange" in module}
    replaced: dict[Any, Any] = dict.fromkeys(bars, _bar) | dict.fromkeys(ranges, _trange)
    table = {logging.getLogger: GetLogger} | dict.fromkeys(ranges, Range)
    call = UserDefinedClassVariable.call_function

    def made(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in bars:  # a class, of which there are no rules
            return UserFunctionVariable(replaced[self.value]).call_function(tx, args, kwargs)
        return call(self, tx, args, kwargs)

    with (
        mock.patch.dict(get_torch_obj_rule_map(), table),
        mock.patch.object(UserDefinedClassVariable, "call_function", made),
    ):
        yield


_TQDM = tuple(
    f"tqdm{part}"
    for part in ("", ".std", ".auto", ".asyncio", ".autonotebook", ".notebook", ".rich")
)
"""Modules that have a ``tqdm`` and a ``trange``."""


class _Progress:
    """Goes through what a ``tqdm`` would go through, and shows nothing."""

    def __init__(self, iterable: Any) -> None:
        self.iterable, self.n = iterable, 0.0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def __len__(self) -> int:
        return len(self.iterable)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, n: float = 1) -> None:
        self.n += n

    def show(self, *args: Any, **named: Any) -> None:
        """Take the place of the methods that write."""

    close = set_description = set_description_str = set_postfix = set_postfix_str = refresh = show
    write = display = clear = show


def _bar(iterable: Any = None, *args: Any, **named: Any) -> _Progress:
    return _Progress(iterable)


def _trange(*args: int, **named: Any) -> _Progress:
    return _Progress(range(*args))
