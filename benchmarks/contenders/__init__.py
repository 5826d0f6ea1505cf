"""The training methods that the race compares, by name, each in a file of its own.

A contender's module is imported only when the contender is made, because imports take long.
"""

from __future__ import annotations

import importlib
from typing import Final

from benchmarks.contenders.base import Contender, Setting

OURS: Final = "ours"
PAPER: Final = "hap-paper"
EVEN: Final = "ddp-even"
PROPORTIONAL: Final = "ddp-proportional"
ONE: Final = "one-device"
FASTEST: Final = "ddp-fastest"
ZERO: Final = "zero"
FSDP: Final = "fsdp2"
TENSOR_PARALLEL: Final = "tensor-parallel"

CONTENDERS: Final[dict[str, tuple[str, str]]] = {
    EVEN: ("even_ddp", "EvenDDP"),
    PROPORTIONAL: ("proportional_ddp", "ProportionalDDP"),
    ONE: ("on_fastest", "OneDevice"),
    FASTEST: ("on_fastest", "FastestDDP"),
    ZERO: ("zero", "Zero"),
    FSDP: ("fsdp", "FSDP"),
    TENSOR_PARALLEL: ("tensor_parallel", "TensorParallel"),
    PAPER: ("planned", "Planned"),
    OURS: ("planned", "Planned"),
}
"""Name -> (module, class), in the order of the tables."""

IN_TURN: Final = "plan: nothing overlapped"
UNUSUAL: Final[dict[str, tuple[str, str]]] = {IN_TURN: ("planned", "InTurn")}
"""Contenders of the ablation alone."""

ABSENT: Final[dict[str, str]] = {
    "horovod": "its newest, 0.28.1, compiles for PyTorch as C++14; torch 2.13 needs C++17"
}
"""Contenders that cannot be raced, with the reason."""


def make(name: str, setting: Setting) -> Contender:
    """Return this rank's instance of a contender; any name not listed above is a plan's."""
    module, kind = (CONTENDERS | UNUSUAL).get(name, ("planned", "Planned"))
    found = importlib.import_module(f"benchmarks.contenders.{module}")
    contender: Contender = getattr(found, kind)(setting)
    return contender
