"""The training methods that the race compares, by name, each in a file of its own.

A contender's module is imported only when the contender is made, because imports take long.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Final

from benchmarks.contenders.base import Contender, Setting
from benchmarks.contenders.on_fastest import OnFastest

OURS: Final = "ours"
OURS_STAGED: Final = "ours-stages"
OURS_HALF: Final = "ours-bf16"
PAPER: Final = "hap-paper"
EVEN: Final = "ddp-even"
PROPORTIONAL: Final = "ddp-proportional"
ONE: Final = "one-device"
FASTEST: Final = "ddp-fastest"
FASTER_KINDS: Final = "ddp-faster-kinds"
HALF_PROPORTIONAL: Final = "ddp-proportional-bf16"
HALF_FASTEST: Final = "ddp-fastest-bf16"
PIPELINE_EVEN: Final = "pipeline-even"
PIPELINE_SPEED: Final = "pipeline-by-speed"
PIPELINE_FASTEST: Final = "pipeline-fastest"
PIPELINE_BY_HAND: Final = "pipeline-by-hand"
ZERO: Final = "zero"
ZERO_FASTEST: Final = "zero-fastest"
FSDP: Final = "fsdp2"
FSDP_FASTEST: Final = "fsdp2-fastest"
TENSOR_PARALLEL: Final = "tensor-parallel"
TENSOR_PARALLEL_FASTEST: Final = "tensor-parallel-fastest"

CONTENDERS: Final[dict[str, tuple[str, str]]] = {
    EVEN: ("even_ddp", "EvenDDP"),
    PROPORTIONAL: ("proportional_ddp", "ProportionalDDP"),
    ONE: ("on_fastest", "OneDevice"),
    FASTEST: ("even_ddp", "EvenDDP"),
    FASTER_KINDS: ("proportional_ddp", "ProportionalDDP"),
    HALF_PROPORTIONAL: ("half_ddp", "ProportionalHalfDDP"),
    HALF_FASTEST: ("half_ddp", "EvenHalfDDP"),
    PIPELINE_EVEN: ("pipelined", "EvenPipeline"),
    PIPELINE_SPEED: ("pipelined", "SpeedPipeline"),
    PIPELINE_FASTEST: ("pipelined", "EvenPipeline"),
    PIPELINE_BY_HAND: ("pipelined", "HandPipeline"),
    ZERO: ("zero", "Zero"),
    ZERO_FASTEST: ("zero", "Zero"),
    FSDP: ("fsdp", "FSDP"),
    FSDP_FASTEST: ("fsdp", "FSDP"),
    TENSOR_PARALLEL: ("tensor_parallel", "TensorParallel"),
    TENSOR_PARALLEL_FASTEST: ("tensor_parallel", "TensorParallel"),
    PAPER: ("planned", "Planned"),
    OURS: ("planned", "Planned"),
    OURS_STAGED: ("planned", "Planned"),
    OURS_HALF: ("planned", "Planned"),
}
"""Name -> (module, class), in the order of the tables."""

HOPELESS: Final = (ZERO, FSDP, TENSOR_PARALLEL)
HOPELESS_ON: Final = ("4411", "paper", "two_sites", "even")
TOO_SLOW: Final = (
    "took 2.1 times as long as the fastest, or longer, in all 14 cells of commit 3f68ca0"
)
"""Contenders that are raced on some clusters on request alone, and the reason."""

ON_FASTEST: Final = (
    FASTEST, PIPELINE_FASTEST, PIPELINE_BY_HAND, ZERO_FASTEST, FSDP_FASTEST,
    TENSOR_PARALLEL_FASTEST, HALF_FASTEST,
)  # fmt: skip
"""Those that the devices of the fastest kind run, without the others."""

ROUNDED: Final = (HALF_PROPORTIONAL, HALF_FASTEST, OURS_HALF)
"""Those that sum gradients in bfloat16; their losses differ from one device's by more."""

PLANNED: Final = (PAPER, OURS, OURS_STAGED, OURS_HALF)
"""Plans, which our runtime runs."""

IN_TURN: Final = "plan: nothing overlapped"
ACCUMULATING: Final = "ddp-accumulating"
UNUSUAL: Final[dict[str, tuple[str, str]]] = {
    IN_TURN: ("planned", "InTurn"), ACCUMULATING: ("even_ddp", "AccumulatingDDP"),
}  # fmt: skip
"""Contenders of other benchmarks."""

ABSENT: Final[dict[str, str]] = {
    "horovod": "its newest, 0.28.1, compiles for PyTorch as C++14; torch 2.13 needs C++17"
}
"""Contenders that cannot be raced, with the reason."""


def make(name: str, setting: Setting) -> Contender:
    """Return this rank's instance of a contender; any name not listed above is a plan's."""
    module, kind = (CONTENDERS | UNUSUAL).get(name, ("planned", "Planned"))
    found = importlib.import_module(f"benchmarks.contenders.{module}")
    method: Callable[[Setting], Contender] = getattr(found, kind)
    if name == FASTER_KINDS:
        return OnFastest(setting, method, without_slowest=True)
    return OnFastest(setting, method) if name in ON_FASTEST else method(setting)
