"""Quantities as people write them: ``10 Gbit/s``, ``300 GB/s``, ``30 us``, ``16 GiB``.

A number never goes without its unit, and a bit is never taken for a byte: ``b`` is a bit, ``B``
a byte, and a word in which case does not tell them apart is refused rather than guessed.
Decimal prefixes are powers of 1000, binary ones (``Ki``, ``Mi``, ``Gi``) powers of 1024.
"""

from __future__ import annotations

import math
import re
from typing import Final

_PREFIX: Final[dict[str, float]] = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_TIME: Final[dict[str, float]] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

# Per dimension: the spellings of its base unit, each with its size, and an example to show.
_BASE: Final[dict[str, dict[str, float]]] = {
    "bytes": {"B": 1.0, "byte": 1.0, "bytes": 1.0},
    "bytes/s": {"B/s": 1.0, "Bps": 1.0, "bit/s": 1 / 8, "bits/s": 1 / 8, "bps": 1 / 8, "b/s": 1 / 8},
    "flop/s": {"FLOP/s": 1.0, "FLOPs/s": 1.0, "FLOPS": 1.0, "flop/s": 1.0, "flops": 1.0},
    "seconds": {},
}
_EXAMPLE: Final[dict[str, str]] = {
    "bytes": "16 GiB",
    "bytes/s": "10 Gbit/s or 300 GB/s",
    "flop/s": "14 TFLOP/s",
    "seconds": "30 us",
}
_QUANTITY = re.compile(r"\s*([+-]?[\d_.]+(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*")


def parse(text: object, dimension: str) -> float:
    """Reads a quantity in base units.

    Args:
        text: What the person wrote; a bare number is refused, for want of a unit.
        dimension: One of ``bytes``, ``bytes/s``, ``flop/s``, ``seconds``.

    Returns:
        Bytes, bytes per second, floating point operations per second, or seconds.

    Raises:
        ValueError: No number, no unit, or a unit of another dimension; says what to write.
    """
    example = _EXAMPLE[dimension]
    match = _QUANTITY.fullmatch(str(text))
    number = _number(match[1]) if match else None
    if match is None or number is None:
        raise ValueError(f"{text!r} is not a quantity: write for example {example}")
    unit = match[2]
    if unit is None:
        raise ValueError(f"{text!r} has no unit: write for example {example}")
    scale = unit_scales(dimension).get(unit)
    if scale is None:
        raise ValueError(f"{unit!r} is not a unit of {dimension}: write for example {example}")
    return number * scale


def unit_scales(dimension: str) -> dict[str, float]:
    """All the spellings of the units of a dimension, each with its size in base units."""
    if dimension == "seconds":
        return _TIME
    return {
        prefix + base: factor * size
        for base, size in _BASE[dimension].items()
        for prefix, factor in _PREFIX.items()
    }


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def format_bytes(count: float) -> str:
    """``17179869184`` -> ``16 GiB``."""
    return _format(count, (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)), "B")


def format_bandwidth(bytes_per_s: float) -> str:
    """``1.3e9`` -> ``1.3 GB/s``."""
    return _format(bytes_per_s, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)), "B/s")


def format_flops(flops_per_s: float) -> str:
    """``1.4e13`` -> ``14 TFLOP/s``."""
    return _format(flops_per_s, (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)), "FLOP/s")


def format_seconds(seconds: float) -> str:
    """``0.00003`` -> ``30 us``."""
    return _format(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), "ns", 1e-9)


def _format(
    value: float, steps: tuple[tuple[str, float], ...], last: str, last_size: float = 1.0
) -> str:
    """Three significant digits in the largest unit that leaves at least one before the point."""
    # 0.9995 rather than 1: 999.96 GB/s shows as 1 TB/s, not as 1e+03 GB/s.
    unit, size = next(((u, s) for u, s in steps if abs(value) >= 0.9995 * s), (last, last_size))
    shown = value / size
    return f"{round(shown) if abs(shown) >= 100 else f'{shown:.3g}'} {unit}"
