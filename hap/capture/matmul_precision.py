"""The precision of float32 products and convolutions: torch's settings, set on a GPU and restored."""

from __future__ import annotations

import contextlib
import threading
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


_convolving = threading.Lock()
_exact_users, _allowed = 0, True


@contextlib.contextmanager
def exact_convolutions() -> Iterator[None]:
    """Let float32 convolutions on a GPU be in float32; torch's default is TF32, of ten bits.

    The setting is one of the process, and ranks may be threads of it: the last one restores it.
    """
    global _exact_users, _allowed
    with _convolving:
        if not _exact_users:
            _allowed = torch.backends.cudnn.allow_tf32
            torch.backends.cudnn.allow_tf32 = False
        _exact_users += 1
    try:
        yield
    finally:
        with _convolving:
            _exact_users -= 1
            if not _exact_users:
                torch.backends.cudnn.allow_tf32 = _allowed
