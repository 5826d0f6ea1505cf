"""Bytes of a stage: what its ranks hold, with several microbatches in flight."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hap.ir.delayed_weights import delayable
from hap.ir.graph import Graph
from hap.ir.last_turn import all_after
from hap.ir.microbatch import EACH, Phase, is_sum, phases
from hap.ir.pipeline_order import AHEAD, PENDING
from hap.ir.program import Compute, Convert, Program, Value, reads, writes
from hap.ir.returned_sums import returned_conversions, returned_values
from hap.ir.weight_gathers import before_microbatches
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.cost_structure import structure_of
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.liveness import Storage
from hap.synthesizer.cost.peak_memory import memory, while_updating


class StageBytes(NamedTuple):
    """Bytes per rank of a stage.

    Attributes:
        stored_bytes: outside the microbatches.
        saved_bytes: what the forward of a microbatch keeps for its backward.
        peak_bytes: with the microbatches in flight, and gradients of weights that wait.
        waiting_bytes: what is kept for the part of a microbatch's backward that may be delayed.
        sums_bytes: sums over microbatches, beside the terms of one.
        message_bytes: of other microbatches, on their way to or from the stage.
    """

    stored_bytes: PerRank
    saved_bytes: PerRank
    peak_bytes: PerRank
    waiting_bytes: PerRank
    sums_bytes: PerRank
    message_bytes: PerRank


def stage_bytes(
    part: Graph, program: Program, cost: CostModel, microbatches: int, in_flight: int,
    delay: int = 0, *, recompute: bool, each: Collection[int] = (),
) -> StageBytes:  # fmt: skip
    """Return the bytes of a stage's program.

    Args:
        cost: of a microbatch.
        microbatches: of a step.
        in_flight: microbatches whose backward has not ended.
        delay: microbatches for which gradients of weights wait.
        recompute: whether the forward runs again.
        each: gathers of weights that run in each microbatch.
    """

    def nbytes(values: Iterable[Value]) -> PerRank:
        found: PerRank = np.zeros(cost.hardware.cluster.world_size)
        for v in values:
            found = found + cost.local_bytes(part.tensors[v.tensor], v.placement)
        return found

    early = before_microbatches(part, program, each)
    until = last_groups(part, program, early)
    made = structure_of(part, program, cost).storages
    always = _throughout(part, program, made, early)
    stored, peak = memory(part, program, cost, until=until, updating=False, throughout=always)
    updating = sum(while_updating(part, program, cost).values(), nbytes([]))
    ahead = min(in_flight, microbatches) - 1
    received, of_node = _received(part, program), phases(part)
    held = _held(program, [s for s in made if s.born not in early], of_node, recompute=recompute)
    saved = nbytes([*received[False], *held])
    waiting = nbytes(_waiting(part, program, delayable(part, program), early))
    sums = nbytes(_terms(part, program) if microbatches > 1 else [])
    crossing = [*received[False], *received[True], *returned_values(part, program, summed=False)]
    beside = min(AHEAD, microbatches - 1) * nbytes(crossing)
    peak = peak + ahead * saved + delay * waiting + sums + beside
    return StageBytes(
        stored_bytes=stored, saved_bytes=saved, peak_bytes=np.maximum(peak, updating),
        waiting_bytes=waiting, sums_bytes=sums, message_bytes=beside,
    )  # fmt: skip


def _throughout(
    part: Graph, program: Program, made: Sequence[Storage], early: Collection[int]
) -> set[int]:
    """Return the instructions before the microbatches whose results every microbatch reads."""
    once = all_after(part, program).union(early)
    return {s.born for s in made if s.born in early and (s.kept or not once.issuperset(s.reads))}


def last_groups(part: Graph, program: Program, early: Collection[int] = ()) -> list[int]:
    """Return the last group that may begin before each group has ended.

    A collective of a microbatch has ended where computing reads its result, or waits because enough later ones
    were issued.

    Args:
        early: instructions that run before the microbatches.
    """
    once = all_after(part, program).union(early)
    bounds, under_way, issued = program.bounds(part), dict[int, set[Value]](), list[int]()
    found, backward = [*range(len(bounds))], False

    def end(groups: Iterable[int], at: int) -> None:
        for k in [*groups]:
            found[k] = at
            del under_way[k]

    for at, (first, stop) in enumerate(bounds):
        group = program.instructions[first:stop]
        collective = isinstance(step := group[0], Convert) and not step.local
        if group[0].backward != backward:
            backward = group[0].backward
            end(under_way, at - 1)
            issued.clear()
        elif not collective and first not in once:
            read = {*reads(part, group)}
            end((k for k, made in under_way.items() if not made.isdisjoint(read)), at - 1)
        if collective and not once.issuperset(range(first, stop)):
            under_way[at] = {*writes(part, group)}
            issued.append(at)
            if len(issued) > PENDING:
                end((k for k in under_way if k <= issued[-1 - PENDING]), at)
    end(under_way, len(bounds) - 1)
    return found


def _received(part: Graph, program: Program) -> dict[bool, list[Value]]:
    """Return the values of a microbatch that other stages send, by whether the backward alone reads them."""
    found: dict[bool, list[Value]] = {False: [], True: []}
    for i in part.role("received"):
        if i.target == EACH:
            late = all(n.name in part.backward for n in part.consumers[i.tensor])
            found[late].append(Value(i.tensor, program.inputs[i.tensor]))
    return found


def _terms(part: Graph, program: Program) -> list[Value]:
    """Return the values of a microbatch that are added up over all of them."""
    computed = (step for step in program.instructions if isinstance(step, Compute))
    sums = [step.reads(part)[0] for step in computed if is_sum(part.by_name[step.node])]
    sent = [program.instructions[k].reads(part)[0] for k in returned_conversions(part, program)]
    return list(dict.fromkeys([*sums, *sent]))


def _waiting(
    part: Graph, program: Program, late: frozenset[int], early: frozenset[int]
) -> list[Value]:
    """Return the values of a microbatch that its delayed instructions read."""
    of_node = phases(part)
    made, found = set[Value](), dict[Value, None]()
    for k, step in enumerate(program.instructions):
        ours = isinstance(step, Convert) or of_node[step.node] in (Phase.ONCE, Phase.PART)
        if k in late:
            found.update(dict.fromkeys(v for v in step.reads(part) if v in made))
        elif ours and k not in early and not step.aliases(part):
            made.update(step.writes(part))
    return list(found)


def _held(
    program: Program, storages: Sequence[Storage], of_node: Mapping[str, Phase], *, recompute: bool
) -> list[Value]:
    """Return what a microbatch's forward makes and holds: what it sends, and what its backward reads."""
    found = list[Value]()
    for each in storages:
        step = program.instructions[each.born]
        ours = isinstance(step, Convert) or of_node[step.node] in (Phase.ONCE, Phase.PART)
        saved = not recompute and any(program.instructions[k].backward for k in each.reads)
        if ours and not step.backward and (each.kept or saved):
            found.append(each.value)
    return found
