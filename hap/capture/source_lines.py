"""The user's lines and modules: of an error, and of the nodes of a trace."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from torch import fx


def raised_at(error: Exception) -> str:
    """The innermost line outside torch and this package that an error came through."""
    own = f"{Path(__file__).parents[1]}/"
    frames = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and not frame.filename.startswith(own)
    ]
    return frames[-1] if frames else ""


def source_of(node: fx.Node) -> str:
    """The innermost line of the user's code that made ``node``."""
    return line_of(node.meta.get("stack_trace") or "")


def line_of(trace: str) -> str:
    """The innermost ``file:line`` outside torch of a traceback's text."""
    found = re.findall(r'File "([^"]+)", line (\d+)', trace)
    own = f"{Path(__file__).parent}/"  # which calls the user's module
    outside = [f"{f}:{n}" for f, n in found if "/torch/" not in f and not f.startswith(own)]
    return outside[-1] if outside else ""


def module_of(node: fx.Node) -> str:
    """Return the path of the submodule that called ``node`` or its forward operator."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    return re.sub(r"^L\['self'\]\.?|^L\['s'\]\.?", "", path).removeprefix("module").lstrip(".")
