"""Errors of a predicted step by operator and rank.

    python -m benchmarks.step_errors benchmarks/models/bert.py:race CLUSTER --profile measured.yaml
    python -m benchmarks.step_errors ... --in-turn     nothing overlaps: prices alone
    python -m benchmarks.step_errors ... --shapes      a line per shape

Measures the emulated cluster, unless ``--profile`` exists, plans for it, or takes ``--plan``, and
trains on it with a clock read after each operator. Prints, next to the simulated step: each rank's
computing, waiting and updating; operators by the error of their prediction, for the rank
that computes longest; and collectives, from the last rank's start to the last rank's end,
first by kind and then in order. Wall seconds
stand next to processor seconds over the rank's fraction of a core: if the latter are less, the
kernel or other work kept the rank waiting.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.contenders.base import built, optimizer
from benchmarks.racing import plans
from benchmarks.racing.cell import global_batches
from benchmarks.racing.profiled import profiled
from benchmarks.stopwatch import REST, WAIT, Stopwatch, watched
from hap import api
from hap.capture.model_file import ModelFile, load_model_file
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.ir.batch import call
from hap.ir.graph import Graph, Input
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert, Instruction
from hap.plan_simulation import simulate_plan
from hap.runtime.collectives import ProcessGroupComm
from hap.runtime.testbed import Testbed
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.schedule.event_simulator import COMMUNICATION, COMPUTE, Schedule, Span
from hap.units import format_bytes, format_seconds

WARM_UP = 2
UPDATE = "(update)"
SHOWN = 24
"""Number of operators in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One watched step of one rank, by use of its time, after one without a watch.

    Starts and ends are by the machine's clock, which all ranks share. ``others_s``: processor
    seconds of the threads that do not compute.
    """

    plain: tuple[float, float]
    watched: tuple[float, float]
    wall_s: dict[str, float]
    processor_s: dict[str, float]
    others_s: float
    collectives: list[tuple[float, float]]


def train(
    plan_json: dict[str, Any], ranks: Sequence[int], file: ModelFile, steps: int, in_turn: bool
) -> list[Ran]:
    """Return one rank's counted steps: first unwatched, then watched. Only ``ranks`` take part."""
    plan, group = Plan.from_json(plan_json), dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return []
    rank, comm = ranks.index(dist.get_rank()), ProcessGroupComm(group)
    module = api.compile(
        built(file), plan, loss=file.loss, seed=file.seed, comm=comm, check=False
    )  # fmt: skip
    update = optimizer(file, list(module.parameters()))
    batches = [plan.local_batch(b, rank) for b in global_batches(file, WARM_UP + steps)]

    def step(batch: Any, watch: Stopwatch) -> tuple[float, float]:
        dist.barrier(group)
        begun = time.monotonic()
        watch.start()
        update.zero_grad()
        loss = call(module, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        watch.look(REST)
        update.step()
        watch.look(UPDATE)
        return begun, time.monotonic()

    with module.in_turn() if in_turn else nullcontext():
        plain = [step(batch, Stopwatch()) for batch in batches]
    watch, found = watched(module, in_turn=in_turn), []
    for batch, before in zip(batches, plain, strict=True):
        others_s = time.process_time() - time.thread_time()
        after = step(batch, watch)
        found.append(Ran(
            plain=before, watched=after, wall_s=dict(watch.wall_s),
            processor_s=dict(watch.processor_s), collectives=list(watch.collectives),
            others_s=time.process_time() - time.thread_time() - others_s,
        ))  # fmt: skip
    return found[WARM_UP:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, train, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="FILE.py[:function]")
    parser.add_argument("cluster", help="the cluster to emulate")
    parser.add_argument(
        "--profile", required=True, type=Path, help="what was measured in it; if none, it is now"
    )
    parser.add_argument("--plan", type=Path, help="a plan for it; default: plan anew")
    parser.add_argument("--method", help="a baseline to run in place of the plan, by name")
    parser.add_argument("--cores", type=float, default=1.0, help="that all ranks use together")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    options = parser.parse_args(arguments)
    file = load_model_file(options.model)
    with Testbed(load_cluster(options.cluster), cores=options.cores) as bed:
        measured = profiled(bed, options.profile, told=lambda what: None, quick=False)
        if options.plan:
            plan = Plan.load(options.plan)
        elif options.method:
            plan = plans.baseline(options.model, measured, options.method)
        else:
            plan = api.plan_file(
                options.model, measured, options=PlanOptions(all_devices=True, mesh=False)
            )
        names = [device.name for device in measured.devices]
        ranks = [names.index(device.name) for device in plan.cluster.devices]
        fractions = [bed.hosts[rank].core for rank in ranks]
        ran = bed.spawn(train, args=(plan.to_json(), ranks, file, options.steps, options.in_turn))
    ran = [ran[rank] for rank in ranks]
    report(plan, ran, fractions, overlap=not options.in_turn, shapes=options.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """One rank's step by operator: predicted, wall and processor seconds.

    Processor seconds are divided by the rank's fraction of a core. ``others`` are
    those of the threads that communicate.
    """

    predicted: dict[str, float]
    wall: dict[str, float]
    processor: dict[str, float]
    others: float

    def computing(self, seconds: dict[str, float]) -> float:
        return sum(s for name, s in seconds.items() if name not in (WAIT, REST, UPDATE))


def report(
    plan: Plan, ran: list[list[Ran]], fractions: Sequence[float], *, overlap: bool, shapes: bool
) -> None:
    """Print the step and three tables: ranks, operators of the busiest rank, collectives."""
    graph, run = plan.whole[0], simulate_plan(plan, overlap=overlap).run
    plain_s = statistics.fmean(_lasted([r.plain for r in step]) for step in zip(*ran, strict=True))
    step_s = statistics.fmean(_lasted([r.watched for r in step]) for step in zip(*ran, strict=True))
    print(
        f"step: predicted {format_seconds(run.step_s)}, measured {format_seconds(plain_s)}, "
        f"{run.step_s / plain_s - 1:+.1%}; with a clock read after each operator "
        f"{format_seconds(step_s)}"
    )
    ranks = []
    for rank, (steps, fraction) in enumerate(zip(ran, fractions, strict=True)):
        predicted: dict[str, float] = defaultdict(float)
        for span in run.spans:
            if span.stream == COMPUTE:
                seconds = float(span.end_s[rank] - span.start_s[rank])
                predicted[_what(graph, span.what, shapes)] += seconds
        processor = _means(graph, [r.processor_s for r in steps], shapes)
        ranks.append(Seconds(
            predicted=predicted, wall=_means(graph, [r.wall_s for r in steps], shapes),
            processor={name: s / fraction for name, s in processor.items()},
            others=statistics.fmean(r.others_s for r in steps) / fraction,
        ))  # fmt: skip
    _show_ranks([d.name for d in plan.cluster.devices], ranks)
    busiest = max(range(len(ranks)), key=lambda r: ranks[r].computing(ranks[r].predicted))
    print(f"\noperators of {plan.cluster.devices[busiest].name}")
    calls = Counter(
        _name(graph, s.node, shapes) for s in plan.whole[1].instructions if isinstance(s, Compute)
    )
    _show_operators(ranks[busiest], calls, step_s)
    print()
    _show_collectives(graph, run, ran, step_s)
    print()
    _show_course(graph, run, ran, step_s)


def _lasted(spans: Sequence[tuple[float, float]]) -> float:
    """Return the seconds from the time when all ranks were ready to the last rank's end."""
    return max(ended for _, ended in spans) - max(begun for begun, _ in spans)


def _show_ranks(names: Sequence[str], ranks: Sequence[Seconds]) -> None:
    head = ("rank", "", "computing", "update", "waiting", "rest", "other threads")
    rows = []
    for name, rank in zip(names, ranks, strict=True):
        for what, seconds, others in (
            ("predicted", rank.predicted, ""),
            ("measured", rank.wall, ""),
            ("processor", rank.processor, format_seconds(rank.others)),
        ):
            own = (rank.computing(seconds), *(seconds.get(k, 0.0) for k in (UPDATE, WAIT, REST)))
            rows.append((name, what, *map(format_seconds, own), others))
            name = ""
    emit(table(head, rows, right=range(2, 7)))


def _show_operators(rank: Seconds, calls: Mapping[str, int], step_s: float) -> None:
    def off(name: str) -> float:
        return rank.predicted.get(name, 0.0) - rank.processor.get(name, 0.0)

    names = {*rank.predicted, *rank.processor} - {WAIT, REST}
    rows = [
        (
            name, str(calls.get(name, "")), format_seconds(rank.predicted.get(name, 0.0)),
            format_seconds(rank.wall.get(name, 0.0)),
            format_seconds(rank.processor.get(name, 0.0)), f"{off(name) / step_s:+.1%}",
        )
        for name in sorted(names, key=lambda name: -abs(off(name)))[:SHOWN]
    ]  # fmt: skip
    head = ("operator", "calls", "predicted", "measured", "processor", "of the step")
    emit(table(head, rows, right=range(1, 6)))


def _show_collectives(graph: Graph, run: Schedule, ran: list[list[Ran]], step_s: float) -> None:
    """Print collectives by kind and size, from the last rank's start to the last rank's end."""
    seen: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span, begun, ended in _collectives(run, ran):
        planned_s = float((span.end_s - span.start_s).max())
        seen[_kind(graph, span)].append((planned_s, ended - begun))
    rows = [
        (
            how, nbytes, str(len(found)), format_seconds(sum(p for p, _ in found)),
            format_seconds(sum(m for _, m in found)),
            f"{sum(p - m for p, m in found) / step_s:+.1%}",
        )
        for (how, nbytes), found in sorted(seen.items())
    ]  # fmt: skip
    head = ("collective", "bytes", "times", "predicted", "measured", "of the step")
    emit(table(head, rows, right=range(1, 6)))


def _show_course(graph: Graph, run: Schedule, ran: list[list[Ran]], step_s: float) -> None:
    """Print collectives in order, by seconds since the start of the step, to locate a delay."""
    rows = [
        (
            *_kind(graph, span), span.part, format_seconds(float(span.start_s.max())),
            format_seconds(begun), format_seconds(float(span.end_s.max())), format_seconds(ended),
        )
        for span, begun, ended in _collectives(run, ran)
    ]  # fmt: skip
    end = format_seconds(run.step_s), format_seconds(step_s)
    rows.append(("(end of the step)", "", "", "", "", *end))
    head = ("collective", "bytes", "part", "begins, predicted", "measured", "ends", "measured")
    emit(table(head, rows, right=(1, 3, 4, 5, 6)))


def _collectives(run: Schedule, ran: list[list[Ran]]) -> Iterator[tuple[Span, float, float]]:
    """Yield each collective with the last rank's start and end, in seconds of the step."""
    for at, span in enumerate(s for s in run.spans if s.stream == COMMUNICATION):
        begun, ended = [], []
        for step in zip(*ran, strict=True):
            start_s = max(r.watched[0] for r in step)
            begun.append(max(r.collectives[at][0] for r in step) - start_s)
            ended.append(max(r.collectives[at][1] for r in step) - start_s)
        yield span, statistics.fmean(begun), statistics.fmean(ended)


def _kind(graph: Graph, span: Span) -> tuple[str, str]:
    """Return (operation, bytes) of a collective."""
    assert not isinstance(span.what, Input)
    converts = [s for s in span.what if isinstance(s, Convert)]
    nbytes = sum(graph.tensors[s.tensor].nbytes for s in converts)
    how = f"{converts[0].kind}, {converts[0].implementation}" if converts else "between"
    return how, format_bytes(nbytes)


def _what(graph: Graph, what: tuple[Instruction, ...] | Input, shapes: bool) -> str:
    if isinstance(what, Input):
        return UPDATE
    step = what[0]
    return f"({step.kind})" if isinstance(step, Convert) else _name(graph, step.node, shapes)


def _name(graph: Graph, name: str, shapes: bool) -> str:
    node = graph.by_name[name]
    short = node.op.removeprefix("aten.")
    if shapes:
        short += "".join(f" {list(graph.tensors[t].shape)}" for t in node.inputs)
    return short


def _means(graph: Graph, steps: list[dict[str, float]], shapes: bool) -> dict[str, float]:
    """Return means over steps by operator: pauses of a rank hit other operators in each step."""
    found: dict[str, float] = defaultdict(float)
    for tensor in steps[0]:
        node = graph.producer.get(tensor)
        key = _name(graph, node.name, shapes) if node else tensor
        found[key] += statistics.fmean(s[tensor] for s in steps)
    return found


if __name__ == "__main__":
    main()
