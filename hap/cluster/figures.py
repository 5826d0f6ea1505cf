"""The table of a device's figures: one row each.

A row holds the figure's name in the cluster file, its range and default, and the way in which the
figures of several devices combine into one. The reader, the writer, validation, plan files,
:meth:`hap.ir.mesh.Mesh.between` and the table in docs/cluster-file.md follow the rows. A new
figure is one row, and a field of :class:`hap.cluster.device.Device`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hap.cluster.work import ELEMENTWISE, PRODUCTS

DTYPES: Final = (
    "float64", "float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""Dtypes that have a rate. ``tfloat32``: products of float32 tensors at a lower precision, see
:func:`torch.set_float32_matmul_precision`."""

Number = float
Value = float | Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a device, or one per dtype, kind of work or collective.

    Attributes:
        key: its key in the cluster file.
        path: its attribute of a device, such as ``contention.drag``.
        meaning: a sentence for the docs.
        dimension: ``bytes``, ``bytes/s``, ``flop/s``, ``seconds``, or nothing for a plain number.
        by: the keys of a mapping that the file may have; empty if the figure is one number.
        default: its value if none is given; ``None``: it is required.
        least, most: the range of possible values.
        open: the range is without ``least`` (``(``), without ``most`` (``)``), or both.
        hint: advice for a value out of range.
        together: (values of several devices, default) -> the value of one device as fast and as
            large as all of them; ``None``: the first device's value.
        unit: (size, name) of the unit in the written file; ``None``: a plain number.
    """

    key: str
    path: str
    meaning: str
    dimension: str = ""
    by: tuple[str, ...] = ()
    default: Value | None = None
    least: float = 0.0
    most: float = math.inf
    open: str = "()"
    hint: str = "give a positive figure"
    together: Callable[[Sequence[float]], float] | None = max
    unit: tuple[float, str] | None = None

    @property
    def name(self) -> str:
        """Its name in plan files and in the provenance of a device."""
        return self.path.rpartition(".")[-1]

    def of(self, device: Any) -> Any:
        """Return its value on a device."""
        for attribute in self.path.split("."):
            device = getattr(device, attribute)
        return device

    def possible(self, value: float) -> bool:
        """Return whether a number is within the range; false for NaN and integers beyond 64 bits."""
        if isinstance(value, int) and value >= 2**63:
            return False
        above = value > self.least if "(" in self.open else value >= self.least
        below = value < self.most if ")" in self.open else value <= self.most
        return above and below

    def problem(self, value: Value) -> str:
        """Return the first impossible entry of a value, as ``drag is 0.5``; empty if none."""
        if isinstance(value, Mapping) != bool(self.by):
            return f"{self.name} is {value}"
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for entry, number in entries:
            if not self.possible(number):
                return f"{self.name}{f'[{entry}]' if entry else ''} is {number}"
        return ""

    def frozen(self, value: Value) -> object:
        """Return a value in a form that can be compared and hashed."""
        return tuple(sorted(value.items())) if isinstance(value, Mapping) else value

    def combined(self, values: Sequence[Any]) -> Any:
        """Return the value of several devices as one; see ``together``."""
        first = values[0]
        if self.together is None:
            return first
        if not self.by:
            return self.together(values)
        if self.default is None:  # a mapping in which every device must have the same entries
            shared = [entry for entry in first if all(entry in value for value in values)]
            return {entry: self.together([value[entry] for value in values]) for entry in shared}
        return {
            entry: self.together([value.get(entry, 1.0) for value in values]) for entry in first
        }


FIGURES: Final = (
    Figure(
        key="memory", path="memory_bytes", dimension="bytes", together=sum, unit=(1, "B"),
        meaning="memory that a plan may use of each GPU, without the room for the CUDA context and NCCL; "
        "the catalogue's is 94 % of what the driver reports",
    ),
    Figure(
        key="flops", path="flops_per_s", dimension="flop/s", by=DTYPES, together=sum,
        unit=(1e9, "GFLOP/s"),
        meaning="achieved rate of matrix products: `{float32: 14 TFLOP/s, float16: 90 TFLOP/s}` "
        "sets those dtypes; `14 TFLOP/s` sets float32 and scales the others by the same factor",
    ),
    Figure(
        key="memory_bandwidth", path="memory_bytes_per_s", dimension="bytes/s", together=sum,
        unit=(1e9, "GB/s"), meaning="achieved rate of operators that only move data",
    ),
    Figure(
        key="launch", path="launch_s", dimension="seconds", open=")", unit=(1e-6, "us"),
        hint="give a time of 0 or more", meaning="constant cost of one operator",
    ),
    Figure(
        key="host", path="host_s", dimension="seconds", default=0.0, open=")", unit=(1e-6, "us"),
        hint="give a time of 0 or more",
        meaning="time in which the host issues one operator. The device waits for it where operators "
        "take less, as on a fast GPU in half precision; 0: never, as on a CPU. GPUs without this figure get 15 us",
    ),
    Figure(
        key="operands", path="operand_bytes_per_s", dimension="bytes/s", default=math.inf,
        open="(", together=sum, unit=(1e9, "GB/s"),
        meaning="rate at which products read and write their tensors, in addition to their "
        "arithmetic; without it, arithmetic hides this time",
    ),
    Figure(
        key="delay", path="contention.delay_s", dimension="seconds", default=0.0, open=")",
        unit=(1e-6, "us"), hint="give a time of 0 or more",
        meaning="additional time of each message of a collective while this device computes, such "
        "as `10 ms`: a throttled CPU answers in its next time slice",
    ),
    Figure(
        key="interference", path="contention.interference", default=0.0, most=1.0, open=")",
        hint="give the part of a collective's time that computing loses, from 0 to below 1: 0.1",
        meaning="part of a collective's time that computing beside it loses, such as 0.1. Where "
        "slower devices take part, a faster one loses no more processor time than they do",
    ),
    Figure(
        key="drag", path="contention.drag", default=1.0, least=1.0, open=")",
        hint="give a factor of 1 or more: by how much computing prolongs a collective, such as 1.2",
        meaning="duration of a collective while this device computes, relative to its duration "
        "alone, such as 1.2",
    ),
    Figure(
        key="relaunch", path="relaunch", default=1.0, most=1.0, open="(",
        hint="give a factor above 0, and 1 at most, such as 0.5",
        meaning="launch cost of a small operator (256 KiB of tensors at most) and of a parameter's "
        "update, relative to `launch`, such as 0.5: on a CPU, larger operators evict the caches",
    ),
    Figure(
        key="efficiency", path="efficiency", by=(*PRODUCTS[1:], *ELEMENTWISE), default={},
        together=None,
        meaning="`{attention: 0.5, conv: 0.8}`: rate of other work relative to matrix products; "
        "the kinds are listed [here](profiler.md#the-fit)",
    ),
    Figure(
        key="price_per_hour", path="price_per_hour", default=0.0, open=")", together=sum,
        hint="give a price of 0 or more, such as 2.5",
        meaning="price of one GPU for an hour, in any currency, for the costs of "
        "[`hap what-if`](what-if.md); planning does not use it",
    ),
)  # fmt: skip
"""The figures in the order of the written file."""

RETIRED: Final = ("start", "traffic")
"""Keys of earlier versions. They scaled the collectives of all devices for some of these, which are
now measured: :class:`hap.cluster.link.MeasuredSet`."""


def warn_of_retired(keys: Iterable[str], where: str) -> None:
    """Warn about retired figures of a device, which have no effect."""
    if found := [repr(key) for key in RETIRED if key in keys]:
        warnings.warn(
            f"{where}: {', '.join(found)}: ignored, because collectives are now measured among subsets of "
            "the devices. Run `hap profile` again: without such measurements, the collectives of a plan "
            "that leaves slow devices out are priced as if those took part",
            stacklevel=2,
        )


BY_KEY: Final[Mapping[str, Figure]] = {figure.key: figure for figure in FIGURES}


def nested(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Turn path -> value into holder -> attribute -> value; the device itself is ``""``."""
    found: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        holder, _, attribute = path.rpartition(".")
        found.setdefault(holder, {})[attribute] = value
    return found


def documentation() -> list[str]:
    """Return the rows of the docs' table: place, key, meaning and default."""
    rows = []
    for figure in FIGURES:
        default = "" if figure.default in (None, {}, math.inf) else f"{figure.default:g}"
        rows.append(f"| node, GPU | `{figure.key}` | {figure.meaning} | {default} |")
    return rows
