"""Quantities with units: ``10 Gbit/s``, ``300 GB/s``, ``30 us``, ``16 GiB``.

A number needs a unit, and bits differ from bytes: ``b`` is a bit, ``B`` a byte; a word whose case
does not tell them apart is refused rather than guessed.
Decimal prefixes are powers of 1000, binary ones (``Ki``, ``Mi``, ``Gi``) powers of 1024.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal, InvalidOperation
from typing import Final

# Decimal, so that 30 us is the float 30e-6, not a neighbouring float.
_PREFIX: Final[dict[str, Decimal]] = {
    "": Decimal(1),
    "k": Decimal("1e3"),
    "K": Decimal("1e3"),
    "M": Decimal("1e6"),
    "G": Decimal("1e9"),
    "T": Decimal("1e12"),
    "P": Decimal("1e15"),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}
_ONE, _BIT = Decimal(1), Decimal("0.125")

# Per dimension: the spellings of its base unit, each with its size, and an example for messages.
_BASE: Final[dict[str, dict[str, Decimal]]] = {
    "bytes": dict.fromkeys(("B", "byte", "bytes"), _ONE),
    "bytes/s": {
        **dict.fromkeys(("B/s", "Bps", "byte/s", "bytes/s"), _ONE),
        **dict.fromkeys(("b/s", "bps", "bit/s", "bits/s"), _BIT),
    },
    "flop/s": dict.fromkeys(("FLOP/s", "FLOPs/s", "FLOPS", "flop/s", "flops"), _ONE),
    "seconds": {},
}
_TIME: Final[dict[str, Decimal]] = {
    "s": _ONE,
    "ms": Decimal("1e-3"),
    "us": Decimal("1e-6"),
    "\u00b5s": Decimal("1e-6"),  # the micro sign, and the Greek letter, which look alike
    "\u03bcs": Decimal("1e-6"),
    "ns": Decimal("1e-9"),
}
_EXAMPLE: Final[dict[str, str]] = {
    "bytes": "16 GiB",
    "bytes/s": "10 Gbit/s or 300 GB/s",
    "flop/s": "14 TFLOP/s",
    "seconds": "30 us",
}
_QUANTITY = re.compile(r"\s*([+-]?[\d_.]+(?:[eE][+-]?\d+)?)\s*(\S.*?)?\s*")


def parse(text: object, dimension: str) -> float:
    """Return a quantity in base units.

    Args:
        text: The user's text; a bare number is refused, since it has no unit.
        dimension: One of ``bytes``, ``bytes/s``, ``flop/s``, ``seconds``.

    Returns:
        Bytes, bytes per second, floating point operations per second, or seconds.

    Raises:
        ValueError: No number, too large a one, no unit, or a unit of another dimension; the message has a remedy.
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
    try:
        value = float(number * scale)
    except ArithmeticError:  # beyond the exponents of Decimal
        value = math.inf
    if math.isinf(value):
        raise ValueError(f"{text!r} is too large a number: write for example {example}")
    return value


def unit_scales(dimension: str) -> dict[str, Decimal]:
    """Return all spellings of the units of a dimension, each with its size in base units."""
    if dimension == "seconds":
        return _TIME
    return {
        prefix + base: factor * size
        for base, size in _BASE[dimension].items()
        for prefix, factor in _PREFIX.items()
    }


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except InvalidOperation:
        return None


def format_bytes(count: float) -> str:
    """``17179869184`` -> ``16 GiB``."""
    return _format(
        count, (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)), "B"
    )


def format_bandwidth(bytes_per_s: float) -> str:
    """``1.3e9`` -> ``1.3 GB/s``."""
    return _format(
        bytes_per_s, (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)), "B/s"
    )


def format_flops(flops_per_s: float) -> str:
    """``1.4e13`` -> ``14 TFLOP/s``."""
    return _format(flops_per_s, (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6)), "FLOP/s")


def format_seconds(seconds: float) -> str:
    """``0.00003`` -> ``30 us``."""
    return _format(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)), "ns", 1e-9)


def _format(
    value: float, steps: tuple[tuple[str, float], ...], last: str, last_size: float = 1.0
) -> str:
    """Format three significant digits in the largest unit that keeps the number at 1 or more."""
    # 0.9995 rather than 1: 999.96 GB/s shows as 1 TB/s, not as 1e+03 GB/s.
    unit, size = next(((u, s) for u, s in steps if abs(value) >= 0.9995 * s), (last, last_size))
    shown = value / size
    return f"{round(shown) if abs(shown) >= 100 else f'{shown:.3g}'} {unit}"
