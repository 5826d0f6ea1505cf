"""The operators of a forward, in order, with their arguments: do two forwards compute the same?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hap.capture import torch_private


def operators_of(run: Callable[[], object]) -> list[str]:
    """Return the operators that a function runs on fake tensors; constants count by their values."""
    seen = list[str]()

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            data = None if torch_private.is_fake(value) else torch_private.values(value)
            return value.dtype, tuple(value.shape), data
        return [told(v) for v in value] if isinstance(value, list | tuple) else value

    class Log(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            named = sorted((kwargs or {}).items())
            seen.append(f"{func} {told(args)} {[(key, told(value)) for key, value in named]}")
            return func(*args, **(kwargs or {}))

    with Log():  # type: ignore[no-untyped-call]
        run()
    return seen
