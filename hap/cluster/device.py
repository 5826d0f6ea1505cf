"""A device, its figures, and the roofline that predicts the time of an operator.

Figures are *effective* rates, as real layers reach them, not the peaks of a datasheet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from hap.cluster.figures import FIGURES, RETIRED, nested, warn_of_retired
from hap.cluster.work import ELEMENTWISE, GENERAL, PRODUCTS, Work
from hap.errors import ClusterError

USABLE_MEMORY: Final = 0.94
"""Part of a GPU's memory, as the driver states it, that a plan may use by default. The rest is for the
CUDA context, the buffers of NCCL, the workspaces of kernels, and fragmentation."""

# Substitutes for dtypes without a figure of their own. A GPU without bfloat16 units emulates
# them in float32; integers and booleans run on the ordinary (non-tensor) units.
_STAND_IN: Final[Mapping[str, str]] = {
    "float64": "float32",
    "tfloat32": "float32",
    "bfloat16": "float32",
    "float16": "float32",
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
    "complex64": "float32",
    "complex128": "float64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Mutual slowdown of computing on a device and the collectives that it takes part in.

    The figures are those of collectives among this device and faster ones.

    Attributes:
        interference: part of a collective's time that simultaneous computing loses, in [0, 1).
        drag: duration of a collective while the device computes, relative to its duration while
            all ranks wait for it; at least 1.
        delay_s: additional seconds of each message of a collective
            (:func:`hap.cluster.link.messages`) while the device computes, for any size.
    """

    interference: float = 0.0
    drag: float = 1.0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One rank's accelerator, or its share of a CPU.

    Attributes:
        name: unique, ``node:index``.
        kind: name in the catalogue; ``cpu`` for a processor.
        node: the machine it sits in.
        memory_bytes: bytes that a plan may use.
        flops_per_s: achieved rate of large matrix products, per dtype.
        memory_bytes_per_s: achieved rate of operators that only move data.
        launch_s: constant cost of one operator.
        host_s: time in which the host issues one operator; the device cannot run it earlier.
        efficiency: rate of another kind of work as a fraction of ``flops_per_s``, for example
            ``{"attention": 0.5, "conv": 0.8}``. A kind that is absent runs like its more general
            one, or at the full rate: elementwise work then takes as long as its memory traffic.
        operand_bytes_per_s: rate at which products read and write their tensors, which adds to the
            time of their arithmetic. Infinite where arithmetic hides it. ``flops_per_s`` over it
            is the intensity at which a product has half of its rate (Hockney and Curington, 1989).
        contention: mutual slowdown of computing and collectives.
        relaunch: launch cost of a small operator, and of a parameter's update, relative to
            ``launch_s``; in (0, 1].
        price_per_hour: in any currency; 0 if unknown. Planning does not use it.
        source: provenance of each figure, by its name in :data:`hap.cluster.figures.FIGURES`.

    Raises:
        ClusterError: a figure is out of its range.
    """

    name: str
    kind: str
    node: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    memory_bytes_per_s: float
    launch_s: float
    host_s: float = 0.0
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)
    operand_bytes_per_s: float = math.inf
    contention: Contention = Contention()
    relaunch: float = 1.0
    price_per_hour: float = 0.0
    source: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ClusterError(
                f"device {self.name} has no float32 rate", hint="add flops: {float32: 14 TFLOP/s}"
            )
        for figure in FIGURES:
            if problem := figure.problem(figure.of(self)):
                what, _, value = problem.partition(" is ")
                raise ClusterError(f"{what} of device {self.name} is {value}", hint=figure.hint)

    @classmethod
    def with_figures(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Return a device with figures by path; ``others`` are its remaining fields."""
        held = nested(values)
        return cls(
            contention=Contention(**held.pop("contention", {})), **held.pop("", {}), **others
        )

    def changed(self, values: Mapping[str, Any], **others: Any) -> Self:
        """Return the device with other values of some figures, by path, and other fields."""
        held = nested(values)
        contention = replace(self.contention, **held.pop("contention", {}))
        return replace(self, contention=contention, **held.pop("", {}), **others)

    def slower(self, factor: float, why: str) -> Self:
        """Return the device with all rates divided by a factor; ``why`` goes to their sources."""
        rates = {dtype: rate / factor for dtype, rate in self.flops_per_s.items()}
        names = ["memory_bytes_per_s", "launch_s", *(f"flops_per_s.{dtype}" for dtype in rates)]
        names += ["host_s"] * (self.host_s > 0)
        names += ["operand_bytes_per_s"] * (self.operand_bytes_per_s < math.inf)
        notes = {name: f"{self.source.get(name, 'assumed')}; {why}" for name in names}
        return replace(
            self, flops_per_s=rates, memory_bytes_per_s=self.memory_bytes_per_s / factor,
            operand_bytes_per_s=self.operand_bytes_per_s / factor, launch_s=self.launch_s * factor,
            host_s=self.host_s * factor, source={**self.source, **notes},
        )  # fmt: skip

    @classmethod
    def together(cls, devices: Sequence[Self], name: str) -> Self:
        """Return one device as fast and as large as several; other fields are the first's."""
        values = {f.path: f.combined([f.of(device) for device in devices]) for f in FIGURES}
        return devices[0].changed(values, name=name, kind=f"{len(devices)} x {devices[0].kind}")

    def rate(self, kind: str, dtype: str) -> float:
        """Return the achieved FLOP/s of a kind of work in a dtype.

        Elementwise work without a figure is as fast as memory: its rate has no limit. Without a figure for
        float64, it is half as fast as float32, as on GPUs for data centers; consumer GPUs are slower.
        """
        factor = 1.0
        if kind in ELEMENTWISE and dtype != "float64":
            dtype = "float32"  # on the ordinary units, which differ from tensor cores
        while dtype not in self.flops_per_s:
            factor = 0.5 if dtype == "float64" else factor
            dtype = _STAND_IN.get(dtype, "float32")
        while kind not in self.efficiency and kind in GENERAL:
            kind = GENERAL[kind]
        if kind in ELEMENTWISE and kind not in self.efficiency:
            return math.inf
        return factor * self.flops_per_s[dtype] * self.efficiency.get(kind, 1.0)

    def operand_s(self, kind: str) -> float:
        """Return the seconds that each byte of an operator's tensors adds to its arithmetic."""
        return 1 / self.operand_bytes_per_s if kind in PRODUCTS else 0.0

    def launch_of(self, work: Work) -> float:
        """Return the constant cost of an operator, in seconds."""
        looped = work.small or work.kind == "update"
        return self.launch_s * (self.relaunch if looped else 1.0) * work.launches

    def seconds(self, work: Work) -> float:
        """Return the time of one operator: launch plus the larger of arithmetic and traffic.

        Work without flops and bytes (a zero-length shard, a view) takes no time.
        """
        if not work.flops and not work.bytes:
            return 0.0
        compute_s = work.flops / self.rate(work.kind, work.dtype) if work.flops else 0.0
        compute_s += work.bytes * self.operand_s(work.kind)
        return self.launch_of(work) + max(compute_s, work.bytes / self.memory_bytes_per_s)

    @property
    def figures(self) -> tuple[object, ...]:
        """All fields that equal devices share: not name, node and provenance."""
        return self.kind, *(figure.frozen(figure.of(self)) for figure in FIGURES)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without default figures."""
        values = {f.name: f.of(self) for f in FIGURES if f.of(self) != f.default}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        source = {"source": dict(self.source)} if self.source else {}
        return {"name": self.name, "kind": self.kind, "node": self.node, **plain, **source}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`.

        Raises:
            ClusterError: a figure is out of its range.
            TypeError: a figure is missing or unknown, or a name is no text.
            KeyError: a name is missing.
        """
        for name in ("name", "kind", "node"):
            if not isinstance(data[name], str):
                raise TypeError(f"the {name} of a device is {data[name]!r}, not a text")
        warn_of_retired([k for k in RETIRED if data.get(k, 1.0) not in (1.0, {})], data["name"])
        data = {key: value for key, value in data.items() if key not in RETIRED}
        paths = {figure.name: figure.path for figure in FIGURES}
        values = {paths[name]: value for name, value in data.items() if name in paths}
        return cls.with_figures(values, **{k: v for k, v in data.items() if k not in paths})
