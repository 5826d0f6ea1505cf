"""The peak of live tensor bytes, as torch's CPU allocator reports it to the profiler.

Every block that torch allocates and frees on the thread is an event, so the figure is exact and
does not depend on malloc. Python, libraries and buffers inside gloo do not count. Overlapping blocks
of several threads would be missed, so contenders run their traced steps in one thread. The last
reference to a tensor may be gloo's: a rank that waited for a collective gives gloo's thread a moment
to free it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.distributed import Work
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "hap race: peak from here"
_LETTING_GO_S = 1e-3


class Trace:
    """The result of :func:`traced`; ``peak_bytes`` is known after the block has ended."""

    peak_bytes = 0

    @staticmethod
    def mark() -> None:
        """Reset the peak to the bytes now live; earlier allocations in the block count as live."""
        with record_function(_MARK):
            pass


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Count allocations within the block; tensors that are live at its start do not count."""
    trace = Trace()
    with _lingering(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield trace
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    begin = max((e.start_ns() for e in events if e.name() == _MARK), default=0)
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"),
        key=lambda event: event[0],
    )
    held = 0
    for at, nbytes in memory:
        if at > begin:
            trace.peak_bytes = max(trace.peak_bytes, held)
        held += nbytes
    trace.peak_bytes = max(trace.peak_bytes, held)


@contextlib.contextmanager
def _lingering() -> Iterator[None]:
    """Wait a moment for the threads that waited for a collective to release their tensors."""
    wait = Work.wait

    def waited(work: Work, *args: Any, **kwargs: Any) -> Any:
        found = wait(work, *args, **kwargs)
        time.sleep(_LETTING_GO_S)
        return found

    with mock.patch.object(Work, "wait", waited):
        yield
