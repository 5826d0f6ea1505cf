"""End this rank of a profile, with a message, if another one is lost while it measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from hap.runtime.elastic.meeting import connect
from hap.runtime.heartbeats import Heartbeats
from hap.runtime.launch import end_as_lost

PATIENCE_S = 30.0
"""Seconds without a heartbeat after which a rank counts as lost."""


@contextlib.contextmanager
def watched(rank: int, nodes: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Watch the other ranks inside the context; yields a function that sets this rank's current work.

    Args:
        nodes: the machine of each rank.
    """
    if len(nodes) == 1:
        yield lambda work: None
        return

    def lost(text: str) -> NoReturn:
        hint = "see its output; then start all ranks again with --resume"
        end_as_lost(f"error: rank {rank}: {text}\n  hint: {hint}")

    names = [f"rank {n} (on {node})" for n, node in enumerate(nodes)]
    with Heartbeats(connect(), names, rank, lost, PATIENCE_S) as heartbeats:
        yield heartbeats.at
