"""The parts of a hierarchical collective per machine, shared by the cost model and the runtime.

Machines hold consecutive ranks, ``counts`` of them each. A *column* is the ranks of one place
in their machines. Machines may differ in size: only the first ``min(counts)`` columns, which
every machine has, exchange anything between machines; the others pass theirs to them inside.
"""

from __future__ import annotations

from collections.abc import Sequence


def exists(counts: Sequence[int]) -> bool:
    """Are there links of both kinds? Empty ``counts`` are machines whose ranks are mixed."""
    return len(counts) > 1 and max(counts) > 1


def regular(counts: Sequence[int]) -> bool:
    """Does every machine have every column?"""
    return min(counts) == max(counts)


def even(total: int, parts: int) -> list[int]:
    """``total`` in whole parts that differ by one at most, the larger first."""
    return [total // parts + (k < total % parts) for k in range(parts)]


def cheaper(sizes: Sequence[float]) -> str:
    """``padded`` or ``grouped``: by which of them the fewer bytes pass each link of a ring.

    Decided by the sizes alone, since the stages inside of one implementation have no names in
    the program.
    """
    padded, grouped = (len(sizes) - 1) * max(sizes), sum(sizes)
    return "padded" if padded <= grouped * (1 + 1e-9) else "grouped"
