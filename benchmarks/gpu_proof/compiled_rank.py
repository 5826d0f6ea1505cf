"""One rank, compiled, against ``torch.compile``: first losses and step times of real models."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_proof.report import Line
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import on_a_gpu


def run(settings: Settings) -> Iterator[Line]:
    """Yield two lines per model and precision."""
    yield from on_a_gpu("compiled", settings, "inductor", "torch.compile")
