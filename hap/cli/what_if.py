"""``hap what-if``: plan for changed batches, links and devices, and find where the plan turns."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hap import api
from hap.capture.model_file import ModelFile, load_model_file
from hap.capture.user_optimizer import default_optimizer
from hap.cli.terminal import alike, table
from hap.cluster.catalogue import find, nearest
from hap.cluster.cluster_file import load_cluster
from hap.cluster.link import Link, each_link
from hap.cluster.topology import Cluster, check_size
from hap.errors import ClusterError, InfeasibleError, InputError
from hap.gc_pause import gc_paused
from hap.ir.batch import Batch, each, flatten
from hap.ir.plan import Plan
from hap.synthesizer.plan_options import PlanOptions
from hap.units import format_seconds, parse

_MUCH = 0.1
"""Part of the communicated bytes; kinds of collectives with less do not name a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One change; those of one ``sweep`` are compared with each other in their order."""

    sweep: str
    change: str
    cluster: Cluster
    rows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The plan for one change. Without a plan, ``step_s`` is 0 and ``note`` says why."""

    sweep: str
    change: str
    rows: int = 0
    step_s: float = 0.0
    samples_per_s: float = 0.0
    used: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    program: str = ""
    note: str = ""
    cost: float = 0.0
    """Price of a million samples, in the currency of the cluster file; 0 if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What to ask: rows of the batch, rates between nodes, nodes to add, names to leave out."""

    rows: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    add: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


def questions(cluster: Cluster, changes: Changes) -> Iterator[Question]:
    """The cluster as it is, then one question per change.

    Raises:
        InputError: a change cannot be made; the message names it.
    """
    yield Question(sweep="now", change="as it is", cluster=cluster)
    for rows in sorted(changes.rows):
        yield Question(sweep="rows", change=f"{rows} rows", cluster=cluster, rows=rows)
    faster = [(text, linked(cluster, text)) for text in changes.links]
    for text, other in sorted(faster, key=lambda pair: pair[1].inter.bandwidth_bytes_per_s):
        yield Question(sweep="link", change=text, cluster=other)
    for text in changes.add:
        yield Question(sweep="devices", change=f"with {text}", cluster=added(cluster, text))
    for name in changes.without:
        yield Question(sweep="devices", change=f"without {name}", cluster=reduced(cluster, name))


def linked(cluster: Cluster, text: str) -> Cluster:
    """The cluster with another rate between nodes; measured collectives change in proportion."""
    try:
        rate = parse(text, "bytes/s")
    except ValueError as error:
        what, _, hint = str(error).partition(": ")
        raise InputError(f"--link: {what}", hint=hint) from None
    if not 0 < rate < math.inf:
        raise InputError(f"--link {text}: the rate is not positive", hint="write 25 Gbit/s")
    if len(cluster.nodes) == 1:
        raise InputError("--link: the cluster is one node", hint="leave --link out")
    factor = rate / cluster.inter.bandwidth_bytes_per_s

    def at_rate(level: str, link: Link) -> Link:
        scaled = link.bandwidth_bytes_per_s * (factor if level == "between" else 1.0)
        return replace(link, bandwidth_bytes_per_s=scaled)

    return replace(
        cluster, inter=at_rate("between", cluster.inter),
        collectives=each_link(cluster.collectives, at_rate),
        among=tuple(replace(each, links=each_link(each.links, at_rate)) for each in cluster.among),
    )  # fmt: skip


def added(cluster: Cluster, text: str) -> Cluster:
    """The cluster with one more node, ``2xA100-40``, of the catalogue's devices and inner link."""
    count, times, kind = text.partition("x")
    entry = find(kind)
    if not times or not count.isdecimal() or not int(count) or entry is None:
        near = nearest(kind) if kind else None
        raise InputError(
            f"--add {text}: this is no number of devices of a known type",
            hint=f"did you mean {count}x{near}?" if near else "write 2xA100-40",
        )
    check_size(cluster.world_size + int(count), f"--add {text}")
    if len(cluster.nodes) == 1:
        raise InputError(
            f"--add {text}: the cluster file has no link between nodes", hint="add the node there"
        )
    name = next(n for k in itertools.count() if (n := f"added{k or ''}") not in cluster.nodes)
    devices = tuple(replace(entry.device, name=f"{name}:{k}", node=name) for k in range(int(count)))
    intra = {**cluster.intra, name: entry.link}
    return replace(cluster, devices=cluster.devices + devices, intra=intra)


def reduced(cluster: Cluster, name: str) -> Cluster:
    """The cluster without a node, a device or all devices of a kind."""
    kept = [rank for rank, d in enumerate(cluster.devices) if name not in (d.node, d.name, d.kind)]
    if len(kept) == cluster.world_size:
        known = alike([*cluster.nodes, *dict.fromkeys(d.kind for d in cluster.devices)])
        raise InputError(
            f"--without {name}: there is no such node, device or kind",
            hint=f"the cluster has {', '.join(known)}",
        )
    if not kept:
        raise ClusterError(f"--without {name}: no device is left", hint="name fewer devices")
    return cluster.keep(kept)


def default_changes(cluster: Cluster, rows: int) -> Changes:
    """Half and twice the rows; a quarter of and four times the rate; each kind left out."""
    kinds = list(dict.fromkeys(d.kind for d in cluster.devices))
    gbit = cluster.inter.bandwidth_bytes_per_s * 8e-9
    several = len(cluster.nodes) > 1
    return Changes(
        rows=(max(rows // 2, 1), rows, 2 * rows),
        links=tuple(f"{gbit * f:g} Gbit/s" for f in (0.25, 1, 4)) if several else (),
        without=tuple(kinds) if len(kinds) > 1 else (),
    )


def what_if(
    spec: str, cluster_file: str, changes: Changes, options: PlanOptions,
    progress: Callable[[int, int, str], None],
) -> list[Answer]:  # fmt: skip
    """Plan for every change; with none, for :func:`default_changes`."""
    file, cluster = load_model_file(spec), load_cluster(cluster_file)
    if changes == Changes():
        _, batch = api.build_without_data(file, lambda text: None)
        changes = default_changes(cluster, _rows(batch))
    asked = list(questions(cluster, changes))
    answers = []
    for number, question in enumerate(asked):
        progress(number, len(asked), question.change)
        answers.append(_answer(file, question, options))
    return answers


@gc_paused()
def _answer(file: ModelFile, question: Question, options: PlanOptions) -> Answer:
    def make() -> tuple[Any, Batch]:
        batch = file.batch()
        return file.model(), batch if question.rows is None else with_rows(batch, question.rows)

    model, batch = api.without_data(make)
    rows = _rows(batch)
    if rows < question.cluster.world_size and not options.allow_idle:
        note = f"fewer rows than the {question.cluster.world_size} devices: see --allow-idle"
        return Answer(sweep=question.sweep, change=question.change, rows=rows, note=note)
    try:
        plan = api.plan(
            model, batch, question.cluster, loss=file.loss, autocast=file.autocast,
            float32_matmul_precision=file.float32_matmul_precision,
            optimizer=file.optimizer or default_optimizer, rules=file.rules, options=options,
        )  # fmt: skip
    except InfeasibleError as error:
        return Answer(sweep=question.sweep, change=question.change, rows=rows, note=error.what)
    kinds = Counter(device.kind for device in plan.cluster.devices)
    return Answer(
        sweep=question.sweep, change=question.change, rows=rows, step_s=plan.prediction.step_s,
        samples_per_s=rows / plan.prediction.step_s,
        used=tuple(f"{count}x{kind}" for kind, count in kinds.items()),
        left_out=plan.left_out, program=_program(plan), cost=cost_of(plan, rows),
    )  # fmt: skip


def cost_of(plan: Plan, rows: int) -> float:
    """The price of a million samples on the devices in use; 0 if one of them has no price."""
    prices = [device.price_per_hour for device in plan.cluster.devices]
    hours = plan.prediction.step_s / 3600 * 1e6 / rows
    return sum(prices) * hours if all(prices) else 0.0


def by_cost(answers: Sequence[Answer]) -> list[Answer]:
    """The answers in the order of their cost, those without a cost last.

    Raises:
        InputError: no answer has a cost.
    """
    if not any(answer.cost for answer in answers):
        raise InputError(
            "--by cost: the cluster file gives no prices",
            hint="give every device a price_per_hour: see docs/cluster-file.md",
        )
    return sorted(answers, key=lambda answer: (not answer.cost, answer.cost))


def _rows(batch: Batch) -> int:
    return next((t.shape[0] for t in flatten(batch).values() if t.dim()), 1)


def with_rows(batch: Batch, rows: int) -> Batch:
    """The batch with another number of rows: repeated, or cut off."""
    before = _rows(batch)

    def resized(name: str, entry: Any) -> Any:
        if not hasattr(entry, "dim") or not entry.dim() or entry.shape[0] != before:
            return entry
        times = math.ceil(rows / before)
        return entry.repeat(times, *[1] * (entry.dim() - 1))[:rows].clone()

    return each(batch, resized)


def _program(plan: Plan) -> str:
    """The kinds of collectives that move most of the bytes."""
    moved: Counter[str] = Counter()
    for c in plan.prediction.collectives:
        moved[c.kind] += c.nbytes
    kinds = [kind for kind, n in moved.most_common() if n >= _MUCH * moved.total()]
    return ", ".join(sorted(kinds)) or "no collectives"


def turns(answers: Sequence[Answer]) -> list[str]:
    """Where the devices or the program change between neighbours of one sweep."""
    found = []
    for before, after in itertools.pairwise(answers):
        if before.sweep != after.sweep or after.sweep == "devices":
            continue
        between = f"between {before.change} and {after.change}"
        if not before.step_s or not after.step_s:
            if before.step_s != after.step_s:
                found.append(f"{between}: {'a' if after.step_s else 'no'} plan fits from there on")
        elif before.used != after.used:
            devices = f"{' '.join(before.used)} -> {' '.join(after.used)}"
            found.append(f"{between}: the devices in use change, {devices}")
        elif before.program != after.program:
            found.append(f"{between}: the collectives change, {before.program} -> {after.program}")
    return found


def what_if_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """All answers, for other programs."""
    return {"answers": [asdict(answer) for answer in answers], "crossovers": turns(answers)}


def what_if_screen(answers: Sequence[Answer], *, by: str = "change") -> RenderableType:
    """A line per change, compared with the cluster as it is, and the crossovers.

    Args:
        by: the order of the lines: ``change``, or ``cost``.
    """
    now = answers[0]
    rows: list[tuple[str, ...]] = []
    priced = any(a.cost for a in answers)
    for a in by_cost(answers) if by == "cost" else answers:
        cost = (f"{a.cost:.4g}" if a.cost else "-",) if priced else ()
        if not a.step_s:
            rows.append((a.change, "-", "-", "-", *cost, "", "", a.note))
            continue
        gain = f"{a.samples_per_s / now.samples_per_s:.2f}x" if now.step_s else "-"
        figures = (format_seconds(a.step_s), _samples(a.samples_per_s), gain)
        rows.append(
            (a.change, *figures, *cost, " ".join(a.used), ", ".join(alike(a.left_out)), a.program)
        )
    costs = ("cost of 1M samples",) if priced else ()
    head = ("what if", "step", "samples/s", "speed", *costs, "in use", "left out", "collectives")
    right = (1, 2, 3, 4) if priced else (1, 2, 3)
    parts: list[RenderableType] = [table(head, rows, right=right), Text("")]
    lines = [Text(line) for line in turns(answers)] or [Text("none between the values above")]
    return Group(*parts, Text("Crossovers", style="bold"), *(Padding(x, (0, 2)) for x in lines))


def _samples(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
