"""The peak of live tensor bytes, as torch's CPU allocator reports it to the profiler.

Every block that torch allocates and frees on the thread is an event, so the figure is exact and
does not depend on what malloc keeps. Python, libraries and buffers inside gloo do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "hap race: peak from here"


class Trace:
    """What :func:`traced` yields; ``peak_bytes`` is known after the block has ended."""

    peak_bytes = 0

    @staticmethod
    def mark() -> None:
        """The peak is that of what follows; what was allocated before in the block counts."""
        with record_function(_MARK):
            pass


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Count from here; what is live already does not count."""
    trace = Trace()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
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
