"""A device and its figures; one formula, the roofline of :meth:`Device.seconds`.

The figures are *effective* rates, as real layers reach them, not the peaks of a datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hap.cluster.link import IMPLEMENTATIONS
from hap.errors import ClusterError

# How a dtype without a figure of its own is computed. A GPU without bfloat16 units emulates
# them in float32; integers and booleans run on the ordinary (non-tensor) units.
_STAND_IN: Final[Mapping[str, str]] = {
    "bfloat16": "float32",
    "float16": "float32",
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
    "complex64": "float32",
    "complex128": "float64",
}


PRODUCTS: Final = ("matmul", "conv", "conv_backward", "attention", "attention_backward")
"""Kinds of work that run on the units for matrix products, at the rate of their dtype."""

ELEMENTWISE: Final = ("math", "tanh", "loss", "reduce", "pool", "random", "update")
"""Kinds of work that may take longer than their memory traffic: functions such as ``exp``,
losses, sums, pooling, random masks and the optimizer's step. They count elements; see
:mod:`hap.synthesizer.cost.operator_work`."""

# A kind without an efficiency of its own runs like its more general one.
_GENERAL: Final[Mapping[str, str]] = {
    "conv_backward": "conv",
    "attention_backward": "attention",
    "tanh": "math",
    "loss": "math",
}


class Work(NamedTuple):
    """One operator's work, or that of one local shard of it."""

    kind: str  # one of PRODUCTS or ELEMENTWISE, or 'memory'
    dtype: str  # 'float32', 'float16', 'bfloat16', 'float64', 'int64', ...
    flops: float  # a multiplication and an addition count as two
    bytes: float  # read from and written to the device's memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's accelerator (or share of a CPU).

    Attributes:
        name: Unique, ``node:index``.
        kind: Name in the catalogue; ``cpu`` for a processor.
        node: The machine it sits in.
        memory_bytes: What a plan may use.
        flops_per_s: Achieved rate of large matrix products, per dtype.
        memory_bytes_per_s: Achieved rate of operators that only move data.
        launch_s: Constant cost of one operator.
        efficiency: Rate of another kind of work, as a fraction of ``flops_per_s``; for example
            ``{"attention": 0.5, "conv": 0.8}``. A kind that is absent runs like its more general
            one, or at the full rate: elementwise work then takes what its memory traffic does.
        operand_bytes_per_s: Rate at which products take in and give out their tensors, which adds to
            the time of their arithmetic; thin products are slower for it. Infinite where arithmetic
            hides it. ``flops_per_s`` over it is the intensity at which a product has half of its
            rate (Hockney and Curington, 1989).
        interference: Part of the time of a collective among this device and faster ones that
            computing beside it loses; at least 0 and below 1.
        drag: How many times as long a collective among this device and faster ones takes while the
            device computes beside it; at least 1. It takes its own time while all ranks wait for it.
        delay_s: Seconds by which each message of such a collective is later still, however few its
            bytes (:func:`messages`), if the device computes meanwhile: it waits for who computes.
        start: What a collective among this device and faster ones takes to start, as a part of
            what the cluster's measured collectives say; above 0, at most 1. Those are of all
            devices, and a slow one is late to answer.
        traffic: What the bytes of such a collective take, likewise, by the collective's name; 1 for
            those without a figure. A slow device packs and adds up slowly, too.
        relaunch: What an operator that follows a small one takes to start, and the update of a
            parameter, as a part of ``launch_s``; above 0, at most 1. Where the host computes, what is
            large takes everything else out of its caches, code included.
        source: Where each figure comes from, by the name of the figure.
    """

    name: str
    kind: str
    node: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    launch_s: float
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    operand_bytes_per_s: float = math.inf
    interference: float = 0.0
    drag: float = 1.0
    delay_s: float = 0.0
    start: float = 1.0
    traffic: Mapping[str, float] = field(default_factory=dict, hash=False)
    relaunch: float = 1.0
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ClusterError(
                f"device {self.name} has no float32 rate", hint="add flops: {float32: 14 TFLOP/s}"
            )
        positive = {
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            **{f"flops_per_s[{dtype}]": rate for dtype, rate in self.flops_per_s.items()},
            **{f"efficiency[{kind}]": part for kind, part in self.efficiency.items()},
        }
        for figure, value in positive.items():
            if not 0 < value < float("inf"):
                raise ClusterError(
                    f"{figure} of device {self.name} is {value}", hint="give a positive figure"
                )
        for figure in ("launch_s", "delay_s"):
            if not 0 <= getattr(self, figure) < float("inf"):
                raise ClusterError(f"{figure} of device {self.name} is {getattr(self, figure)}")
        if not self.operand_bytes_per_s > 0:
            what = f"operand_bytes_per_s of device {self.name} is {self.operand_bytes_per_s}"
            raise ClusterError(what, hint="give a positive figure")
        if not 0 <= self.interference < 1:
            raise ClusterError(
                f"interference of device {self.name} is {self.interference}",
                hint="give the part of a collective's time that computing loses, such as 0.1",
            )
        if not 1 <= self.drag < float("inf"):
            raise ClusterError(
                f"drag of device {self.name} is {self.drag}",
                hint="give how many times as long a collective takes beside computing, such as 1.2",
            )
        for figure, hint in (
            ("start", "give the part of a start that is left without slower devices, such as 0.3"),
            (
                "relaunch",
                "give the part of a launch that an operator after a small one takes, such as 0.5",
            ),
        ):
            if not 0 < getattr(self, figure) <= 1:
                what = f"{figure} of device {self.name} is {getattr(self, figure)}"
                raise ClusterError(what, hint=hint)
        for kind, part in self.traffic.items():
            if kind not in IMPLEMENTATIONS or not 0 < part <= 1:
                what = f"traffic[{kind}] of device {self.name} is {part}"
                hint = f"give a part of 1 for any of {', '.join(IMPLEMENTATIONS)}"
                raise ClusterError(what, hint=hint)

    def rate(self, kind: str, dtype: str) -> float:
        """Achieved FLOP/s of a kind of work in a dtype.

        Elementwise work without a figure is as fast as memory: its rate has no limit.
        """
        if kind in ELEMENTWISE and dtype != "float64":
            dtype = "float32"  # on the ordinary units, whatever tensor cores do
        while dtype not in self.flops_per_s:
            dtype = _STAND_IN.get(dtype, "float32")
        if kind not in self.efficiency:
            kind = _GENERAL.get(kind, kind)
        if kind in ELEMENTWISE and kind not in self.efficiency:
            return math.inf
        return self.flops_per_s[dtype] * self.efficiency.get(kind, 1.0)

    def operand_s(self, kind: str) -> float:
        """Seconds that each byte of an operator's tensors adds to its arithmetic."""
        return 1 / self.operand_bytes_per_s if kind in PRODUCTS else 0.0

    def launch_of(self, kind: str) -> float:
        """Constant cost of an operator of a kind of work, in seconds."""
        return self.relaunch_s if kind == "update" else self.launch_s

    @property
    def relaunch_s(self) -> float:
        """Constant cost of an operator that follows a small one, in seconds."""
        return self.launch_s * self.relaunch

    def seconds(self, work: Work) -> float:
        """Time of one operator: launch, then arithmetic or memory traffic, whichever is longer.

        Work without flops and bytes (a zero-length shard, a view) takes no time at all.
        """
        if not work.flops and not work.bytes:
            return 0.0
        compute_s = work.flops / self.rate(work.kind, work.dtype) if work.flops else 0.0
        compute_s += work.bytes * self.operand_s(work.kind)
        return self.launch_of(work.kind) + max(compute_s, work.bytes / self.memory_bytes_per_s)

    @property
    def figures(self) -> tuple[object, ...]:
        """What two devices must share to be alike: everything but name, node and provenance."""
        return (
            self.kind,
            self.memory_bytes,
            tuple(sorted(self.flops_per_s.items())),
            self.memory_bytes_per_s,
            self.launch_s,
            self.operand_bytes_per_s,
            self.interference,
            self.drag,
            self.delay_s,
            self.start,
            tuple(sorted(self.traffic.items())),
            self.relaunch,
            tuple(sorted(self.efficiency.items())),
        )
