"""Shares in which parameters are stored, chosen apart from those of computing.

A parameter that is stored in shards but used whole need not be cut like the axis of its dim: no
operator sees the cut. Such dims get an axis of their own, as fine as the dim is long: stored bytes
follow the devices' memory, computing follows their speed. HAP (EuroSys'24) cuts both alike; ZeRO
(Rajbhandari et al., SC 2020) stores evenly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from hap.ir.axes import Axes, Axis, Dim, Shares
from hap.ir.graph import FREE, Graph
from hap.ir.program import Compute, Program
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.peak_memory import memory
from hap.synthesizer.shares.share_solver import proportional

_ROUNDS = 10
"""Tries to fit the memory. Uneven shards need larger buffers for their padding, which leave less room for shards."""

STORED = "stored "
"""Prefix of the names of the axes of storing; the size of their dims follows."""


def program_axes(axes: Axes, program: Program) -> Axes:
    """The axes of a graph, with the program's storage axes."""
    known = program.memo.get("axes")
    if known is None or known[0] is not axes:
        known = program.memo["axes"] = axes, _with_storing(axes, program)
    found: Axes = known[1]
    return found


def _with_storing(axes: Axes, program: Program) -> Axes:
    if not any(name not in axes.axes for name, _ in program.axes.values()):
        return axes
    own = {name: Axis(name=name, units=units) for name, units in program.axes.values()}
    of = {_dim(key): name for key, (name, _) in program.axes.items()}
    return Axes(axes={**axes.axes, **own}, of={**axes.of, **of})


@cache
def _dim(key: str) -> Dim:
    """The dim that a key of a program's axes names."""
    tensor, _, dim = key.rpartition(":")
    return tensor, int(dim)


def with_storage_axes(graph: Graph, program: Program) -> Program:
    """The program with storage axes for parameters that are stored in shards and computed unlike.

    Dims of one size share an axis, so that the parameters of all layers are cut alike.
    """
    groups = _Groups()
    computing: list[Dim] = [(i.tensor, 0) for i in graph.role("input")]
    for step in program.instructions:
        if isinstance(step, Compute):
            node = graph.by_name[step.node]
            placed = zip((*node.inputs, *node.outputs), (*step.ins, *step.outs), strict=True)
            dims = [(n, p.dim) for n, p in placed if n and p and p.sharded]
            groups.join(dims)
            if node.op not in FREE:
                computing += dims
    stored: list[Dim] = []
    for i in graph.role("parameter"):
        p = program.inputs[i.tensor]
        if p.sharded:
            gradient = graph.gradients.get(i.target, i.tensor)
            groups.join([(i.tensor, p.dim), (gradient, p.dim)])
            stored.append((i.tensor, p.dim))
    taken = {groups.root(dim) for dim in computing}
    sizes: dict[Dim, set[int]] = {}
    for key in program.axes:
        dim = _dim(key)
        sizes.setdefault(groups.root(dim), set()).add(graph.tensors[dim[0]].shape[dim[1]])
    free = {groups.root(dim) for dim in stored} - taken
    axes = dict(program.axes)
    for key in program.axes:
        root = groups.root(_dim(key))
        if root in free and len(sizes[root]) == 1:
            (size,) = sizes[root]
            axes[key] = (f"{STORED}{size}", size)
    return replace(program, axes=axes)


class _Groups:
    """Union-find over dims."""

    def __init__(self) -> None:
        self._parent: dict[Dim, Dim] = {}

    def root(self, dim: Dim) -> Dim:
        found = dim
        while (parent := self._parent.get(found)) is not None:
            found = parent
        while dim != found:  # path compression
            self._parent[dim], dim = found, self._parent[dim]
        return found

    def join(self, dims: list[Dim]) -> None:
        for dim in dims[1:]:
            if (mine := self.root(dim)) != (other := self.root(dims[0])):
                self._parent[mine] = other


def filled(
    graph: Graph, program: Program, price: Callable[[Shares], CostModel], shares: Shares
) -> Shares:
    """Shares of the storage axes: even, but for devices whose memory would overflow.

    ``price`` gives the cost model under shares; ``shares`` are those of the other axes.
    """
    sizes = {n: u for n, u in program.used_axes().items() if n.startswith(STORED)}
    world = len(next(iter(shares.values()), ())) or 1
    found = {name: proportional(units, np.ones(world)) for name, units in sizes.items()}
    for _ in range(_ROUNDS if sizes else 0):
        cost = price({**shares, **found})
        own = np.zeros(world)
        for i in graph.role("parameter"):
            p = program.inputs[i.tensor]
            if p.sharded and program.axis(i.tensor, p.dim)[0] in sizes:
                trained = i.target in graph.gradients
                own += cost.stored_bytes(graph.tensors[i.tensor], p, trained=trained)
        room = np.array([d.memory_bytes for d in cost.hardware.cluster.devices], dtype=np.float64)
        peak = memory(graph, program, cost)[1]
        if (peak <= room).all():
            break
        caps = (room - (peak - own)) / max(own.sum(), 1.0)
        again = {  # rounding adds less than a unit to a share
            name: proportional(units, level(np.maximum(caps - 1 / units, 0.0)))
            for name, units in sizes.items()
        }
        if again == found:
            break
        found = again
    return found


def level(caps: PerRank) -> PerRank:
    """Parts that sum to 1, the largest as small as the caps allow; above the caps if necessary."""
    parts: PerRank
    if caps.sum() <= 1:
        parts = caps + (1 - caps.sum()) / len(caps)
        return parts
    order = np.sort(caps)
    filled = np.concatenate([[0.0], np.cumsum(order)[:-1]])  # by the caps below each
    levels = (1 - filled) / np.arange(len(caps), 0, -1)
    parts = np.minimum(caps, levels[np.argmax(levels <= order)])
    return parts
