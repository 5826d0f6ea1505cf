"""Time calls on one device, in windows of many calls.

A window is much longer than the period in which a throttled processor pauses and continues, so that
it measures the rate of a training step. On CUDA the clock is a pair of events on the stream;
elsewhere it is wall time, since other ranks wait for that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hap.cluster.device import USABLE_MEMORY

_GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Duration of measurements: windows per operator, and seconds per window."""

    windows: int
    window_s: float


FULL = Pace(windows=4, window_s=0.12)
QUICK = Pace(windows=3, window_s=0.08)
CUDA_WINDOW_S = 0.05  # long enough for a power limit to lower the clock, as in a step
PARTS = 5
"""Batches of calls per window; a window ends after its time, whatever the number of calls."""

_CALLS_AFTER = 24  # calls per window if each is timed after another call
_CALLS_QUEUED = 200  # fewer than a CUDA stream's queue holds
_CALLS_ISSUED = 4  # the same, of some 100 kernels each
_LONG_WINDOWS = 2  # windows if a single call takes longer than a window


def seconds_per_call(call: Callable[[], object], device: torch.device, pace: Pace) -> list[float]:
    """Return the seconds of one call, per window; the first calls warm up and do not count."""
    window_s = CUDA_WINDOW_S if device.type == "cuda" else pace.window_s
    count, once = _count(call, device, window_s)
    windows = _LONG_WINDOWS if once > window_s else pace.windows
    return [_window(call, count, device, window_s) for _ in range(windows)]


def _count(call: Callable[[], object], device: torch.device, window_s: float) -> tuple[int, float]:
    """Warm up; return (number of calls that fill a part of a window, seconds of one)."""
    call()
    once = timed(call, 1, device)
    # Increase the count until it fills a good part of a window: a single call may hit a pause.
    count = 1
    while once * count < window_s / 4:
        count = max(2 * count, min(round(window_s / max(once, 1e-7) / 4), 64 * count))
        once = timed(call, count, device) / count
    return max(1, round(window_s / once / PARTS)), once


def _window(call: Callable[[], object], count: int, device: torch.device, window_s: float) -> float:
    """Return the seconds per call, over batches of ``count`` calls that fill a window."""
    calls, seconds = 0, 0.0
    while seconds < window_s * (1 - 0.5 / PARTS):
        seconds += timed(call, count, device)
        calls += count
    return seconds / calls


def seconds_after(
    before: Callable[[], object], call: Callable[[], object], windows: int
) -> list[float]:
    """Return the seconds of a call that follows the call ``before``, per window.

    The clock is processor time, which excludes a throttled processor's pauses, since these are
    longer than the call. The result is scaled by the ratio of wall time to processor time.
    """
    clock, begun = time.thread_time, (time.perf_counter(), time.thread_time())
    found = []
    for _ in range(windows):
        spent_s = 0.0
        for _ in range(_CALLS_AFTER):
            before()
            clock()  # load its code into the caches
            start = clock()
            call()
            spent_s += clock() - start
        found.append(spent_s / _CALLS_AFTER)
    waited = (time.perf_counter() - begun[0]) / (clock() - begun[1])
    return [s * waited for s in found]


def seconds_in_queue(
    long: Callable[[], object], call: Callable[[], object], windows: int
) -> list[float]:
    """Return the seconds of one call on a CUDA device, per window, if the host is ahead of it.

    ``long``: a call during which the host issues all calls of a window.
    """
    found = []
    for window in range(windows + 1):
        long()
        seconds = timed(call, _CALLS_QUEUED, torch.device("cuda")) / _CALLS_QUEUED
        found += [seconds] * (window > 0)  # the first one loads kernels
    return found


def seconds_of_host(call: Callable[[], object], device: torch.device, windows: int) -> list[float]:
    """Return the seconds in which the host issues one call, per window; it waits for no result."""
    found = []
    for window in range(windows + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_CALLS_ISSUED):
            call()
        seconds = (time.perf_counter() - start) / _CALLS_ISSUED
        found += [seconds] * (window > 0)
    return found


def timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the seconds of ``count`` calls."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def memory_bytes(device: torch.device, ranks_here: int) -> int:
    """Return the bytes of a device that a plan may use; ranks of a machine share its memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * USABLE_MEMORY)
    page = os.sysconf("SC_PAGE_SIZE")
    whole = page * os.sysconf("SC_PHYS_PAGES") // ranks_here
    held = int(Path("/proc/self/statm").read_text().split()[1]) * page  # the interpreter, mostly
    limits = [limit - held for limit in memory_limits(Path("/proc/self/cgroup").read_text())]
    return max(1, min([whole, *limits]))


def memory_limits(memberships: str, groups: Path = _GROUPS) -> list[int]:
    """Return the memory limits, in bytes, of this process's control groups.

    Args:
        memberships: the text of ``/proc/self/cgroup``.
    """
    found = []
    for line in memberships.splitlines():
        _, names, path = line.split(":", 2)
        home = groups / names / path.lstrip("/")  # version 2 has no names
        for file in (home / "memory.limit_in_bytes", home / "memory.max"):
            text = file.read_text().strip() if file.exists() else ""
            found += [int(text)] if text.isdecimal() else []
    return found


def kind_name(device: torch.device) -> str:
    """Return the name that the device reports, such as ``NVIDIA H200``, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
