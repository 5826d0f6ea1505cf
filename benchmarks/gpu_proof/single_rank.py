"""One rank against plain PyTorch: step times and peak memory of real models.

The planned step and the plain one take turns. Times are of CUDA events; a ratio is the median of the
ratios within one round.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.gpu_proof.models import PRECISIONS, Prepared, Single, built_single, singles
from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from hap.capture.tracing import Step
from hap.ir.batch import Batch, call, each, flatten
from hap.ir.plan import Plan
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule

PART = "one rank"
RATIO, MEMORY = 1.03, 0.06
WARM_UP, ROUNDS = 3, 9
ON_CPU = "a CPU's step times and memory show nothing of a GPU's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds per round of both contenders, their first losses, the planned step's peak memory.

    Attributes:
        plan: the plan that was run.
        planned_s, plain_s: per round, in the same order.
        first_losses: of the planned and the plain step, from equal weights.
        peak_bytes: allocated during a planned step; 0 on a CPU.
    """

    plan: Plan
    planned_s: list[float]
    plain_s: list[float]
    first_losses: tuple[float, float]
    peak_bytes: int

    @property
    def ratio(self) -> float:
        """The median over rounds of the planned step's seconds over the plain one's."""
        return statistics.median(a / b for a, b in zip(self.planned_s, self.plain_s, strict=True))

    @property
    def step_s(self) -> float:
        return statistics.median(self.planned_s)


def run(settings: Settings) -> Iterator[Line]:
    """Yield three lines per model and precision: first losses, step time, peak memory."""
    for name, found in measured(settings, backend="eager"):
        if found is None:
            yield unprepared(PART, name)
            continue
        yield from against(PART, settings, name, found, "eager")
        yield memory(PART, settings, name, found)


def on_a_gpu(
    part: str, settings: Settings, backend: str, theirs: str, *, peaks: bool = False
) -> Iterator[Line]:
    """Yield the lines of a backend for each model and precision, or that there is no GPU.

    Args:
        theirs: the contender's name.
        peaks: compare predicted peak memory too.
    """
    if not settings.on_gpu:
        yield Line(part=part, claim=f"planned, {backend}", outcome=SKIPPED, reason=ON_CPU)
        return
    for name, found in measured(settings, backend=backend):
        if found is None:
            yield unprepared(part, name)
            continue
        yield from against(part, settings, name, found, theirs)
        if peaks:
            yield memory(part, settings, name, found)


def measured(settings: Settings, *, backend: str) -> Iterator[tuple[str, Measured | None]]:
    """Yield the name and the figures of each model in each precision; ``None`` without a plan."""
    for single in singles(settings.device, settings.models):
        for precision in PRECISIONS:
            found = measure(settings, single, precision, backend=backend)
            yield f"{single.name}, {precision}", found


def against(
    part: str, settings: Settings, name: str, found: Measured, theirs: str
) -> Iterator[Line]:
    """Yield the lines of one pair: that their first losses agree, and the ratio of their steps."""
    losses = found.first_losses
    room = 1e-4 if "float32" in name else 2e-2
    same = abs(losses[0] - losses[1]) <= room * abs(losses[1])
    yield Line(
        part=part, claim=f"{name}: first loss of {theirs}", outcome=MET if same else MISSED,
        seen=f"{losses[0]:.6f} and {losses[1]:.6f}", aim=f"<= {room:g} apart",
        reason="" if same else "the losses differ",
    )  # fmt: skip
    seen = f"{found.ratio:.3f}x of {statistics.median(found.plain_s) * 1e3:.1f} ms"
    met = found.ratio <= RATIO
    yield Line(
        part=part, claim=f"{name}: planned over {theirs}", seen=seen, aim=f"<= {RATIO:g}x",
        outcome=(MET if met else MISSED) if settings.on_gpu else SKIPPED,
        reason="" if settings.on_gpu else ON_CPU,
    )  # fmt: skip


def memory(part: str, settings: Settings, name: str, found: Measured) -> Line:
    """Return the line of the predicted peak memory of one pair."""
    claim = f"{name}: predicted peak memory"
    if not settings.on_gpu:
        return Line(part=part, claim=claim, outcome=SKIPPED, reason=ON_CPU)
    error = found.plan.prediction.ranks[0].peak_bytes / found.peak_bytes - 1
    return Line(
        part=part, claim=claim, outcome=MET if abs(error) <= MEMORY else MISSED,
        seen=f"{error:+.1%} of {found.peak_bytes / 2**30:.2f} GiB", aim=f"<= {MEMORY:.0%}",
    )  # fmt: skip


@functools.cache
def measure(settings: Settings, single: Single, precision: str, *, backend: str) -> Measured | None:
    """Race the planned and the plain step, of equal weights and batch; ``None`` without a plan.

    The second call with the same arguments returns the figures of the first.
    """
    prepared = Prepared.load(settings.folder, f"single-{single.name}-{precision}")
    if prepared is None:
        return None
    found = _race(settings, single, precision, prepared.plan, backend)
    gc.collect()
    if settings.on_gpu:
        torch.cuda.empty_cache()
    return found


def _race(settings: Settings, single: Single, precision: str, plan: Plan, backend: str) -> Measured:
    device = settings.device
    model, batch = built_single(single)
    batch = each(batch, lambda name, t: t.to(device))
    module = HapModule(plan, model, LocalComm(), device, backend=backend)
    mine = plan.local_batch(batch, 0)
    planned = _trainer(module, lambda: call(module, mine), single)
    first, peak = planned(), 0
    if settings.on_gpu:  # the step runs alone, after a first one
        torch.cuda.reset_peak_memory_stats(device)
        planned()
        peak = torch.cuda.max_memory_allocated(device)
    plain = _plain(model, batch, single, precision, device, compiled=backend == "inductor")
    losses = first, plain()
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(WARM_UP + ROUNDS):
        for k in (0, 1) if number % 2 else (1, 0):
            took = _timed((planned, plain)[k], device)
            if number >= WARM_UP:
                seconds[k].append(took)
    return Measured(
        plan=plan, planned_s=seconds[0], plain_s=seconds[1], first_losses=losses,
        peak_bytes=peak,
    )  # fmt: skip


def _plain(
    model: nn.Module, batch: Batch, single: Single, precision: str, device: torch.device, *,
    compiled: bool,
) -> Callable[[], float]:  # fmt: skip
    module: nn.Module = Step(copy.deepcopy(model).to(device), batch, None)
    if compiled:
        module = torch.compile(module, dynamic=False)
    tensors = tuple(flatten(batch).values())

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            return module(*tensors)  # type: ignore[no-any-return]

    return _trainer(module, loss, single)


def _trainer(
    module: nn.Module, loss_of: Callable[[], torch.Tensor], single: Single
) -> Callable[[], float]:
    optimizer = single.optimizer([p for p in module.parameters() if p.requires_grad])

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.item()

    return step


def _timed(step: Callable[[], float], device: torch.device) -> float:
    """Return the seconds of one step on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
