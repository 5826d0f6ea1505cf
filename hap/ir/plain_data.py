"""Read plain data from a file: each function returns a value of one type, or says what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_text(value: Any, where: str) -> str:
    """Text."""
    if not isinstance(value, str):
        raise ValueError(f"{where} has {_shown(value)} where a text belongs")
    return value


def read_list(value: Any, where: str, length: int | None = None) -> list[Any]:
    """A list, of a length if that is given."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} has {_shown(value)} where a list belongs")
    if length is not None and len(value) != length:
        raise ValueError(f"{where} has a list of {len(value)} entries, not of {length}")
    return list(value)


def read_map(value: Any, where: str) -> Mapping[str, Any]:
    """A mapping by text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where} has {_shown(value)} where a mapping belongs")
    return value


def read_count(value: Any, where: str) -> int:
    """A whole number, 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where} has {_shown(value)} where a whole number belongs")
    return value


def read_flag(value: Any, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{where} has {_shown(value)} where true or false belongs")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
