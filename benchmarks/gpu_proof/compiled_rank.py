"""One rank, compiled, against ``torch.compile``: first losses and step times of real models."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_proof.models import PRECISIONS, singles
from benchmarks.gpu_proof.report import SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import UNPREPARED, against, measure

PART = "compiled"


def run(settings: Settings) -> Iterator[Line]:
    """Yield two lines per model and precision."""
    if not settings.on_gpu:
        reason = "kernels that are compiled for a CPU show nothing of a GPU's"
        yield Line(part=PART, claim="planned and compiled", outcome=SKIPPED, reason=reason)
        return
    for single in singles(settings.device, settings.models):
        for precision in PRECISIONS:
            name = f"{single.name}, {precision}"
            found = measure(settings, single, precision, backend="inductor")
            if found is None:
                yield Line(part=PART, claim=name, outcome=SKIPPED, reason=UNPREPARED)
                continue
            yield from against(PART, settings, name, found, "torch.compile")
