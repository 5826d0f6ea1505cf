"""Which operators does the cost model misprice? One rank's step, node by node, against its prices.

    python -m benchmarks.op_errors [--case bert] [--shapes]

First measures this device as ``hap profile`` does, and fits it. Then runs the emitted graphs of
a plan for it with an interpreter that times every node, and prints per operator the measured
seconds of a step, the predicted ones, and what the difference is of the whole. All seconds are
processor time of one thread, medians over rounds, so that what else runs on the machine counts
less; what remains is what the *form* of the prices gets wrong.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import hap
from benchmarks.one_rank import CASES, Case
from hap.batch import call
from hap.cluster import Cluster, Link
from hap.graph import Graph
from hap.plan import Plan
from hap.profiler.devices import types
from hap.profiler.measure import FULL, memory_bytes, seconds_per_call
from hap.profiler.probes import Arena, probes
from hap.profiler.samples import OpRecord, Rank
from hap.program import Compute
from hap.runtime.launch import keep_memory
from hap.runtime.module import HapModule
from hap.synthesizer.cost import CostModel, Machine
from hap.synthesizer.rules.base import Row
from hap.synthesizer.space import build_space
from hap.terminal import emit, table
from hap.units import format_seconds

WARM_UP = 2


@dataclass(slots=True)
class Line:
    """An operator's seconds in one step."""

    count: int = 0
    measured_s: float = 0.0
    predicted_s: float = 0.0


class Timed(fx.Interpreter):
    """Runs a graph and keeps the processor seconds of every node, a list per node."""

    def __init__(self, module: fx.GraphModule, seconds: dict[fx.Node, list[float]]) -> None:
        super().__init__(module)
        self._seconds = seconds

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        start = time.thread_time()
        result = getattr(self, n.op)(n.target, args, kwargs)
        self._seconds[n].append(time.thread_time() - start)
        return result


def main() -> None:
    """Print a table per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", help="part of the name of a case; default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", action="store_true", help="a line per shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    cluster = this_device()
    for case in CASES:
        if options.case and options.case not in case.name:
            continue
        lines, step_s = errors(case, cluster, options.rounds, options.shapes)
        show(case.name, lines, step_s)


def this_device() -> Cluster:
    """This process's device, measured and fitted; the residuals are printed."""
    device = torch.device("cpu")
    arena, records = Arena(device), []
    for probe in probes(device):
        seconds = seconds_per_call(probe.make(arena), device, FULL, time.thread_time)
        records.append(OpRecord(name=probe.name, work=probe.work, seconds=(tuple(seconds),)))
    rank = Rank(node="here", kind="cpu", memory_bytes=memory_bytes(device, 1))
    (found,) = types([rank], records, "here and now")
    rows = [
        (
            r.name,
            r.kind,
            format_seconds(r.measured_s),
            format_seconds(r.predicted_s),
            f"{r.error:+.0%}",
            f"{r.spread:.0%}",
        )
        for r in found.residuals
    ]
    head = ("probe", "kind", "measured", "fitted", "error", "spread")
    emit(table(head, rows, right=range(2, 6)))
    print(found.device.flops_per_s, found.device.memory_bytes_per_s, found.device.launch_s)
    print(dict(found.device.efficiency))
    link = Link(1e9, 0.0)
    return Cluster("here", (replace(found.device, node="here"),), {"here": link}, link)


def errors(
    case: Case, cluster: Cluster, rounds: int, shapes: bool
) -> tuple[dict[str, Line], float]:
    """Per operator its seconds in a step, and the step's seconds without an interpreter."""
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    plan = hap.plan(model, batch, cluster, loss=case.loss, optimizer=case.optimizer)
    module = hap.compile(model, plan, loss=case.loss)
    optimizer = case.optimizer(module.parameters())
    mine = plan.local_batch(batch, 0)
    node_s: dict[fx.Node, list[float]] = defaultdict(list)
    update_s: list[float] = []
    step_s: list[float] = []
    whole = module._emitted
    for number in range(rounds + WARM_UP):
        for timed in (False, True):
            graphs = (
                (Timed(whole.forward, node_s), Timed(whole.backward, node_s)) if timed else None
            )
            with _graphs(module, graphs):
                start = time.thread_time()
                optimizer.zero_grad()
                loss = call(module, mine)
                loss.backward()
                update = time.thread_time()
                optimizer.step()
                loss.item()
                end = time.thread_time()
            if number >= WARM_UP and not timed:
                step_s.append(end - start)
                update_s.append(end - update)
    lines: dict[str, Line] = defaultdict(Line)
    prices = dict(_prices(plan))
    names = dict(_names(plan.graph, shapes))
    for node, seconds in node_s.items():
        made = _made(node)
        owner = plan.graph.producer.get(made) if made else None
        key = names[owner.name] if owner else f"({node.op} {_target(node)})"
        lines[key].measured_s += statistics.median(seconds[WARM_UP:])
        if owner and node.target is not operator.getitem:
            lines[key].count += 1
            lines[key].predicted_s += prices[owner.name]
    line = lines["optimizer"]
    line.measured_s, line.predicted_s = statistics.median(update_s), prices["optimizer"]
    return lines, statistics.median(step_s)


def _target(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) and node.op == "call_method" else ""


def _made(node: fx.Node) -> str | None:
    """The tensor of the graph that a node makes, itself or through its parts."""
    if "value" in node.meta:
        return str(node.meta["value"].tensor)
    for user in node.users:
        if "value" in user.meta and user.target is operator.getitem:
            return str(user.meta["value"].tensor)
    return None


class _graphs:
    """Puts interpreters in the place of a module's graphs, and takes them away."""

    def __init__(self, module: HapModule, graphs: tuple[Timed, Timed] | None) -> None:
        self._module, self._graphs, self._kept = module, graphs, module._emitted

    def __enter__(self) -> None:
        if self._graphs:
            forward, backward = self._graphs
            self._module._emitted = replace(
                self._kept,
                forward=forward.run,
                backward=backward.run,  # type: ignore[arg-type]
            )

    def __exit__(self, *_: object) -> None:
        self._module._emitted = self._kept


def _prices(plan: Plan) -> Iterator[tuple[str, float]]:
    """Predicted seconds by node, and of the optimizer."""
    space = build_space(plan.graph)
    cost = CostModel(
        plan.graph, space.axes, Machine(plan.cluster), plan.shares, plan.optimizer_states
    )
    for step in plan.program.instructions:
        if isinstance(step, Compute):
            node = plan.graph.by_name[step.node]
            yield node.name, float(cost.compute(node, Row(step.outs, step.ins)).max())
    yield "optimizer", sum(
        float(cost.update(plan.graph.tensors[i.tensor], plan.program.inputs[i.tensor]).max())
        for i in plan.graph.role("parameter") if i.target in plan.graph.gradients
    )  # fmt: skip


def _names(graph: Graph, shapes: bool) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        name = node.op.removeprefix("aten.")
        if shapes:
            sizes = [str(list(graph.tensors[t].shape)) for t in node.inputs]
            name += " " + " ".join(sizes)
        yield node.name, name


def show(name: str, lines: dict[str, Line], step_s: float) -> None:
    """A case's table, longest first."""
    total = Line(
        sum(line.count for line in lines.values()),
        sum(line.measured_s for line in lines.values()),
        sum(line.predicted_s for line in lines.values()),
    )
    rows = [
        (
            key, str(line.count), format_seconds(line.measured_s),
            f"{line.measured_s / total.measured_s:.1%}", format_seconds(line.predicted_s),
            f"{line.predicted_s / line.measured_s:.2f}" if line.measured_s else "",
            f"{(line.predicted_s - line.measured_s) / total.measured_s:+.1%}",
        )
        for key, line in sorted(lines.items(), key=lambda entry: -entry[1].measured_s)
        if line.measured_s > 1e-3 * total.measured_s
        or line.predicted_s > 1e-3 * total.measured_s
    ]  # fmt: skip
    print(
        f"\n{name}: step {format_seconds(step_s)}, its nodes {format_seconds(total.measured_s)},"
        f" predicted {format_seconds(total.predicted_s)}"
        f" ({total.predicted_s / step_s - 1:+.1%} of the step)"
    )
    head = ("operator", "calls", "measured", "of all", "predicted", "ratio", "error")
    emit(table(head, rows, right=range(1, 7)))


if __name__ == "__main__":
    main()
