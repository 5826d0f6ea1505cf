"""One rank against plain PyTorch: step times and peak memory of real models.

The planned step, plain eager and, on a GPU, ``torch.compile`` take turns. Times are of CUDA events;
a ratio is the median of the ratios within one round.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.gpu_proof.models import PRECISIONS, Prepared, Single, singles
from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings
from hap.capture.tracing import Step
from hap.ir.batch import call, each, flatten
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule

PART = "one rank"
RATIO, MEMORY = 1.03, 0.06
WARM_UP, ROUNDS = 3, 9
ON_CPU = "a CPU's step times and memory show nothing of a GPU's"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds per round of each contender, and the planned step's peak of allocated bytes."""

    seconds: dict[str, list[float]]
    first_losses: dict[str, float]
    peak_bytes: int

    def ratio(self, ours: str, theirs: str) -> float:
        """Return the median over rounds of one contender's seconds over another's."""
        pairs = zip(self.seconds[ours], self.seconds[theirs], strict=True)
        return statistics.median(a / b for a, b in pairs)

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds["planned"])


def run(settings: Settings) -> Iterator[Line]:
    """Yield three lines per model and precision (eager, compiled, memory) and one of losses."""
    for single in singles(settings.device):
        for precision in PRECISIONS:
            prepared = Prepared.load(settings.folder, f"single-{single.name}-{precision}")
            name = f"{single.name}, {precision}"
            if prepared is None:
                reason = "no prepared plan in the folder; run with --prepare"
                yield Line(part=PART, claim=name, outcome=SKIPPED, reason=reason)
                continue
            yield from _lines(
                settings, name, prepared, measure(settings, single, precision, prepared)
            )


def _lines(settings: Settings, name: str, prepared: Prepared, found: Measured) -> Iterator[Line]:
    losses = found.first_losses
    room = 1e-4 if "float32" in name else 2e-2
    same = all(
        abs(loss - losses["eager"]) <= room * abs(losses["eager"]) for loss in losses.values()
    )
    yield Line(
        part=PART, claim=f"{name}: first loss of plain PyTorch", outcome=MET if same else MISSED,
        seen=", ".join(f"{k} {v:.6f}" for k, v in losses.items()), aim=f"<= {room:g} apart",
        reason="" if same else "the losses differ",
    )  # fmt: skip
    for ours, theirs in (("planned", "eager"), ("planned, compiled", "torch.compile")):
        claim = f"{name}: {ours} over {theirs}"
        if theirs not in found.seconds:
            yield Line(part=PART, claim=claim, outcome=SKIPPED, reason="compiled on a GPU only")
            continue
        ratio = found.ratio(ours, theirs)
        seconds = statistics.median(found.seconds[theirs])
        seen = f"{ratio:.3f}x of {seconds * 1e3:.1f} ms"
        met = ratio <= RATIO
        yield Line(
            part=PART, claim=claim, seen=seen, aim=f"<= {RATIO:g}x",
            outcome=(MET if met else MISSED) if settings.on_gpu else SKIPPED,
            reason="" if settings.on_gpu else ON_CPU,
        )  # fmt: skip
    claim = f"{name}: predicted peak memory"
    if not settings.on_gpu:
        yield Line(part=PART, claim=claim, outcome=SKIPPED, reason=ON_CPU)
        return
    predicted = prepared.plan.prediction.ranks[0].peak_bytes
    error = predicted / found.peak_bytes - 1
    yield Line(
        part=PART, claim=claim, outcome=MET if abs(error) <= MEMORY else MISSED,
        seen=f"{error:+.1%} of {found.peak_bytes / 2**30:.2f} GiB", aim=f"<= {MEMORY:.0%}",
    )  # fmt: skip


def measure(settings: Settings, single: Single, precision: str, prepared: Prepared) -> Measured:
    """Race the contenders from the same weights on the same batch."""
    device = settings.device
    torch.manual_seed(0)
    model, batch = single.model(), single.batch()
    batch = each(batch, lambda name, t: t.to(device))
    steps: dict[str, Callable[[], float]] = {}
    peak = 0

    def planned(backend: str) -> Callable[[], float]:
        module = HapModule(prepared.plan, model, LocalComm(), device, backend=backend)
        mine = prepared.plan.local_batch(batch, 0)
        return _trainer(module, lambda: call(module, mine), single)

    def plain(compiled: bool) -> Callable[[], float]:
        module: nn.Module = Step(copy.deepcopy(model).to(device), batch, None)
        if compiled:
            module = torch.compile(module, dynamic=False)
        tensors = tuple(flatten(batch).values())

        def loss() -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                return module(*tensors)  # type: ignore[no-any-return]

        return _trainer(module, loss, single)

    steps["planned"] = planned("eager")
    losses = {"planned": steps["planned"]()}
    if settings.on_gpu:  # the step runs alone, after a first one
        torch.cuda.reset_peak_memory_stats(device)
        steps["planned"]()
        peak = torch.cuda.max_memory_allocated(device)
    steps["eager"] = plain(compiled=False)
    if settings.on_gpu:
        steps["planned, compiled"] = planned("inductor")
        steps["torch.compile"] = plain(compiled=True)
    losses |= {name: step() for name, step in steps.items() if name != "planned"}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP + ROUNDS):
        for name in list(steps) if number % 2 else list(steps)[::-1]:
            took = _timed(steps[name], device)
            if number >= WARM_UP:
                seconds[name].append(took)
    steps.clear()
    gc.collect()
    if settings.on_gpu:
        torch.cuda.empty_cache()
    return Measured(seconds=seconds, first_losses=losses, peak_bytes=peak)


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
