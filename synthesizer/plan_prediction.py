"""Predictions for a plan file: a candidate's figures, its alternatives, its largest batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hap.ir.axes import Axes
from hap.ir.graph import Graph, Tensor
from hap.ir.prediction import (
    Alternative,
    Bound,
    Collective,
    OperatorCost,
    Prediction,
    RankPrediction,
)
from hap.ir.program import BETWEEN, Compute, Convert
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.cost_structure import nodes_and_rows
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.operator_work import FLOPS, node_work
from hap.synthesizer.cost.peak_memory import at_peak, memory
from hap.synthesizer.rules import Call, Row
from hap.synthesizer.rules.textual_rules import lines_of, rule_origin
from hap.synthesizer.schedule.event_simulator import schedule, usage
from hap.synthesizer.shares.share_solver import proportional
from hap.synthesizer.synthesize import Synthesizer


def predict(
    graph: Graph, candidate: Candidate, cost: CostModel, alternatives: tuple[Alternative, ...],
    bounds: tuple[Bound, ...] = (),
) -> Prediction:  # fmt: skip
    """Return the predictions of a plan file; the seconds by use are those of the simulated step."""
    line = candidate.timeline
    used = usage(schedule(graph, line.program, cost))
    work = _work(graph, candidate, cost)
    ranks = tuple(
        RankPrediction(
            work=float(work[r] / max(work.sum(), 1.0)),
            stored=float(line.stored_bytes[r] / max(line.stored_bytes.sum(), 1.0)),
            compute_s=float(used.compute_s[r]), wait_s=float(used.waiting_s[r] + used.idle_s[r]),
            peak_bytes=round(float(line.peak_bytes[r])), memory_bytes=device.memory_bytes,
        )
        for r, device in enumerate(cost.hardware.cluster.devices)
    )  # fmt: skip
    return Prediction(
        step_s=line.step_s, communicate_s=float(used.communicate_s.max()),
        hidden_s=float(used.overlapped_s[int(np.argmax(used.compute_s))]), ranks=ranks,
        collectives=_collectives(graph, candidate, cost) if len(ranks) > 1 else (),
        alternatives=alternatives, bounds=bounds,
    )  # fmt: skip


def bounds(
    synthesizer: Synthesizer, candidate: Candidate, prove: int = 0, left: bool = False
) -> tuple[Bound, ...]:
    """Return proved bounds of a candidate on the synthesizer's devices.

    Args:
        prove: extra searches for the bound of all shares.
        left: whether the plan leaves out other devices, which the bounds do not cover.
    """
    on = " on the devices in use" if left else ""
    step_s = candidate.timeline.step_s
    everything = synthesizer.proved(step_s, prove)
    here = synthesizer.fixed(candidate.shares)
    proofs = (
        (f"all programs{on}, any shares of every axis", *everything),
        # A bound for all shares also holds for these shares.
        (f"all programs{on} with these shares", max(here.bound_s, everything[0]), here.searches),
    )
    found = []
    for covers, bound_s, searches in proofs:
        assert bound_s <= step_s * (1 + 1e-9), f"{covers}: the bound is above the plan"
        gap = max(0.0, 1 - bound_s / step_s) if step_s else 0.0
        found.append(Bound(covers=covers, step_s=bound_s, gap=gap, searches=searches))
    return tuple(found)


def alternatives(
    graph: Graph, found: Mapping[str, Candidate | str],
    fewer: Mapping[str, tuple[str, Candidate]], notes: Mapping[str, str],
) -> tuple[Alternative, ...]:  # fmt: skip
    """Return the rows beside the plan on the screen; ``notes`` by the rows' names."""
    rows = []
    for name, candidate in found.items():
        if isinstance(candidate, str):
            rows.append(Alternative(name=name, step_s=0.0, fits=False, note=candidate))
        else:
            rows.append(_alternative(graph, name, candidate, notes.get(name, "")))
    return (*rows, *(_alternative(graph, name, c, which) for name, (which, c) in fewer.items()))


def _alternative(graph: Graph, name: str, candidate: Candidate, note: str) -> Alternative:
    line = candidate.timeline
    moved = candidate.program.collectives if len(candidate.room) > 1 else ()
    return Alternative(
        name=name, step_s=line.step_s, fits=candidate.fits, note=note,
        communicate_s=line.communicate_s,
        communicate_bytes=sum(graph.tensors[c.tensor].nbytes for c in moved),
        peak_bytes=round(float(line.peak_bytes.max())),
        lacking_bytes=round(float(candidate.lacking_bytes.max())),
    )  # fmt: skip


def row_of(name: str, prediction: Prediction) -> Alternative:
    """Return a row for another plan."""
    return Alternative(
        name=name, step_s=prediction.step_s, fits=True, communicate_s=prediction.communicate_s,
        communicate_bytes=sum(c.nbytes for c in prediction.collectives),
        peak_bytes=max(rank.peak_bytes for rank in prediction.ranks),
    )  # fmt: skip


def peak_kinds(
    graph: Graph, candidate: Candidate, cost: CostModel, rank: int
) -> list[tuple[str, int]]:
    """Return the contents of a rank's memory at its peak: (kind, bytes), the largest first."""
    run = candidate.timeline
    peak = at_peak(graph, run.program, cost, run.until)
    found = [(kind, round(float(nbytes[rank]))) for kind, nbytes in peak.items()]
    return sorted((entry for entry in found if entry[1]), key=lambda entry: -entry[1])


def largest_batch(axis: str, candidate: Candidate, cost: CostModel) -> int:
    """Return an estimate of the largest global batch for which the program fits; may be 0."""
    graph, axes, hardware = cost.graph, cost.axes, cost.hardware
    limit = np.array([d.memory_bytes for d in hardware.cluster.devices], dtype=np.float64)
    low, high = 0, axes.axes[axis].units
    while high - low > 1:
        units = (low + high) // 2
        smaller = _resized(graph, axes, axis, units)
        parts = np.array(candidate.shares[axis], dtype=np.float64)
        shares = {**candidate.shares, axis: proportional(units, parts)}
        resized = CostModel(smaller, axes, hardware, shares, cost.optimizer_states)
        fits = (memory(smaller, candidate.program, resized)[1] <= limit).all()
        low, high = (units, high) if fits else (low, units)
    return low


def _resized(graph: Graph, axes: Axes, axis: str, units: int) -> Graph:
    """Return the graph with another number of units on one axis; its operators are unchanged."""

    def resize(t: Tensor) -> Tensor:
        shape = tuple(
            size // axes.axes[axis].units * units if axes.of.get((t.name, d)) == axis else size
            for d, size in enumerate(t.shape)
        )
        return replace(t, shape=shape)

    return replace(graph, tensors={name: resize(t) for name, t in graph.tensors.items()})


def _work(graph: Graph, candidate: Candidate, cost: CostModel) -> PerRank:
    """Return each rank's floating-point operations in products; replicated ones count each time."""
    total: PerRank = np.zeros(cost.hardware.cluster.world_size)
    for step in candidate.program.instructions:
        if isinstance(step, Compute) and graph.by_name[step.node].op in FLOPS:
            node = graph.by_name[step.node]
            part = cost.parts.of_work(node, Row(step.outs, step.ins))
            total = total + node_work(node, graph).flops * part
    return total


def unruled(candidate: Candidate, cost: CostModel) -> tuple[OperatorCost, ...]:
    """Return the costs of operators with derived or discovered rows, or that are replicated."""
    graph = cost.graph
    seconds: dict[tuple[str, str], list[PerRank]] = {}
    for step in candidate.program.instructions:
        if not isinstance(step, Compute) or graph.by_name[step.node].op not in graph.ruled:
            continue
        node = graph.by_name[step.node]
        lines = lines_of(Call(node=node, tensors=graph.tensors), graph.rules)
        came = rule_origin(lines or ("origin replicated",))
        if came:
            each = cost.compute(node, Row(step.outs, step.ins))
            seconds.setdefault((came, node.op), []).append(each)
    return tuple(
        OperatorCost(op=op, origin=came, calls=len(each), seconds=float(np.sum(each, axis=0).max()))
        for (came, op), each in sorted(seconds.items())
    )  # fmt: skip


def _collectives(graph: Graph, candidate: Candidate, cost: CostModel) -> tuple[Collective, ...]:
    found = []
    for group in candidate.timeline.program.groups(graph):
        nodes = nodes_and_rows(graph, group)
        crossing = cost.cross(nodes) if nodes else None
        if crossing is not None:
            node = nodes[0][0]
            found.append(
                Collective(
                    tensor=node.inputs[0], fused=len(nodes),
                    kind=f"{node.op.removeprefix(BETWEEN)} between machines",
                    nbytes=sum(graph.tensors[n.inputs[0]].nbytes for n, _ in nodes),
                    implementation=str(node.args[-1]), seconds=crossing[0],
                    runner_up="", runner_up_s=0.0,
                )
            )  # fmt: skip
        converts = [s for s in group if isinstance(s, Convert) and not s.local]
        if not converts:
            continue
        choices = cost.convert_group(converts)
        step = converts[0]
        first = next(c for c in choices if c.implementation == step.implementation)
        other = next(c for c in choices if c is not first)
        found.append(
            Collective(
                tensor=step.tensor, fused=len(converts), kind=step.kind,
                nbytes=sum(graph.tensors[s.tensor].nbytes for s in converts),
                implementation=first.implementation, seconds=first.seconds,
                runner_up=other.implementation, runner_up_s=other.seconds,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda c: -c.seconds))
