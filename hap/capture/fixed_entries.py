"""Entries of a batch that are the same in every batch: their numbers are constants of the program.

Shapes may depend on them, such as those of packed images on a table of their sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hap.capture import tensor_constants, torch_private
from hap.errors import ModelError
from hap.ir.batch import WHOLE, Batch, Fixed, each, flatten, form_of, leaves


class NoData(ModelError):
    """A fixed entry was built without data."""


def fix_entries(batch: Batch, names: Iterable[str]) -> Batch:
    """Return the batch with :class:`Fixed` in place of the tensors of these names.

    Raises:
        ModelError: there is no such tensor, it is not of whole numbers or booleans, or too large.
        NoData: its numbers are not known, since it was made under a fake mode.
    """
    names = {*names}
    for name in sorted(names - flatten(batch).keys()):
        if not isinstance(leaves(form_of(batch)).get(name), Fixed):
            raise ModelError(
                f"`fixed` names {name!r}, which is no tensor of the batch",
                hint=f"the batch has {', '.join(flatten(batch))}",
            )
    return each(batch, lambda name, tensor: _fixed(name, tensor) if name in names else tensor)


def _fixed(name: str, tensor: Tensor) -> Fixed:
    where, dtype = f"batch entry {name!r}", str(tensor.dtype).removeprefix("torch.")
    if dtype not in WHOLE:
        raise ModelError(
            f"`fixed` names {name!r}, which is of {dtype}", where=where,
            hint="a fixed entry must hold whole numbers or booleans",
        )  # fmt: skip
    if tensor.numel() > tensor_constants.LARGEST:
        raise ModelError(
            f"`fixed` names {name!r}, which has {tensor.numel()} elements", where=where,
            hint=f"a fixed entry has at most {tensor_constants.LARGEST}",
        )  # fmt: skip
    if torch_private.is_fake(tensor):
        known = torch_private.known_value(tensor)
        if known is None:
            raise NoData(
                f"the fixed entry {name!r} has no data", where=where,
                hint="make it with data, outside of FakeTensorMode",
            )  # fmt: skip
        tensor = known
    return Fixed(dtype, torch_private.values(tensor))


def tensor_of(dtype: str, numbers: Any) -> Tensor:
    """Return a fixed entry as a tensor."""
    return torch.tensor(numbers, dtype=getattr(torch, dtype))
