"""Seconds and bytes of a stage: its program on its devices, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hap.cluster.work import Work
from hap.ir.axes import Shares
from hap.ir.delayed_weights import delayable
from hap.ir.graph import Graph, Input, Node
from hap.ir.last_turn import end_conversions
from hap.ir.microbatch import BEFORE, EACH, SUMMED, Phase, is_of_each, is_sum, phases
from hap.ir.program import Compute, Convert, Instruction, Program, Value
from hap.ir.returned_sums import returned_conversions
from hap.ir.shared_pieces import in_pieces
from hap.ir.weight_gathers import forward_gathers
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.stages.gradient_buckets import last_turn
from hap.synthesizer.stages.stage_memory import stage_bytes
from hap.synthesizer.stages.turn_seconds import TimedProgram

_PHASES = ("before", "shared", "forward", "backward", "returned", "after")


class SumsOverTime:
    """Prices of sums over microbatches in a search of a stage: they do not depend on the program."""

    def cross(self, group: Sequence[tuple[Node, Row]]) -> tuple[float, int] | None:
        return (0.0, 0) if is_sum(group[0][0]) else None

    def searched_s(self, node: Node, row: Row) -> float | None:
        return 0.0 if is_sum(node) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """Figures of a stage's program; vectors have an entry per rank of the stage.

    Attributes:
        before_s, shared_s, forward_s, backward_s, after_s, early_s, hidden_s, weights_hidden_s, weights_s, split_s:
            as in :class:`hap.synthesizer.schedule.pipeline_simulator.StageSeconds`; the update is in
            ``after_s``.
        returned_s: the part of ``after_s`` before sums for other stages can be sent.
        pieces: (seconds, pieces) of what is converted beside its transfer, by tensor: it is in no other figure
            but ``communicate_s``. See :mod:`hap.ir.shared_pieces`.
        compute_s: computing in all of a step's microbatches, without collectives.
        communicate_s: collectives inside the stage in all of a step.
        overlapped_s: the part of them that overlaps with computing in the microbatches.
        stored_bytes, saved_bytes, peak_bytes, waiting_bytes, sums_bytes, message_bytes: as in
            :class:`hap.synthesizer.stages.stage_memory.StageBytes`.
    """

    before_s: float
    shared_s: float
    forward_s: float
    backward_s: float
    after_s: float
    early_s: float
    hidden_s: float
    weights_hidden_s: float
    returned_s: float
    pieces: Mapping[str, tuple[float, int]]
    compute_s: PerRank
    communicate_s: float
    overlapped_s: float
    stored_bytes: PerRank
    saved_bytes: PerRank
    peak_bytes: PerRank
    weights_s: float
    split_s: float
    waiting_bytes: PerRank
    sums_bytes: PerRank
    message_bytes: PerRank
    in_flight: int = 1
    delay: int = 0
    recompute: bool = False
    gather_each: bool = False

    def with_in_flight(self, count: int, delay: int = 0) -> StageFigures:
        """Return the figures with other microbatches in flight and another delay."""
        more = (count - self.in_flight) * self.saved_bytes
        more = more + (delay - self.delay) * self.waiting_bytes
        return replace(self, peak_bytes=self.peak_bytes + more, in_flight=count, delay=delay)

    def most_delay(self, memory_bytes: Sequence[float], microbatches: int) -> int:
        """Return the largest delay of gradients of weights that fits the ranks' memory."""
        spare = np.array(memory_bytes, dtype=np.float64) - self.peak_bytes
        return int(min(microbatches, max(0.0, (spare / np.maximum(self.waiting_bytes, 1.0)).min())))

    def most_in_flight(self, memory_bytes: Sequence[float], microbatches: int) -> int:
        """Return how many microbatches in flight fit the ranks' memory; 0 if not even one does."""
        one = self.with_in_flight(1)
        spare = np.array(memory_bytes, dtype=np.float64) - one.peak_bytes
        if (spare < 0).any():
            return 0
        further = np.floor(spare / np.maximum(one.saved_bytes, 1.0))
        return int(min(microbatches, 1 + further.min()))


def stage_cost(
    part: Graph, program: Program, shares: Shares, hardware: HardwareModel, states: int
) -> CostModel:
    """Return the cost model of a stage's ranks, for a microbatch."""
    return CostModel(part, program.own_axes(), hardware, shares, states, crossing=SumsOverTime())


def figures(
    part: Graph, program: Program, shares: Shares, hardware: HardwareModel, states: int,
    microbatches: int, in_flight: int, delay: int = 0, recompute: bool = False,
    gather_each: bool = False,
) -> StageFigures:  # fmt: skip
    """Return the figures of a stage's program; ``recompute``, ``gather_each``: see :class:`Stage`."""
    cost = stage_cost(part, program, shares, hardware, states)
    world = hardware.cluster.world_size
    work = {phase: np.zeros((2, world)) for phase in _PHASES}  # computing, and issuing by the host
    slowest, moved, host_s = dict.fromkeys(work, 0.0), dict.fromkeys(work, 0.0), hardware.host_s
    of_node = phases(part)
    made = {Value(i.tensor, program.inputs[i.tensor]): _start(i) for i in part.inputs}
    at_end = end_conversions(part, program)
    late, once = delayable(part, program), returned_conversions(part, program)
    split, pieces = in_pieces(part, program, world), dict[str, tuple[float, int]]()
    each = forward_gathers(part, program) if gather_each else frozenset[int]()
    turns: dict[str, set[int]] = {"forward": set(), "backward": set()}
    timed = TimedProgram(part, program, cost)
    for first, end, seconds, messages in timed.groups:
        group = program.instructions[first:end]
        in_each = not each.isdisjoint(range(first, end))
        for step in group:
            name = "forward" if in_each else _phase(part, step, of_node, made)
            made.update(dict.fromkeys(step.writes(part), name))
        if name == "backward" and once.issuperset(range(first, end)):
            name = "returned"
        elif at_end.issuperset(range(first, end)):
            name = "after"
        if first in split and isinstance(step := group[0], Convert):
            more_s = (split[first] - 1) * cost.start_s(step)
            pieces[step.tensor] = float(seconds.max()) + more_s, split[first]
        elif messages:
            moved[name] += float(seconds.max())
            work[name][1] += host_s
        else:
            work[name] += seconds, host_s * (seconds > 0)
        if name in turns and first not in split:
            turns[name].update(range(first, end))
    adding = _adding(part, program, cost)
    work["backward"] += adding
    for i in part.role("parameter"):
        if i.target in part.gradients:
            seconds = cost.update(part.tensors[i.tensor], program.inputs[i.tensor])
            work["after"] += seconds, host_s * (seconds > 0)
    for name, (computing, issuing) in work.items():
        slowest[name] = max(float(computing.max()) + moved[name], float(issuing.max()))
    one_by_one_s = {name: slowest[name] for name in turns}
    backward = turns["backward"]
    slowest["forward"] = timed.turn_s(turns["forward"])
    slowest["backward"] = timed.turn_s(backward, adding=adding)
    urgent_s = timed.turn_s(backward - late) if late else slowest["backward"]
    later_s = timed.turn_s(backward & late, adding=adding) if late else 0.0
    weights_s = max(0.0, slowest["backward"] - urgent_s)
    if recompute:
        work["backward"] += work["forward"]
        for each_s in (moved, slowest, one_by_one_s):
            each_s["backward"] += each_s["forward"]
    overlapped_s = sum(max(0.0, one_by_one_s[name] - slowest[name]) for name in turns)

    held = stage_bytes(
        part, program, cost, microbatches, in_flight, delay, recompute=recompute, each=each
    )
    times = {"forward": microbatches, "backward": microbatches}
    return StageFigures(
        before_s=slowest["before"], shared_s=slowest["shared"], forward_s=slowest["forward"],
        backward_s=slowest["backward"], after_s=slowest["returned"] + slowest["after"],
        **last_turn(timed)._asdict(), overlapped_s=microbatches * overlapped_s,
        returned_s=slowest["returned"], pieces=pieces,
        compute_s=sum((times.get(n, 1) * w[0] for n, w in work.items()), np.zeros(world)),
        communicate_s=sum(times.get(n, 1) * s for n, s in moved.items())
        + sum(s for s, _ in pieces.values()),
        weights_s=weights_s, split_s=later_s - weights_s,
        **held._asdict(),
        in_flight=min(in_flight, microbatches), delay=delay, recompute=recompute,
        gather_each=gather_each,
    )  # fmt: skip


def least_gathering(
    of_stage: Callable[[bool], StageFigures], memory_bytes: Sequence[float]
) -> StageFigures:
    """Return a stage's figures that gather weights in each microbatch only if nothing fits otherwise.

    Args:
        of_stage: whether weights are gathered in each microbatch -> the figures.
    """
    once = of_stage(False)
    return once if once.most_in_flight(memory_bytes, 1) else of_stage(True)


def _adding(part: Graph, program: Program, cost: CostModel) -> PerRank:
    """Return the seconds of adding a microbatch's terms, two reads and a write, and of issuing that."""
    hardware = cost.hardware
    seconds: PerRank = np.zeros((2, hardware.cluster.world_size))
    for step in program.instructions:
        if isinstance(step, Compute) and is_sum(part.by_name[step.node]):
            (term,) = step.reads(part)
            tensor = part.tensors[term.tensor]
            held = cost.local_bytes(tensor, term.placement)
            work = Work("memory", tensor.dtype, tensor.numel, 0.0)
            seconds += hardware.seconds(work, 0 * held, 3 * held), hardware.host_s * (held > 0)
    return seconds


def _start(i: Input) -> str:
    if i.role == "received":
        return {EACH: "forward", BEFORE: "shared", SUMMED: "after"}[i.target]
    return "forward" if is_of_each(i) else "before"


def _phase(
    part: Graph, step: Instruction, of_node: Mapping[str, Phase], made: dict[Value, str]
) -> str:
    side = "backward" if step.backward else "forward"
    if isinstance(step, Compute):
        phase = of_node[step.node]
        if phase is Phase.ONCE:
            read = {made.get(v) for v in step.reads(part)}
            return next((name for name in ("forward", "shared") if name in read), "before")
        return {Phase.PART: side, Phase.COUNT: "forward", Phase.END: "after"}.get(phase, "before")
    source = made[Value(step.tensor, step.src)]
    return source if source == "after" or not step.backward else side
