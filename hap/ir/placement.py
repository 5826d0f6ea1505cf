"""Placements of a tensor: replicated, sharded on a dim, or partial.

The vocabulary of PyTorch's DTensor; the HAP paper (EuroSys'24) writes Identity, Gather(d)
and Reduce. A placement is a *property* of a tensor in the sense of Hoare: a rule derives the
placement of the output from the placements of the inputs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class Placement(NamedTuple):
    """``R``, ``P``, ``L`` or ``S(dim)``; prints as ``R``, ``P``, ``L``, ``S0``."""

    kind: str
    dim: int = -1

    @property
    def sharded(self) -> bool:
        return self.kind == "S"

    def __str__(self) -> str:
        return f"S{self.dim}" if self.sharded else self.kind

    @staticmethod
    def parse(text: str) -> Placement:
        if text in ("R", "P", "L"):
            return Placement(text)
        if text[:1] == "S" and text[1:].isdigit():
            return S(int(text[1:]))
        raise ValueError(f"placement {text!r}: write R, P, L or S<dim>, such as S0")


R = Placement("R")
"""Every rank holds the whole tensor."""

P = Placement("P")
"""Every rank holds a term of full shape; the tensor is the sum of the terms."""


L = Placement("L")
"""Every rank holds a term of full shape; the tensor is the log of the sum of their exponentials.

A log-sum-exp over a sharded dim, such as the normaliser of a softmax, has this kind. A rank
without a part of the dim holds minus infinity. No operator reads terms of this kind.
"""


@cache
def S(dim: int) -> Placement:
    """Every rank holds its shard along ``dim``, in rank order; a shard may be empty."""
    return Placement("S", dim)


def conversion(src: Placement, dst: Placement) -> str | None:
    """Return the instruction that turns ``src`` into ``dst``; ``None`` if they are equal.

    ``slice`` and ``mask`` (rank 0 keeps its copy, the others hold zeros) move no data between
    ranks. ``P`` can't be reached from a shard, since no program needs such a collective.
    """
    if src == dst:
        return None
    if not convertible(src, dst):
        raise ValueError(f"no instruction turns {src} into {dst}")
    return _CONVERSIONS[src.kind, dst.kind]


def convertible(src: Placement, dst: Placement) -> bool:
    """Return whether ``src`` equals ``dst`` or an instruction converts it."""
    return src == dst or (src.kind, dst.kind) in _CONVERSIONS


_CONVERSIONS = {
    ("R", "S"): "slice", ("R", "P"): "mask",
    ("S", "R"): "all_gather", ("S", "S"): "all_to_all",
    ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter",
    ("L", "R"): "all_reduce_lse",
}  # fmt: skip

LOCAL = frozenset({"slice", "mask"})
"""Conversions that need no communication."""
