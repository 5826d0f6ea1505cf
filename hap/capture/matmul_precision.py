"""The precision of float32 products: torch's setting for a run, set on a GPU and restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def matmul_precision(name: str, device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices at a precision inside; without a name, or on a CPU, change nothing.

    The setting is one of the process, so that the threads of the backward see it too.
    """
    if not name or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
