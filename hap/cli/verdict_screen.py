"""What ``hap verify`` prints of its comparisons with one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hap.cli.terminal import table

if TYPE_CHECKING:  # it imports torch
    from hap.runtime.verify import Verdict

_TENSORS = 20
"""Rows of the table."""


def agreement(verdict: Verdict) -> str:
    """Say how closely all tensors agree."""
    random = f"; {verdict.random}" if verdict.random else ""
    count = len(verdict.rows)
    tensors = f"all {count} tensors" if count > 1 else "the only tensor"
    text = f"{tensors} as on one device, to {verdict.tolerance:.0e}{random}"
    if verdict.amplified:
        text += f"\nexcept for errors up to {verdict.amplified:.0e}, at most four times those of rounding on one device"
    return text


def verdict_table(verdict: Verdict) -> RenderableType:
    """Return comparisons with one device, the worst first; the rest is counted."""
    worst = sorted(verdict.rows, key=lambda row: (row.ok, -row.error))
    shown = table(
        ("tensor", "", "relative error", ""),
        [
            (row.tensor, row.what, f"{row.error:.1e}", "equal" if row.ok else "DIFFERS")
            for row in worst[:_TENSORS]
        ],
        right=(2,),
    )
    rest = worst[_TENSORS:]
    if not rest:
        return shown
    bad = sum(not row.ok for row in rest)
    return Group(shown, Text(f"and {len(rest)} more, {bad or 'none'} of which differ"))
