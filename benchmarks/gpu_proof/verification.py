"""Random uneven plans and pipelines on real ranks against one device: float64, float32, bfloat16 autocast.

Float64 and float32 have the tolerances of ``hap verify``; in float32, parameters after three steps are
not compared, because Adam divides a rounding by its own size. Autocast rounds to eight bits, at
different places on shards than on whole tensors: losses are compared to 2 %, and all gradients
together, by the norm of their difference, to 10 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from benchmarks.gpu_proof.models import FAMILIES, Prepared, built
from benchmarks.gpu_proof.report import MET, MISSED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from hap.errors import HapError
from hap.runtime.collectives import Comm
from hap.runtime.launch import report
from hap.runtime.one_device import Observed, observe_reference
from hap.runtime.shards import join
from hap.runtime.verify import TOLERANCE, Observer, compare

PART = "verification"
LOSS_ROOM, GRADIENT_ROOM = 0.02, 0.1
KINDS = (
    ("random", "float64"), ("staged", "float64"), ("autocast", "float32"),
    ("random", "float32"), ("staged", "float32"),
)  # fmt: skip
"""(kind of prepared plan, dtype of the parameters)."""


class Job(NamedTuple):
    """One plan in one precision."""

    name: str
    dtype: str

    @property
    def kind(self) -> str:
        return self.name.split("-")[0]

    @property
    def precision(self) -> str:
        precision = "bfloat16 autocast" if self.kind == "autocast" else self.dtype
        return f"pipeline, {precision}" if self.kind == "staged" else precision


def run(settings: Settings) -> Iterator[Line]:
    """Yield one line per family and precision; a group of ranks observes all families in one precision."""
    for kind, dtype in KINDS:
        jobs = [Job(f"{kind}-{family}", dtype) for family in FAMILIES]
        plans = {job: Prepared.load(settings.folder, job.name) for job in jobs}
        there = {job: prepared for job, prepared in plans.items() if prepared}
        found, failures = _observed_by_all(settings, there)
        for job, prepared in plans.items():
            claim = f"{job.name.split('-')[1]}, {job.precision}: losses and gradients of one device"
            if prepared is None:
                yield unprepared(PART, claim)
                continue
            if job in failures:
                yield Line(part=PART, claim=claim, outcome=MISSED, reason=failures[job])
                continue
            check = _autocast if kind == "autocast" else _exact
            ok, seen, aim, reason = check(settings, job, prepared, found[job])
            yield Line(
                part=PART, claim=f"{claim}, {prepared.plan.world_size} ranks",
                outcome=MET if ok else MISSED, seen=seen, aim=aim, reason=reason,
            )  # fmt: skip


def _observed_by_all(
    settings: Settings, plans: Mapping[Job, Prepared]
) -> tuple[dict[Job, list[Observed]], dict[Job, str]]:
    """Return (results of the ranks per job, the error per job that failed).

    Ranks report each job that they have finished. The first one that some rank has not finished is
    the one that failed; a new group of ranks goes on after it.
    """
    done: dict[Job, dict[int, Observed]] = {job: {} for job in plans}
    failures: dict[Job, str] = {}
    while waiting := {j: p for j, p in plans.items() if j not in failures and not done[j]}:
        try:
            settings.on_ranks(
                observed, settings.ranks, waiting,
                on_report=lambda rank, told: done[told[0]].update({rank: told[1]}),
            )  # fmt: skip
        except HapError as error:
            failed = next((job for job in waiting if len(done[job]) < settings.ranks), None)
            if failed is None:  # all had reported when a rank failed to end
                break
            failures[failed] = str(error)
            for job in waiting:
                if len(done[job]) < settings.ranks:
                    done[job].clear()
    found = {job: [of[rank] for rank in sorted(of)] for job, of in done.items() if of}
    return found, failures


def observed(comm: Comm, device: torch.device, plans: Mapping[Job, Prepared]) -> None:
    """Report this rank's results under each plan."""
    for job, prepared in plans.items():
        model, batch, _, optimizer = built(prepared.family)
        observer = Observer.make(prepared.plan, model, batch, optimizer, job.dtype, device=device)
        report((job, observer(comm)))


Checked = tuple[bool, str, str, str]
"""(whether it is right, the figure seen, the aim, the reason if it is wrong)."""


def _exact(settings: Settings, job: Job, prepared: Prepared, ranks: list[Observed]) -> Checked:
    plan = prepared.plan
    model, batch, loss, optimizer = built(prepared.family)
    made = Observer.make(plan, model, batch, optimizer, job.dtype, device=settings.device)
    expected = observe_reference(made.model, made.batch, loss, optimizer, settings.device)
    room = TOLERANCE[job.dtype]
    rows = [row for row in compare(plan, expected, ranks, room)
            if job.dtype == "float64" or row.what in ("loss", "gradient")]  # fmt: skip
    worst = max(rows, key=lambda row: row.error)
    reason = "" if worst.error <= room else f"{worst.what} of {worst.tensor}"
    return worst.error <= room, f"{worst.error:.1e}", f"<= {room:g}", reason


def _autocast(settings: Settings, job: Job, prepared: Prepared, ranks: list[Observed]) -> Checked:
    model, batch, loss, optimizer = built(prepared.family)
    made = Observer.make(prepared.plan, model, batch, optimizer, job.dtype, device=settings.device)
    with torch.autocast(settings.device.type, torch.bfloat16):
        expected = observe_reference(made.model, made.batch, loss, optimizer, settings.device)
    first = "loss of step 1"
    here, there = float(ranks[0]["loss"][first]), float(expected["loss"][first])
    loss_error = abs(here - there) / abs(there)
    tensors = {i.target: i.tensor for i in prepared.plan.graph.role("parameter")}
    squares = total = 0.0
    for name, reference in expected["gradient"].items():
        wholes = join(prepared.plan, tensors[name], [seen["gradient"][name] for seen in ranks])
        squares += max(float((whole - reference).square().sum()) for whole in wholes)
        total += float(reference.square().sum())
    gradient_error = (squares / total) ** 0.5
    ok = loss_error <= LOSS_ROOM and gradient_error <= GRADIENT_ROOM
    seen = f"loss {loss_error:.1e}, gradients {gradient_error:.1e}"
    aim = f"loss <= {LOSS_ROOM:g}, gradients <= {GRADIENT_ROOM:g}"
    return ok, seen, aim, "" if ok else "they differ by more than rounding to eight bits explains"
