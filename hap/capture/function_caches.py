"""Results that ``functools.lru_cache`` keeps: a capture must leave none without data in them."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hap.capture import torch_private
from hap.capture.kept_constants import forget

_CACHED = type(functools.lru_cache(len))


@contextlib.contextmanager
def no_fakes_in_caches(
    some_live: Callable[[], bool], constants: Callable[[], list[Tensor]]
) -> Iterator[None]:
    """Clear the caches of functions that hold tensors without data at the end of the context.

    Args:
        constants: returns the constants that were made in the context and that something holds, to be forgotten.
        some_live: whether anything holds a tensor that was made in the context. To look through all objects
            takes as long as a small model's trace.
    """
    try:
        yield
    finally:
        forget(constants())
        for cached in gc.get_objects() if some_live() else ():
            if type(cached) is _CACHED and any(map(_holds_fake, gc.get_referents(cached))):
                cached.cache_clear()


def _holds_fake(value: Any, depth: int = 3) -> bool:
    if isinstance(value, Tensor):
        return torch_private.is_fake(value)
    if not depth or not isinstance(value, dict | list | tuple):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return any(_holds_fake(each, depth - 1) for each in inside)
