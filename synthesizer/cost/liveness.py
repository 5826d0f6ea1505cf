"""Liveness: the instructions during which each storage of a program exists.

A view shares the storage of its input. A storage is allocated by the instruction that writes its
first value and freed after the last that reads any of its values; outputs are never freed. Both
memory models follow it: :mod:`hap.synthesizer.cost.peak_memory` by groups of instructions, and
:mod:`hap.synthesizer.schedule.memory_timeline` in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hap.ir.graph import FREE, Graph
from hap.ir.program import Bounds, Program, Value

Indices = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Storage:
    """Memory that an instruction allocates.

    Attributes:
        value: the value that it was allocated for.
        kind: ``gradients``, ``gathered parameters``, ``saved activations`` or ``temporary values``.
        born: index of the instruction that allocates it.
        reads: indices of the instructions that read it, or a view of it.
        kept: whether it holds an output of the graph.
    """

    value: Value
    kind: str
    born: int
    reads: list[int] = field(default_factory=list)
    kept: bool = False

    @property
    def last(self) -> int:
        """Index of the last instruction that uses it."""
        return max(self.born, *self.reads) if self.reads else self.born


def storages(graph: Graph, program: Program) -> list[Storage]:
    """Return the storages that instructions allocate, in order; inputs have separate storages."""
    parameters = {i.tensor for i in graph.role("parameter")}
    gradients = set(graph.gradients.values())
    held: dict[Value, Storage | None] = {  # None: an input's, not allocated by an instruction
        Value(i.tensor, program.inputs[i.tensor]): None for i in graph.inputs
    }
    found: list[Storage] = []

    def kind(tensor: str) -> str:
        if tensor in gradients:
            return "gradients"
        while (node := graph.producer.get(tensor)) and node.op in FREE and node.inputs:
            tensor = node.inputs[0]
        return "gathered parameters" if tensor in parameters else "temporary values"

    for at, step in enumerate(program.instructions):
        ins = step.reads(graph)
        shared = held[ins[0]] if ins and step.aliases(graph) else None
        for value in ins:
            storage = held[value]
            if storage is not None:
                storage.reads.append(at)
                saved = step.backward and not program.instructions[storage.born].backward
                if saved and storage.kind == "temporary values":
                    storage.kind = "saved activations"
        for value in step.writes(graph):
            if ins and step.aliases(graph):
                held[value] = shared
                continue
            storage = held[value] = Storage(value=value, kind=kind(value.tensor), born=at)
            found.append(storage)
    for output, p in zip(graph.outputs, program.outputs, strict=True):
        storage = held[Value(output.tensor, p)]
        if storage is not None:
            storage.kept = True
    return found


class LiveRanges:
    """The groups of instructions during which each storage exists.

    Moment 0 is before the step, moment ``k + 1`` is group ``k``. Memory is the fullest at a moment
    before something is freed and after something was allocated, so the others are left out.

    Args:
        found: the storages.
        bounds: per group, (start, stop) of its instructions.
        until: per group, the last group that begins before it has ended: itself, or a later one
            if it communicates meanwhile. A group holds its inputs until then.
        busy: groups that hold more than tensors while they run.
        throughout: instructions whose storages exist from the start to the end.

    Attributes:
        first, last: per storage, the group that allocates it and the last that holds it.
        moments: the moments of which one is the fullest, in order.
        changes: per storage, the first of ``moments`` at which it exists, and the first at which it
            no longer does; flat.
        under_way: group of ``busy`` -> those of ``moments`` at which it runs.
    """

    def __init__(
        self, found: Sequence[Storage], bounds: Bounds, until: Sequence[int], busy: Sequence[int],
        throughout: Collection[int] = (),
    ) -> None:  # fmt: skip
        end = len(bounds)
        group_of = np.repeat(np.arange(end), [b - a for a, b in bounds])
        held = np.asarray(until, dtype=np.int64)
        self.first: Indices = group_of[np.array([s.born for s in found], dtype=np.int64)]
        self.last = self.first.copy()
        readers = np.array([at for s in found for at in s.reads], dtype=np.int64)
        read = np.repeat(np.arange(len(found)), [len(s.reads) for s in found])
        np.maximum.at(self.last, read, held[group_of][readers])
        always = np.array([s.born in throughout for s in found], dtype=bool)
        self.first[always] = 0
        self.last[always | np.array([s.kept for s in found], dtype=bool)] = end
        ends = np.minimum(self.last + 2, end + 1)
        running = np.array(busy, dtype=np.int64)
        starts, stops = running + 1, held[running] + 2
        # Moments at which something was allocated, and at which something was freed.
        more, less = np.zeros(end + 2, dtype=bool), np.zeros(end + 2, dtype=bool)
        more[self.first + 1] = more[starts] = True
        less[ends] = less[stops] = less[end + 1] = True
        self.moments: Indices = np.flatnonzero(less[1:] & (more | ~less)[:-1])
        changes = np.stack([self.first + 1, ends], axis=1).reshape(-1)
        self.changes: Indices = np.searchsorted(self.moments, changes)
        ways = np.searchsorted(self.moments, np.stack([starts, stops], axis=1)).tolist()
        self.under_way = {at: slice(a, b) for at, (a, b) in zip(busy, ways, strict=True)}
