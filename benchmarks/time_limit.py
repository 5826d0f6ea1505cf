"""A time limit for code that may hang, whatever load the machine has."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

WAITING = 10
"""Limit of the time that passes, as a multiple of the limit of processor time."""

_AGAIN_S = 1.0
"""Seconds until a raised exception is raised again: Python drops those raised in finalizers."""


class TooLongError(BaseException):
    """The time limit has passed. No ``Exception``, so that no handler mistakes it for a failure."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise ``TooLongError`` in the main thread after ``seconds`` of processor time.

    Code that waits is stopped after :data:`WAITING` times as long. ``SIGALRM`` is left to the code.
    """
    ended = threading.Event()

    def over(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    def watch() -> None:
        left_s = WAITING * seconds
        while not ended.wait(left_s):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGPROF)
            left_s = _AGAIN_S

    before = signal.signal(signal.SIGPROF, over)
    watcher = threading.Thread(target=watch, daemon=True)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)
    watcher.start()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        ended.set()
        watcher.join()
        signal.signal(signal.SIGPROF, before)
