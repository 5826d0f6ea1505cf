"""``module.to(x.device)`` in a forward, which has no effect on one device and none on the tensors of a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def modules_stay() -> Iterator[None]:
    """Let ``module.to`` return the module, unless that changes a dtype. Tensors without data can't be moved."""
    to = nn.Module.to

    def stay(self: nn.Module, *args: Any, **named: Any) -> Any:
        for given in (*args, *named.values()):
            dtype = given.dtype if isinstance(given, Tensor) else given
            if isinstance(dtype, torch.dtype):
                for tensor in (*self.parameters(), *self.buffers()):
                    if tensor.is_floating_point() and tensor.dtype != dtype:
                        return to(self, *args, **named)
        return self

    with mock.patch.object(nn.Module, "to", stay):
        yield
