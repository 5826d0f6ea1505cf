"""Heartbeats of the processes of a run through its store: each process learns that another is lost.

A collective may wait for a lost rank until its timeout of 30 minutes, and nothing interrupts the
thread that waits. So the function that is told of the loss ends its process, whatever its collectives do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

PERIOD_S = 1.0
"""Seconds between two heartbeats."""

PATIENCE_S = 6.0
"""Seconds without a heartbeat after which a process counts as lost, if nothing else is asked for."""

_DONE = "done"


class Heartbeats:
    """Sends this process's heartbeats and listens to the others'; a context manager.

    Args:
        store: a connection of its own to the store that all processes share.
        names: what each process is, for messages; the order is that of all processes.
        own: the place of this process among them.
        lost: called once, in another thread, with a message when a process is lost.
        patience_s: seconds without a heartbeat after which a process counts as lost.
    """

    def __init__(
        self, store: Store, names: Sequence[str], own: int, lost: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        self._store, self._names, self._own, self._lost = store, tuple(names), own, lost
        self._patience_s = patience_s
        self._work = ""
        self._seen = {place: ("", time.monotonic()) for place in range(len(names))}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._beat, self._watch)]

    def at(self, work: str) -> None:
        """Set this process's current work; the others report it if this process is lost."""
        self._work = work

    def __enter__(self) -> Self:
        self._store.set(_key(self._own), "0 ")
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, RuntimeError):
            # A collective failed: the loss of another process may be the cause, and has a message.
            self._threads[1].join(self._patience_s + 5 * PERIOD_S)
        self._ended.set()
        if kind is None:
            self._threads[0].join(2 * PERIOD_S)
            with contextlib.suppress(RuntimeError, DistError):  # the store may have ended
                self._store.set(_key(self._own), _DONE)

    def _beat(self) -> None:
        """Exchange heartbeats; a store that is gone stops this thread, and :meth:`_watch` sees it."""
        count = 0
        while not self._ended.wait(PERIOD_S):
            count += 1
            try:
                self._store.set(_key(self._own), f"{count} {self._work}")
                present = [n for n in self._seen if self._store.check([_key(n)])]
                values = self._store.multi_get([_key(n) for n in present])
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
            late = [
                place for place, (value, at) in self._seen.items()
                if value != _DONE and now - at > self._patience_s
            ]  # fmt: skip
            if late:
                self._lost(self._message(late))
                return

    def _message(self, late: Sequence[int]) -> str:
        if len(late) == len(self._names):
            return f"no heartbeat from the store for {self._patience_s:.0f} s: it counts as lost"
        work = self._seen[late[0]][0].partition(" ")[2]
        last = f", last seen at {work}" if work else ""
        who = self._names[late[0]]
        return f"no heartbeat from {who} for {self._patience_s:.0f} s{last}: it counts as lost"


def _key(place: int) -> str:
    return f"heart/{place}"
