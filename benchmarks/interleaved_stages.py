"""Would interleaved stages be faster? Planned pipelines, with one and two parts per stage.

    python -m benchmarks.interleaved_stages                 all cells
    python -m benchmarks.interleaved_stages --only vit/8    cells with this text in their name

Interleaved stages (Narayanan et al., "Efficient large-scale language model training on GPU clusters
using Megatron-LM", SC 2021) give each group of devices two parts of the model, so that a pipeline is filled
and drained in half the time, and activations cross twice as many boundaries. The plans have one part per group. Here
the pipeline that ``hap plan --stages`` finds on the machines of :mod:`benchmarks.paper_cluster`, and on newer GPUs
with faster links, is scheduled greedily, with its own seconds, in three ways: as it is; with two halves of each stage *looped*,
so that the last group sends to the first; and in a *V*, where the second half goes back through the
groups. *Links* is the part of the planned step in which the busiest group sends, *idle* the part in which the
busiest group does not compute: all that any order of the turns can save. Each greedy schedule is
the best of several priorities and limits of microbatches in flight, and leaves out tied weights, which cross
once. The pipelines are those that are the fastest with one part per group.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.models import bert, llama
from benchmarks.paper_cluster import CLUSTERS, MODELS
from hap.capture import torch_private
from hap.capture.tracing import capture
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.rule_sources import with_rules
from hap.synthesizer.schedule.pipeline_simulator import StageSeconds
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.stages.stage_search import Pipeline, StageSearch
from hap.units import format_seconds

HERE = Path(__file__).parent

TESTBED = [
    (model, gpus)
    for gpus in ("8", "16", "32")
    for model in ("vit", "bert", "bert_untied", "bert_moe")
]

FAST = [
    ("llama_7b", "unlike8"),
    ("llama_7b", "h100_a100"),
    ("llama_7b", "single"),
    ("bert_256", "single"),
    ("llama_7b_64", "h100_a100"),
    ("llama_7b_64", "three_types64"),
]
"""Model and cluster: newer GPUs, with links of 25 to 200 Gbit/s."""

LARGE: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "llama_7b": lambda: (llama.build(), llama.inputs(16)),
    "llama_7b_64": lambda: (llama.build(), llama.inputs(64)),
    "bert_256": lambda: (bert.build(), bert.inputs(256)),
}
"""Name -> model and global batch."""

TWO_MACHINES = """\
name: h100_a100
links:
  between: {bandwidth: 200 Gbit/s, latency: 10 us}
nodes:
  - {name: new, gpus: 8, type: H100}
  - {name: old, gpus: 8, type: A100-80}
"""

SINGLE_GPUS = """\
name: single
links:
  between: {bandwidth: 100 Gbit/s, latency: 10 us}
nodes:
  - {name: new, count: 4, gpus: 1, type: A100-80}
  - {name: old, count: 4, gpus: 1, type: V100-32}
"""

FAST_CLUSTERS: Mapping[str, Callable[[], Cluster]] = {
    "unlike8": lambda: load_cluster(HERE / "clusters" / "unlike8.yaml"),
    "three_types64": lambda: load_cluster(HERE / "clusters" / "three_types64.yaml"),
    "h100_a100": lambda: load_cluster(TWO_MACHINES),
    "single": lambda: load_cluster(SINGLE_GPUS),
}

COLUMNS = (
    "model", "GPUs", "stages", "microbatches", "planned", "links", "idle", "greedy", "looped", "V",
)  # fmt: skip


class Part(NamedTuple):
    """A part of the model: its group, seconds of a microbatch, and of transfers to and from the next part."""

    group: int
    forward_s: float
    backward_s: float
    send_s: float
    return_s: float


class Task(NamedTuple):
    """The forward or backward of a microbatch through a part."""

    backward: bool
    part: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Rule:
    """Priorities of a greedy schedule: backwards first, then the deepest part or the first microbatch."""

    deep: bool
    in_flight: int

    def key(self, task: Task) -> tuple[int, int, int]:
        if task.backward or not self.deep:
            return (not task.backward, task.microbatch, -task.part)
        return (1, -task.part, task.microbatch)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="cells whose name (model/GPUs) holds this text")
    options = parser.parse_args(arguments)
    table = Table(box=None, title="the step, greedy schedules", title_justify="left")
    for name in COLUMNS:
        table.add_column(name)
    for model, gpus in [*TESTBED, *FAST]:
        if options.only in f"{model}/{gpus}" and (found := planned(model, gpus)):
            plain, looped, back = (
                least_s(parts, found) for parts in (whole(found), loop(found), v_shape(found))
            )
            table.add_row(
                model, gpus, str(len(found.seconds)), str(found.microbatches),
                format_seconds(found.times.step_s), f"{sending(found):.0%}", f"{idle(found):.1%}",
                format_seconds(plain),
                f"{looped / plain:.2f}x", f"{back / plain:.2f}x",
            )  # fmt: skip
    Console(highlight=False, width=None if sys.stdout.isatty() else 100).print(table)


def planned(model: str, gpus: str) -> Pipeline | None:
    """Return the fastest pipeline that is found."""
    cluster = {**CLUSTERS, **FAST_CLUSTERS}[gpus]()
    with torch_private.fake_mode():
        module, batch = LARGE[model]() if model in LARGE else MODELS[model](cluster.world_size)
    graph = with_rules(capture(module, batch, None), {})
    return StageSearch(build_space(graph), cluster, 2).best(float("inf"))


def sending(pipeline: Pipeline) -> float:
    """Return the part of the step in which the busiest group sends, to both sides."""
    returned = [0.0, *(s.return_s for s in pipeline.seconds)]
    sent_s = max(s.send_s + back_s for s, back_s in zip(pipeline.seconds, returned, strict=False))
    return pipeline.microbatches * sent_s / pipeline.times.step_s


def idle(pipeline: Pipeline) -> float:
    """Return the part of the step in which the busiest group does not compute."""
    busiest_s = max(
        s.before_s + pipeline.microbatches * (s.forward_s + s.backward_s) + s.rest_s
        for s in pipeline.seconds
    )
    return 1 - min(busiest_s / pipeline.times.step_s, 1.0)


def whole(pipeline: Pipeline) -> list[Part]:
    """Return one part per group: the stages."""
    return [
        Part(k, s.forward_s, s.backward_s, s.send_s, s.return_s)
        for k, s in enumerate(pipeline.seconds)
    ]


def loop(pipeline: Pipeline) -> list[Part]:
    """Return two halves of each stage, the groups in turn; the last sends as slowly as any."""
    stages = pipeline.seconds
    slowest = max(s.send_s for s in stages), max(s.return_s for s in stages)
    first = [_half(k, s, s.send_s, s.return_s) for k, s in enumerate(stages)]
    return [*first[:-1], first[-1]._replace(send_s=slowest[0], return_s=slowest[1]), *first]


def v_shape(pipeline: Pipeline) -> list[Part]:
    """Return two halves of each stage, the groups there and back; nothing crosses at the turn."""
    stages = pipeline.seconds
    there = [_half(k, s, s.send_s, s.return_s) for k, s in enumerate(stages)]
    back = [
        _half(k, s, stages[k - 1].return_s if k else 0.0, stages[k - 1].send_s if k else 0.0)
        for k, s in enumerate(stages)
    ]
    return [*there, *reversed(back)]


def _half(group: int, stage: StageSeconds, send_s: float, return_s: float) -> Part:
    return Part(group, stage.forward_s / 2, stage.backward_s / 2, send_s, return_s)


def least_s(parts: Sequence[Part], pipeline: Pipeline) -> float:
    """Return the least step over all rules."""
    count = len(pipeline.seconds)
    limits = {count, count + 1, 2 * count, 3 * count, 4 * count, pipeline.microbatches}
    return min(
        Greedy(parts, pipeline, Rule(deep, limit)).step_s()
        for limit in sorted(limits)
        for deep in (False, True)
    )


class Greedy:
    """A schedule in which no group waits while it has a task, and no link while it has a message.

    A group computes one task at a time, sends one message at a time and receives one, as in
    :mod:`hap.synthesizer.schedule.pipeline_simulator`.
    """

    def __init__(self, parts: Sequence[Part], pipeline: Pipeline, rule: Rule) -> None:
        self._parts, self._rule, self._stages = parts, rule, pipeline.seconds
        groups = range(len(self._stages))
        self._ready: list[set[Task]] = [set() for _ in groups]
        self._unsent: list[list[Task]] = [[] for _ in groups]
        self._computing = [False] * len(groups)
        self._leaving, self._arriving = [0.0] * len(groups), [0.0] * len(groups)
        self._in_flight = 0
        self._events: list[tuple[float, int, Task | None, bool]] = []  # time, number, task, arrived
        self._numbers = itertools.count()
        self._ready[0] = {Task(False, 0, m) for m in range(pipeline.microbatches)}

    def step_s(self) -> float:
        """Return the seconds of the step."""
        for stage in self._stages:
            self._later(stage.before_s, None)
        ends = [0.0] * len(self._stages)
        while self._events:
            now, _, task, arrived = heapq.heappop(self._events)
            if task and arrived:
                self._ready[self._group(task)].add(task)
            elif task:
                ends[self._group(task)] = now
                self._end(task)
            for group in range(len(self._stages)):
                self._send(group, now)
            for group in range(len(self._stages)):
                self._compute(group, now)
        return max(end + s.rest_s for end, s in zip(ends, self._stages, strict=True))

    def _group(self, task: Task) -> int:
        return self._parts[task.part].group

    def _later(self, time_s: float, task: Task | None, arrived: bool = False) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), task, arrived))

    def _end(self, task: Task) -> None:
        self._computing[self._group(task)] = False
        self._in_flight -= task.backward and not task.part
        for after in self._next(task):
            if self._group(after) == self._group(task):
                self._ready[self._group(task)].add(after)
            else:
                self._unsent[self._group(task)].append(task)

    def _next(self, task: Task) -> Iterator[Task]:
        """Yield the task that needs the result of one."""
        if not task.backward and task.part == len(self._parts) - 1:
            yield task._replace(backward=True)
        elif not task.backward or task.part:
            yield task._replace(part=task.part + (-1 if task.backward else 1))

    def _send(self, group: int, now: float) -> None:
        if not self._unsent[group] or self._leaving[group] > now:
            return
        task = self._unsent[group][0]
        (after,) = self._next(task)
        if self._arriving[self._group(after)] > now:
            return
        del self._unsent[group][0]
        before = self._parts[min(task.part, after.part)]
        end = now + (before.return_s if task.backward else before.send_s)
        self._leaving[group] = self._arriving[self._group(after)] = end
        self._later(end, after, arrived=True)

    def _compute(self, group: int, now: float) -> None:
        full = self._in_flight >= self._rule.in_flight
        ready = [t for t in self._ready[group] if t.backward or t.part or not full]
        if self._computing[group] or not ready or now < self._stages[group].before_s:
            return
        task = min(ready, key=self._rule.key)
        self._ready[group].discard(task)
        self._computing[group] = True
        self._in_flight += not (task.backward or task.part)
        part = self._parts[task.part]
        self._later(now + (part.backward_s if task.backward else part.forward_s), task)


if __name__ == "__main__":
    main()
