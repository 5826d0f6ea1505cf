"""The part of a global batch that a rank reads, and the remedies for one of other shapes."""

from __future__ import annotations

from typing import Any, Protocol

from hap.errors import PlanError
from hap.ir.batch import LONE, each
from hap.ir.graph import Graph
from hap.ir.storage_levels import Levels


class Cuts(Protocol):
    """The members of a plan that give the parts of a batch: see :class:`hap.ir.plan.Plan`."""

    @property
    def graph(self) -> Graph: ...
    def levels(self, tensor: str, rank: int) -> Levels: ...


def local_batch(plan: Cuts, batch: Any, rank: int) -> Any:
    """Return a rank's part of a global batch: see :meth:`hap.ir.plan.Plan.local_batch`.

    Raises:
        PlanError: a tensor has another shape than the plan's.
    """
    names = {i.target: i.tensor for i in plan.graph.role("input")}

    def cut(name: str, entry: Any) -> Any:
        if name not in names:
            return entry
        pair = -1 if entry.is_complex() else None  # of real ones, in the graph
        expected = plan.graph.tensors[names[name]].shape[:pair]
        shape = tuple(entry.shape)
        if shape != expected:
            hint = "give the global batch that the plan was made for, or plan anew"
            if 0 < len(shape) == len(expected):
                if shape[0] < expected[0] and shape[1:] == expected[1:]:
                    hint = "a plan is for full global batches: give DataLoader drop_last=True, or plan anew"
                hint = padding_hint(shape, expected) or hint
            raise PlanError(f"{label(name)} has shape {shape}, the plan {expected}", hint=hint)
        for level in plan.levels(names[name], rank):
            if level:
                entry = entry.narrow(level.dim, level.start, level.sizes[level.place])
        return entry

    return each(batch, cut)


def label(name: str) -> str:
    """Return an entry's name for a message."""
    return "the batch" if name == LONE else f"batch entry {name!r}"


def padding_hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return the remedy for a batch of the right number of rows that are longer or shorter; or nothing."""
    if len(shape) == len(expected) > 1 and shape[0] == expected[0] and shape != expected:
        return (
            'give global batches of the plan\'s size: pad each to it, as padding="max_length" of a tokenizer does; '
            "or plan anew"
        )
    return ""
