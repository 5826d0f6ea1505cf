"""One rank whose steps are CUDA graphs, against plain PyTorch: first losses, step times, peak memory."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_proof.report import SKIPPED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import against, measured, memory

PART = "cuda graphs"


def run(settings: Settings) -> Iterator[Line]:
    """Yield three lines per model and precision."""
    if not settings.on_gpu:
        reason = "this machine has no CUDA device"
        yield Line(part=PART, claim="steps as CUDA graphs", outcome=SKIPPED, reason=reason)
        return
    for name, found in measured(settings, backend="cudagraphs"):
        if found is None:
            yield unprepared(PART, name)
        else:
            yield from against(PART, settings, name, found, "eager")
            yield memory(PART, settings, name, found)
