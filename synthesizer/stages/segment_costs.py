"""Costs of the parts of a step between two places of a cut, for one number of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from hap.cluster.topology import Cluster
from hap.cluster.work import SMALL_BYTES, Work
from hap.ir.graph import FREE, Graph, Node
from hap.ir.microbatch import Phase, is_sum, phases
from hap.ir.stages import cut_stages, repeatable, stage_ranges
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.operator_work import node_work, update_work

Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD, ONCE = range(3)
"""Sides of a stage's work: of each microbatch, and once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    """Work of each segment between neighbouring places of a cut, on one device of each kind.

    ``work_s`` has dims [busy, launches, issuing by the host; side, segment, kind]: see :func:`together_s`.
    ``least_s`` is the least weighted time of
    operators that belong to segments from ``first`` to ``last``, with dims [side, first, last, set of
    kinds]: see :func:`optimistic`. ``forward_bytes`` and ``backward_bytes`` are of one microbatch at each
    place, and ``parameter_bytes`` are of each segment.
    """

    microbatches: int
    work_s: Floats
    least_s: Floats
    forward_bytes: Floats
    backward_bytes: Floats
    once_bytes: Floats
    """At each place, what crosses once per step: weights and sums of gradients, dims [direction, place]."""
    parameter_bytes: Floats
    stored_bytes: Floats
    """With gradients and optimizer states."""
    saved_bytes: Floats
    """Activations that the backward of a microbatch reads, per segment."""


def segment_costs(
    part: Graph, places: Sequence[str], cluster: Cluster, kinds: Sequence[int], speed: Floats,
    microbatches: int, states: int,
) -> SegmentCosts:  # fmt: skip
    """Return the costs of all segments of a step.

    Args:
        part: the step of one microbatch.
        places: forward operators after which it may be cut.
        kinds: one rank of each kind of devices.
        speed: the weight of a device of each kind, see :func:`optimistic`.
    """
    graphs, transfers = cut_stages(part, places)
    ranges, skip = stage_ranges(part, places), repeatable(part)
    subsets = [list(s) for s in _subsets(len(kinds))]

    def least(seconds: PerRank) -> Floats:
        return np.array([(speed * seconds)[s].min() for s in subsets])

    phase_of, price = phases(part), _Prices(part, cluster.keep(kinds), states)
    seconds = np.zeros((3, 3, len(graphs), len(kinds)))
    sure = np.zeros((3, len(graphs), len(graphs), len(subsets)))
    for at, graph in enumerate(graphs):
        for node in graph.nodes:
            if node.name in skip:
                continue
            side = _side(phase_of[node.name], node.name in part.backward)
            if is_sum(node) and microbatches == 1:
                continue  # the only term is the sum
            took = price.adding(node) if is_sum(node) else price.node(node)
            side = BACKWARD if is_sum(node) else side
            seconds[:, side, at] += took
            if node.name in ranges:
                sure[side, *ranges[node.name]] += least(took[0] + took[1])
        for i in graph.role("parameter"):
            if i.target in part.gradients:
                took = price.update(i.tensor)
                seconds[:, ONCE, at] += took
                sure[ONCE, at, at] += least(took[0] + took[1])
    parameters = np.array(
        [float(sum(g.tensors[i.tensor].nbytes for i in g.role("parameter"))) for g in graphs]
    )
    trained = np.array(
        [float(sum(g.tensors[i.tensor].nbytes * (2 + states if i.target in part.gradients else 1)
                   for i in g.role("parameter"))) for g in graphs]
    )  # fmt: skip
    maker = {o: n.name for n in part.nodes for o in n.outputs if o}
    crossing, once = np.zeros((2, 2, max(len(places), 1)))
    seen = set[tuple[str, int, bool]]()
    for t in (t for t in transfers if t.once):
        once[int(t.backward), min(t.src, t.dst) : max(t.src, t.dst)] += part.tensors[
            t.tensor
        ].nbytes
    for t in transfers:
        if t.once or (t.backward and maker.get(t.tensor) not in ranges):
            continue
        for place in range(min(t.src, t.dst), max(t.src, t.dst)):
            if t.backward and not (
                ranges[maker[t.tensor]][0] > place and _read_below(part, t.tensor, ranges, place)
            ):
                continue
            if (t.tensor, place, t.backward) not in seen:
                seen.add((t.tensor, place, t.backward))
                crossing[int(t.backward), place] += part.tensors[t.tensor].nbytes
    return SegmentCosts(
        microbatches=microbatches, work_s=seconds, least_s=sure, once_bytes=once, forward_bytes=crossing[0], backward_bytes=crossing[1], parameter_bytes=parameters,
        stored_bytes=trained,
        saved_bytes=np.array([_saved_bytes(part, g) for g in graphs]),
    )  # fmt: skip


def _saved_bytes(part: Graph, graph: Graph) -> float:
    """Return the bytes that a segment's forward makes and the backward reads."""
    made = {
        o for n in graph.nodes
        if n.name not in part.backward and n.op not in FREE
        for o in n.outputs if o
    }  # fmt: skip
    read = {x for n in graph.nodes if n.name in part.backward for x in n.inputs}
    source = {o: n for n in graph.nodes if n.op in FREE for o in n.outputs if o}
    todo, found = list(read), set[str]()
    while todo:  # a view keeps the tensor that it is of
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        if name in source:
            todo += source[name].inputs
    return float(sum(part.tensors[name].nbytes for name in made & found))


def _side(phase: Phase, backward: bool) -> int:
    if phase is Phase.PART:
        return BACKWARD if backward else FORWARD
    return FORWARD if phase is Phase.COUNT else ONCE


def _read_below(
    part: Graph, tensor: str, ranges: Mapping[str, tuple[int, int]], place: int
) -> bool:
    """Return whether an operator that stays before ``place`` reads a gradient."""
    readers = [ranges.get(n.name) for n in part.consumers[tensor]]
    return any(each is not None and each[1] <= place for each in readers)


class _Prices:
    """Seconds of operators on each kind of device alone: rows of busy, launches, issuing by the host."""

    def __init__(self, graph: Graph, kinds: Cluster, states: int) -> None:
        self._graph, self._hardware, self._states = graph, HardwareModel(kinds), states
        self._one = np.ones(kinds.world_size)
        self._known: dict[object, Floats] = {}

    def node(self, node: Node) -> Floats:
        key = self._graph.alike[node.name]
        if key not in self._known:
            work = node_work(node, self._graph)
            names = {n for n in (*node.inputs, *node.outputs) if n is not None}
            nbytes = float(sum(self._graph.tensors[n].nbytes for n in names))
            self._known[key] = self._priced(work, work.flops, nbytes)
        return self._known[key]

    def adding(self, node: Node) -> Floats:
        """Return the seconds of adding a microbatch's term to a sum: two reads and a write."""
        tensor = self._graph.tensors[node.inputs[0]]
        small = 3 * tensor.nbytes <= SMALL_BYTES
        work = Work("memory", tensor.dtype, tensor.numel, 0.0, small)
        return self._priced(work, 0.0, 3.0 * tensor.nbytes)

    def update(self, parameter: str) -> Floats:
        tensor = self._graph.tensors[parameter]
        work = update_work(tensor.dtype, self._states)
        return self._priced(work, work.flops * tensor.numel, work.bytes * tensor.nbytes)

    def _priced(self, work: Work, flops: float, nbytes: float) -> Floats:
        if not work.flops and not work.bytes:  # a view
            return np.zeros((3, len(self._one)))
        seconds = self._hardware.seconds(work, flops * self._one, nbytes * self._one)
        start = self._hardware.seconds(work, 0 * self._one, 1e-12 * self._one)
        return np.array([seconds - start, start, self._hardware.host_s])


def _subsets(kinds: int) -> list[tuple[int, ...]]:
    """Return the nonempty sets of kinds."""
    return [s for n in range(1, kinds + 1) for s in combinations(range(kinds), n)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeconds:
    """Seconds of all segments from one place on, on all groups: dims [last segment, group].

    ``each_s`` is of one microbatch before the next stage may work, and after it, if it must; ``all_s`` is
    of a whole step.
    """

    each_s: Floats
    all_s: Floats


Priced = Callable[[int], GroupSeconds]
"""First segment -> seconds of the segments from it to each later one."""


def optimistic(costs: SegmentCosts, speed: Floats, devices: npt.NDArray[np.int64]) -> Priced:
    """Return seconds that no program of a stage falls below.

    For any weights of a group's devices that add up to 1, the slowest device takes at least the weighted
    mean of all. An operator adds to it at least its cheapest weighted time, wherever it is split.

    Args:
        speed: of one device of each kind, the weights.
        devices: of each kind in each group, shape [groups, kinds].
    """
    number = {s: k for k, s in enumerate(_subsets(len(speed)))}
    present = [tuple(np.flatnonzero(row).tolist()) for row in devices]
    column = np.array([number.get(p, 0) for p in present])
    power = devices @ speed
    power[power == 0] = 1e-300

    def priced(first: int) -> GroupSeconds:
        within = costs.least_s[:, first:, first:].sum(axis=1)  # by the last segment
        total = np.cumsum(within, axis=1)[:, :, column] / power
        each = total[FORWARD] + total[BACKWARD]
        # Behind the last stage's end there may be nothing to do: gradients of weights may be its last.
        return GroupSeconds(each_s=total[FORWARD], all_s=costs.microbatches * each + total[ONCE])

    return priced


def together_s(work_s: Floats, devices: npt.NDArray[np.int64]) -> Floats:
    """Return the seconds of groups, dims [..., group]: each as one device of the sum of its speeds.

    Args:
        work_s: dims [busy, launches, issuing by the host; ..., kind].
        devices: of each kind in each group, shape [groups, kinds].
    """
    busy, launches, issuing = work_s[..., None, :]
    speed = np.maximum((devices / np.maximum(busy, 1e-15)).sum(axis=-1), 1e-300)
    present = devices > 0
    computing = 1.0 / speed + (present * launches).max(axis=-1)
    found: Floats = np.maximum(computing, (present * issuing).max(axis=-1))
    return found


def estimated(
    costs: SegmentCosts, devices: npt.NDArray[np.int64], excess: Floats,
    reduce_s: Callable[[Floats], Floats],
) -> Priced:  # fmt: skip
    """Return seconds by which pipelines are chosen, those of :func:`together_s`.

    Args:
        excess: of each group, the factor by which its microbatches take longer than that.
        reduce_s: bytes of parameters, per segment -> seconds of reducing their gradients, per group.
    """

    def side(which: int, first: int) -> Floats:
        return together_s(np.cumsum(costs.work_s[:, which, first:], axis=1), devices)

    def priced(first: int) -> GroupSeconds:
        each = excess * (side(FORWARD, first) + side(BACKWARD, first))
        once = side(ONCE, first) + reduce_s(np.cumsum(costs.parameter_bytes[first:]))
        return GroupSeconds(each_s=each, all_s=costs.microbatches * each + once)

    return priced
