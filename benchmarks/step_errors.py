"""Where does a measured step part from its prediction? Every rank, operator by operator.

    hap testbed CLUSTER -- hap profile -o measured.yaml
    python -m benchmarks.step_errors benchmarks/models/bert.py:race CLUSTER --profile measured.yaml
    python -m benchmarks.step_errors ... --in-turn     nothing overlaps: prices alone
    python -m benchmarks.step_errors ... --shapes      a line per shape

Plans a model for a measured cluster, or takes ``--plan``, trains on the emulated cluster with a
clock read after each operator, and prints beside the simulated step: each rank's computing,
waiting and updating; operators by the seconds that the prediction is off, for the rank that
computes longest; and collectives, from when the last rank began to when the last one ended. Beside
wall seconds stand processor seconds over the rank's fraction of a core: where these are less, the
rank was kept waiting by the kernel, or by what ran beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.contenders.base import built, optimizer
from benchmarks.racing import plans
from benchmarks.racing.cell import global_batches
from hap import api
from hap.batch import call
from hap.cluster import load_cluster
from hap.graph import Graph, Input
from hap.model_file import ModelFile, load_model_file
from hap.plan import Plan
from hap.program import Compute, Convert, Instruction
from hap.runtime.collectives import ProcessGroupComm
from hap.runtime.compiled import runnable
from hap.runtime.module import HapModule, emit
from hap.runtime.overlap import Lane, Pending
from hap.runtime.testbed import Testbed
from hap.simulation import simulate_plan
from hap.synthesizer.timeline import COMPUTE
from hap.terminal import emit as show
from hap.terminal import table
from hap.units import format_bytes, format_seconds

WARM_UP = 2
WAIT, UPDATE, REST = "(waiting)", "(update)", "(between)"


@dataclass(slots=True)
class Clock:
    """Wall and processor seconds since the last look, by what was done meanwhile."""

    wall_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: tuple[float, float] = (0.0, 0.0)

    def look(self, what: str) -> None:
        """All since the last look was spent on ``what``."""
        now = time.perf_counter(), time.thread_time()
        self.wall_s[what] += now[0] - self.last[0]
        self.cpu_s[what] += now[1] - self.last[1]
        self.last = now


class TimedLane(Lane):
    """Another lane, and when each of its collectives began and ended."""

    def __init__(self, lane: Lane, times: list[tuple[float, float]]) -> None:
        self._lane, self._times = lane, times

    def issue(self, run: Callable[..., Any], *args: Any) -> Pending:
        def timed(*resolved: Any) -> Any:
            begun = time.perf_counter()
            result = run(*resolved)
            self._times.append((begun, time.perf_counter()))
            return result

        return self._lane.issue(timed, *args)

    def wait(self, pending: Pending) -> Any:
        return self._lane.wait(pending)


@dataclass(frozen=True, slots=True)
class Ran:
    """One step of one rank; ``plain_s`` is one in which no clock was read."""

    plain_s: float
    step_s: float
    wall_s: dict[str, float]
    cpu_s: dict[str, float]
    collectives: list[tuple[float, float]]


def train(plan_json: dict[str, Any], file: ModelFile, steps: int, in_turn: bool) -> list[Ran]:
    """One rank's counted steps."""
    plan = Plan.from_json(plan_json)
    rank = dist.get_rank()
    comm = ProcessGroupComm(dist.group.WORLD)
    module = api.compile(
        built(file), plan, loss=file.loss, seed=file.seed, comm=comm, check=False,
    )  # fmt: skip
    clock, times = Clock(), []
    if in_turn:
        module._ctx.in_turn().__enter__()
    update = optimizer(file, list(module.parameters()))
    found: list[Ran] = []
    plain_s: list[float] = []
    batches = global_batches(file, WARM_UP + steps)
    for number, batch in enumerate((*batches, *batches)):
        if number == len(batches):
            _instrument(module, plan, rank, clock, times, in_turn)
        mine = plan.local_batch(batch, rank)
        dist.barrier()
        clock.wall_s.clear()
        clock.cpu_s.clear()
        times.clear()
        begun = clock.last = time.perf_counter(), time.thread_time()
        update.zero_grad()
        loss = call(module, mine)
        loss.backward()  # type: ignore[no-untyped-call]
        clock.look(REST)
        update.step()
        clock.look(UPDATE)
        dist.barrier()
        step_s = time.perf_counter() - begun[0]
        if WARM_UP <= number < len(batches):
            plain_s.append(step_s)
        if number >= len(batches) + WARM_UP:
            found.append(
                Ran(
                    statistics.median(plain_s),
                    step_s,
                    dict(clock.wall_s),
                    dict(clock.cpu_s),
                    list(times),
                )
            )
    return found


def _instrument(
    module: HapModule, plan: Plan, rank: int, clock: Clock,
    times: list[tuple[float, float]], in_turn: bool,
) -> None:  # fmt: skip
    """Have a module's code look at the clock after each operator."""
    emitted = emit(plan, rank, module._device)
    for code in (emitted.forward.graph, emitted.backward.graph):
        ctx = next(n for n in code.nodes if n.op == "placeholder")
        nodes = [n for n in code.nodes if n.op in ("call_function", "call_method")]
        for place, node in enumerate(nodes):
            if node.target == "wait":
                what = WAIT
            elif node.target == "issue":
                what = WAIT if in_turn else REST
            else:
                ahead = (n for n in nodes[place:] if "value" in n.meta)
                what = next((n.meta["value"].tensor for n in ahead), REST)
            with code.inserting_after(node):
                code.call_method("look", (ctx, what))
        first = next(n for n in code.nodes if n.op != "placeholder")
        with code.inserting_before(first):
            code.call_method("look", (ctx, REST))
    module._code = runnable(emitted, "eager", module._device)
    context: Any = module._ctx
    context.look = clock.look
    module._ctx._lane = TimedLane(module._ctx._lane, times)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, train, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="FILE.py[:function]")
    parser.add_argument("cluster", help="the cluster to emulate")
    parser.add_argument("--profile", required=True, help="what hap profile measured in it")
    parser.add_argument("--plan", type=Path, help="a plan for it; default: plan anew")
    parser.add_argument("--method", help="a baseline to run in place of the plan, by name")
    parser.add_argument("--cores", type=float, default=1.0, help="that all ranks use together")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    options = parser.parse_args(arguments)
    measured = load_cluster(options.profile)
    if options.plan:
        plan = Plan.load(options.plan)
    elif options.method:
        plan = plans.baseline(options.model, measured, options.method)
    else:
        plan = api.plan_file(options.model, measured, all_devices=True, mesh=False)
    file = load_model_file(options.model)
    with Testbed(load_cluster(options.cluster), cores=options.cores) as bed:
        fractions = [host.core for host in bed.hosts]
        ran = bed.spawn(train, args=(plan.to_json(), file, options.steps, options.in_turn))
    report(plan, ran, fractions, overlap=not options.in_turn, shapes=options.shapes)


def report(
    plan: Plan, ran: list[list[Ran]], fractions: Sequence[float], *, overlap: bool, shapes: bool
) -> None:
    """The three tables."""
    graph = plan.whole[0]
    run = simulate_plan(plan, overlap=overlap).run
    world = plan.world_size
    predicted: list[dict[str, float]] = [defaultdict(float) for _ in range(world)]
    lanes: list[tuple[tuple[Instruction, ...], float]] = []
    for span in run.spans:
        if span.stream == COMPUTE:
            for rank in range(world):
                key = _key(graph, span.what, shapes)
                predicted[rank][key] += float(span.end_s[rank] - span.start_s[rank])
        else:
            assert not isinstance(span.what, Input)
            lanes.append((span.what, float((span.end_s - span.start_s).max())))
    wall = [_medians(graph, [r.wall_s for r in steps], shapes) for steps in ran]
    cpu = [_medians(graph, [r.cpu_s for r in steps], shapes) for steps in ran]
    plain_s = max(steps[0].plain_s for steps in ran)
    step_s = statistics.median(max(r[k].step_s for r in ran) for k in range(len(ran[0])))
    print(
        f"step: predicted {format_seconds(run.step_s)}, measured {format_seconds(plain_s)}, "
        f"{run.step_s / plain_s - 1:+.1%}; with a clock read after each operator "
        f"{format_seconds(step_s)}"
    )
    rows = []
    for rank, device in enumerate(plan.cluster.devices):
        computing = [k for k in wall[rank] if k not in (WAIT, REST, UPDATE)]
        planned = sum(v for k, v in predicted[rank].items() if k != UPDATE)
        rows.append((
            device.name, format_seconds(planned),
            format_seconds(sum(wall[rank][k] for k in computing)),
            format_seconds(sum(cpu[rank][k] for k in computing) / fractions[rank]),
            format_seconds(predicted[rank][UPDATE]), format_seconds(wall[rank][UPDATE]),
            format_seconds(wall[rank][WAIT]), format_seconds(wall[rank][REST]),
        ))  # fmt: skip
    head = (
        "rank",
        "computing",
        "measured",
        "processor",
        "update",
        "measured",
        "waiting",
        "between",
    )
    show(table(head, rows, right=range(1, 8)))
    last = max(range(world), key=lambda r: sum(predicted[r].values()))
    took = {k: s / fractions[last] for k, s in cpu[last].items()}
    keys = sorted(
        {*predicted[last], *took} - {WAIT, REST},
        key=lambda k: -abs(predicted[last][k] - took.get(k, 0.0)),
    )  # fmt: skip
    counts = Counter(
        _name(graph, s.node, shapes) for s in plan.whole[1].instructions if isinstance(s, Compute)
    )
    rows = [
        (
            k, str(counts[k]), format_seconds(predicted[last][k]),
            format_seconds(wall[last].get(k, 0.0)), format_seconds(took.get(k, 0.0)),
            f"{(predicted[last][k] - took.get(k, 0.0)) / step_s:+.1%}",
        )
        for k in keys[:24]
    ]  # fmt: skip
    print(f"\noperators of {plan.cluster.devices[last].name}")
    head = ("operator", "calls", "predicted", "measured", "processor", "of the step")
    show(table(head, rows, right=range(1, 6)))
    _collectives(plan, graph, ran, lanes, step_s)


def _collectives(
    plan: Plan, graph: Graph, ran: list[list[Ran]],
    lanes: list[tuple[tuple[Instruction, ...], float]], step_s: float,
) -> None:  # fmt: skip
    seen: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for at, (group, planned_s) in enumerate(lanes):
        taken = []
        for k in range(len(ran[0])):
            begun = max(steps[k].collectives[at][0] for steps in ran)
            ended = max(steps[k].collectives[at][1] for steps in ran)
            taken.append(ended - begun)
        converts = [s for s in group if isinstance(s, Convert)]
        nbytes = sum(graph.tensors[s.tensor].nbytes for s in converts)
        how = f"{converts[0].kind}, {converts[0].implementation}" if converts else "between"
        seen[how, format_bytes(nbytes)].append((planned_s, statistics.median(taken)))
    rows = [
        (
            how, nbytes, str(len(found)), format_seconds(sum(p for p, _ in found)),
            format_seconds(sum(m for _, m in found)),
            f"{sum(p - m for p, m in found) / step_s:+.1%}",
        )
        for (how, nbytes), found in sorted(seen.items())
    ]  # fmt: skip
    head = ("collective", "bytes", "times", "predicted", "measured", "of the step")
    print()
    show(table(head, rows, right=range(1, 6)))


def _key(graph: Graph, what: tuple[Instruction, ...] | Input, shapes: bool) -> str:
    if isinstance(what, Input):
        return UPDATE
    step = what[0]
    if isinstance(step, Convert):
        return f"({step.kind})"
    return _name(graph, step.node, shapes)


def _name(graph: Graph, name: str, shapes: bool) -> str:
    node = graph.by_name[name]
    short = node.op.removeprefix("aten.")
    if shapes:
        short += "".join(f" {list(graph.tensors[t].shape)}" for t in node.inputs)
    return short


def _medians(graph: Graph, steps: list[dict[str, float]], shapes: bool) -> dict[str, float]:
    """Medians over steps, by operator."""
    found: dict[str, float] = defaultdict(float)
    for tensor in steps[0]:
        node = graph.producer.get(tensor)
        key = _name(graph, node.name, shapes) if node else tensor
        found[key] += statistics.median(s[tensor] for s in steps)
    return found


if __name__ == "__main__":
    main()
