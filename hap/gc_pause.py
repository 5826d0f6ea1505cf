"""Pauses Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Look for no garbage meanwhile; a decorator, too.

    Traces, tables and programs stay until the end: to go through all of them again and again
    takes a fifth of the time of planning, and finds nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
