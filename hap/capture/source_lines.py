"""The user's lines and modules: of an error, and of the nodes of a trace."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import fx

_PYTHON = str(Path(re.__file__).parents[1])
"""The folder of Python's own library, in which the installed packages have a folder."""

_NOT_THE_USERS = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)
"""The folders of torch and of this package, which calls the user's module."""


def raised_at(error: Exception) -> str:
    """The innermost line outside torch and this package that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost((frame.filename, frame.lineno) for frame in frames)


def source_of(node: fx.Node) -> str:
    """The innermost line of the user's code that made ``node``."""
    return line_of(node.meta.get("stack_trace") or "")


def line_of(trace: str) -> str:
    """The innermost ``file:line`` outside torch and this package of a traceback's text.

    Empty if there is none, as of an operator of a model that is all torch's own modules.
    """
    return innermost(re.findall(r'File "([^"]+)", line (\d+)', trace))


def innermost(frames: Iterable[tuple[str, object]]) -> str:
    """Return the last ``file:line`` outside torch, this package and Python's own library, or nothing."""
    outside = [
        f"{f}:{n}" for f, n in frames if not f.startswith(_NOT_THE_USERS) and not _of_python(f)
    ]
    return outside[-1] if outside else ""


def _of_python(file: str) -> bool:
    return file.startswith(f"{_PYTHON}/") and "-packages/" not in file


def module_of(node: fx.Node) -> str:
    """Return the path of the submodule that called ``node`` or its forward operator."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"^L\['self'\]\.?|^L\['s'\]\.?", "", path).removeprefix("module").lstrip(".")
