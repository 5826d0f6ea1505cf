"""``hap what-if``: plan for changed batches, links and devices, and find where the plan turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hap import api
from hap.capture.building import build_without_data
from hap.capture.hidden_tensors import real_if_needed
from hap.capture.model_file import ModelFile, load_model_file
from hap.capture.user_optimizer import default_optimizer
from hap.cli.crossovers import Answer, crossovers, most_questions, narrowed
from hap.cli.terminal import alike, table
from hap.cli.what_if_changes import (
    NOW,
    Changes,
    Question,
    default_changes,
    device_questions,
    sweeps,
)
from hap.cluster.cluster_file import load_cluster
from hap.errors import InfeasibleError, InputError
from hap.gc_pause import gc_paused
from hap.ir.batch import Batch, each, flatten
from hap.ir.plan import Plan
from hap.plan_cache import PlanCache
from hap.synthesizer.plan_options import PlanOptions
from hap.units import format_seconds

_MUCH = 0.1
"""Part of the communicated bytes; kinds of collectives with less do not name a program."""

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How questions are answered: plans per crossover, options of planning, kept plans."""

    refine: int
    options: PlanOptions
    cache: PlanCache | None


def what_if(
    spec: str, cluster_file: str, changes: Changes, asking: Asking, progress: Progress
) -> list[Answer]:
    """Plan for every change; with none, for :func:`default_changes`."""
    file, cluster = load_model_file(spec), load_cluster(cluster_file)
    if changes == Changes():
        _, batch = build_without_data(file, lambda text: None)
        changes = default_changes(cluster, _rows(batch))
        if file.fixed:
            changes = replace(changes, rows=())
    if file.fixed and changes.rows:
        raise InputError(
            f"--rows: `fixed` of {spec} names entries whose numbers belong to its batch",
            hint="leave out --rows, or write another batch() and plan that",
        )
    swept = sweeps(cluster, changes)
    asked = [[*map(sweep.ask, sweep.values)] for sweep in swept]
    others = [*device_questions(cluster, changes)]
    total, done = 1 + sum(map(len, asked)) + len(others), 0

    def answer(question: Question) -> Answer:
        nonlocal done
        progress(done, total, question.change)
        done += 1
        return _answer(file, question, asking)

    now = answer(Question(sweep=NOW, change="as it is", cluster=cluster))
    found = [[*map(answer, each_)] for each_ in asked]
    rest = [*map(answer, others)]
    answers = [now]
    most = [most_questions(known, asking.refine) for known in found]
    for number, (sweep, known) in enumerate(zip(swept, found, strict=True)):
        total = done + sum(most[number:])  # the sweeps before may have needed fewer
        answers += narrowed(
            known, lambda value, ask=sweep.ask: replace(answer(ask(value)), between=True),  # type: ignore[misc]
            asking.refine,
        )  # fmt: skip
    return answers + rest


@gc_paused()
def _answer(file: ModelFile, question: Question, asking: Asking) -> Answer:
    model, batch = build_without_data(file, lambda text: None)
    if question.rows is not None:
        batch = with_rows(batch, question.rows)
    rows = _rows(batch)
    none = Answer(sweep=question.sweep, change=question.change, value=question.value, rows=rows)
    if rows < question.cluster.world_size and not asking.options.allow_idle:
        note = f"fewer rows than the {question.cluster.world_size} devices: see --allow-idle"
        return replace(none, note=note)
    of_model = partial(
        api.plan, batch=batch, cluster=question.cluster, loss=file.loss, autocast=file.autocast,
        float32_matmul_precision=file.float32_matmul_precision,
        optimizer=file.optimizer or default_optimizer, rules=file.rules, fixed=file.fixed,
        options=asking.options, cache=asking.cache,
    )  # fmt: skip
    try:
        plan = real_if_needed(of_model, model, file.model, lambda text: None)
    except InfeasibleError as error:
        return replace(none, note=error.what)
    kinds = Counter(device.kind for device in plan.cluster.devices)
    return replace(
        none, step_s=plan.prediction.step_s, samples_per_s=rows / plan.prediction.step_s,
        used=tuple(f"{count}x{kind}" for kind, count in kinds.items()),
        left_out=plan.left_out, program=_program(plan), cost=cost_of(plan, rows),
    )  # fmt: skip


def cost_of(plan: Plan, rows: int) -> float:
    """The price of a million samples on the devices in use; 0 if one of them has no price."""
    prices = [device.price_per_hour for device in plan.cluster.devices]
    hours = plan.prediction.step_s / 3600 * 1e6 / rows
    return sum(prices) * hours if all(prices) else 0.0


def check_prices(known: Iterable[float]) -> None:
    """Raise ``InputError`` if all prices are 0, so that lines have no order by cost."""
    if not any(known):
        raise InputError(
            "--by cost: the cluster file gives no prices",
            hint="give every device a price_per_hour: see docs/cluster-file.md",
        )


def by_cost(answers: Sequence[Answer]) -> list[Answer]:
    """The answers in the order of their cost, those without a cost last.

    Raises:
        InputError: no answer has a cost.
    """
    check_prices(answer.cost for answer in answers)
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


def what_if_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """All answers, for other programs."""
    return {
        "answers": [asdict(answer) for answer in answers],
        "crossovers": [asdict(crossover) for crossover in crossovers(answers)],
    }


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
    lines = [Text(c.text) for c in crossovers(answers)] or [Text("none between the values above")]
    return Group(*parts, Text("Crossovers", style="bold"), *(Padding(x, (0, 2)) for x in lines))


def _samples(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
