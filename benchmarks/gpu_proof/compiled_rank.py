"""One rank, compiled, against ``torch.compile``: first losses and step times of real models."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_proof.report import SKIPPED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import against, measured

PART = "compiled"


def run(settings: Settings) -> Iterator[Line]:
    """Yield two lines per model and precision."""
    if not settings.on_gpu:
        reason = "kernels that are compiled for a CPU show nothing of a GPU's"
        yield Line(part=PART, claim="planned and compiled", outcome=SKIPPED, reason=reason)
        return
    for name, found in measured(settings, backend="inductor"):
        if found is None:
            yield unprepared(PART, name)
        else:
            yield from against(PART, settings, name, found, "torch.compile")
