"""The parts of a hierarchical collective per machine, shared by the cost model and the runtime.

Machines hold consecutive ranks, ``counts`` of them each. A *column* is the ranks with the same
place in their machines. Machines may differ in size: only the first ``min(counts)`` columns, which
every machine has, exchange data between machines; the other ranks pass their data to them inside.
"""

from __future__ import annotations

from collections.abc import Sequence


def exists(counts: Sequence[int]) -> bool:
    """Return whether there are links of both kinds; ``counts`` is empty if ranks are mixed."""
    return len(counts) > 1 and max(counts) > 1


def regular(counts: Sequence[int]) -> bool:
    """Return whether every machine has every column."""
    return min(counts) == max(counts)


def even(total: int, parts: int) -> list[int]:
    """Return ``total`` in whole parts that differ by at most one, the larger first."""
    return [total // parts + (k < total % parts) for k in range(parts)]


def cheaper(sizes: Sequence[float]) -> str:
    """Return ``padded`` or ``grouped``, whichever sends fewer bytes over each link of a ring.

    Only the sizes decide, since the stages inside an implementation have no names in
    the program.
    """
    padded, grouped = (len(sizes) - 1) * max(sizes), sum(sizes)
    return "padded" if padded <= grouped * (1 + 1e-9) else "grouped"
