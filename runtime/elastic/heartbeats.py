"""Heartbeats of the processes of a run through its store: a process ends itself when another is lost.

A collective may wait for a lost rank until its timeout, which is minutes. A process whose peer is lost
therefore exits, whatever its collectives do, and its launcher starts it again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NoReturn, Self

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from hap.runtime.launch import LOST

PERIOD_S = 1.0
"""Seconds between two heartbeats."""

PATIENCE_S = 6.0
"""Seconds without a heartbeat after which a process counts as lost."""


def end(text: str) -> NoReturn:
    """Print a message and end this process at once, although its threads wait for a lost peer."""
    print(text, file=sys.stderr, flush=True)
    os._exit(LOST)


class Heartbeats:
    """Sends this process's heartbeats and listens to the others'; a context manager.

    Args:
        store: a connection of its own to the store that all processes share.
        names: what each process is, for messages; the order is that of all processes.
        own: the place of this process among them.
        lost: called with a message when a process is lost; it does not return.
    """

    def __init__(
        self, store: Store, names: Sequence[str], own: int, lost: Callable[[str], None] = end
    ) -> None:
        self._store, self._names, self._own, self._lost = store, tuple(names), own, lost
        self._seen = {place: ("", time.monotonic()) for place in range(len(names))}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._beat, self._watch)]

    def __enter__(self) -> Self:
        self._store.set(f"heart/{self._own}", "0")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()

    def _beat(self) -> None:
        """Exchange heartbeats; a store that is gone stops this thread, and :meth:`_watch` sees it."""
        count = 0
        while not self._ended.wait(PERIOD_S):
            count += 1
            try:
                self._store.set(f"heart/{self._own}", str(count))
                present = [n for n in self._seen if self._store.check([f"heart/{n}"])]
                values = self._store.multi_get([f"heart/{n}" for n in present])
            except (RuntimeError, DistError) as error:
                if not self._ended.wait(PERIOD_S):
                    reason = str(error).partition("\n")[0]
                    self._lost(f"the store at {self._names[0]} does not answer ({reason})")
                return
            now = time.monotonic()
            for place, value in zip(present, values, strict=True):
                if self._seen[place][0] != value.decode():
                    self._seen[place] = value.decode(), now

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S / 4):
            now = time.monotonic()
            late = [n for n, (_, at) in self._seen.items() if now - at > PATIENCE_S]
            if late:
                who = "the store" if len(late) == len(self._names) else self._names[late[0]]
                self._lost(f"no heartbeat from {who} for {PATIENCE_S:.0f} s: it counts as lost")
                return
