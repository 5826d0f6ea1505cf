"""Ranks that profile in a few seconds, for tests of all but the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from hap.profiler import call_timing, collective_bench

_LIMITS = replace(collective_bench.QUICK, sizes=(2**14, 2**18), rounds=1, longest_s=0.05)
_PACE = replace(call_timing.QUICK, windows=2, window_s=0.02)


def shortly(measure: Callable[..., Any], *args: Any) -> Any:
    """Call a rank's function; what it measures with ``--quick`` takes less time."""
    limits = mock.patch.object(collective_bench, "QUICK", _LIMITS)
    with limits, mock.patch.object(call_timing, "QUICK", _PACE):
        return measure(*args)
