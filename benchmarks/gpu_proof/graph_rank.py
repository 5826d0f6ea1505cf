"""One rank whose steps are CUDA graphs, against plain PyTorch: first losses, step times, peak memory."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu_proof.report import Line
from benchmarks.gpu_proof.settings import Settings
from benchmarks.gpu_proof.single_rank import on_a_gpu


def run(settings: Settings) -> Iterator[Line]:
    """Yield three lines per model and precision."""
    yield from on_a_gpu("cuda graphs", settings, "cudagraphs", "eager", peaks=True)
