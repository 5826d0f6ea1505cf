"""Detect a rank that died while others wait for it.

Every rank writes a growing number into the shared store, and reads the numbers of the others. A
rank whose number is unchanged for :data:`DEAD_S` is dead, or cannot finish the run. The thread that
detects this cannot raise in the main thread, which may be blocked in a collective. So it prints an
error and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed import TCPStore as _Store  # type: ignore[attr-defined]

from hap.errors import HapError

_DONE = "done"
BEAT_S = 1.0
DEAD_S = 30.0
"""Seconds without a heartbeat after which a rank counts as dead."""


class Watch:
    """A context manager that sends this rank's heartbeats and watches those of the others.

    Args:
        names: a description of each rank.
        on_death: called with the error in another thread; default: print it and end the process.
        dead_s: seconds without a heartbeat after which a rank counts as dead.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        *,
        on_death: Callable[[HapError], None] | None = None,
        dead_s: float = DEAD_S,
    ) -> None:
        self._rank, self._names, self._dead_s = rank, names, dead_s
        self._on_death = on_death or _end
        self._stop = threading.Event()
        self._at = "the start"
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._threads: list[threading.Thread] = []

    def at(self, where: str) -> None:
        """Set this rank's current work; the other ranks report it if this rank dies."""
        self._at = where

    def __enter__(self) -> Self:
        if len(self._names) > 1:
            # A connection per thread: a blocked call delays all others on its connection.
            for body in (self._beat, self._listen):
                thread = threading.Thread(target=body, args=(_store(),), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, HapError):
            for thread in self._threads[1:]:  # another rank's death may be the cause: report it
                thread.join(self._dead_s + 5 * BEAT_S)
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * BEAT_S)

    def _beat(self, store: _Store) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            try:
                store.set(_key(self._rank), f"{number} {self._at}")
            except (RuntimeError, dist.DistError) as error:
                self._report_lost_store(error)
                return
            self._stop.wait(BEAT_S)
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store may have ended
            store.set(_key(self._rank), _DONE)

    def _listen(self, store: _Store) -> None:
        others = [r for r in range(len(self._names)) if r != self._rank]
        for rank in others:
            self._seen[rank] = b"0 the start", time.monotonic()
        while not self._stop.wait(BEAT_S):
            try:
                there = [r for r in others if store.check([_key(r)])]
                beats = [bytes(store.get(_key(r))) for r in there]
            except (RuntimeError, dist.DistError) as error:
                self._report_lost_store(error)
                return
            now = time.monotonic()
            for rank, beat in zip(there, beats, strict=True):
                if beat != self._seen[rank][0]:
                    self._seen[rank] = beat, now
            if dead := self._silent(now):
                self._on_death(self._error(dead))
                return

    def _silent(self, now: float) -> list[int]:
        return [
            rank
            for rank, (beat, since) in self._seen.items()
            if beat.decode() != _DONE and now - since > self._dead_s
        ]

    def _error(self, dead: Sequence[int]) -> HapError:
        who = ", ".join(f"rank {r} ({self._names[r]})" for r in dead)
        last = self._seen[dead[0]][0].decode().partition(" ")[2]
        return HapError(
            f"{who} died, or stopped answering: no heartbeat for {self._dead_s:g} s; "
            f"last seen at {last}",
            where=f"rank {self._rank}",
            hint="see its output; then start all ranks again with --resume",
        )

    def _report_lost_store(self, error: Exception) -> None:
        if not self._stop.is_set():
            what = f"the store of the run, on rank 0's machine, is gone: {error}"
            self._on_death(HapError(what.splitlines()[0], where=f"rank {self._rank}"))


def _end(error: HapError) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def _key(rank: int) -> str:
    return f"hap/profile/{rank}"


def _store() -> _Store:
    """Open a new connection to the store by which the ranks found each other."""
    return _Store(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
        timeout=timedelta(seconds=DEAD_S),
    )  # fmt: skip
