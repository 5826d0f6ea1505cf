"""A command that has the process to itself: its garbage is left to the end of the process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from hap.gc_pause import gc_paused

OWN_PROCESS: Final = "a process of its own"
"""The object of a click context where the process ends with the command."""


def gc_paused_to_end(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that never looks for its garbage, if the process ends with it."""

    @functools.wraps(function)
    def paused(**given: Any) -> None:
        with gc_paused(freeze=click.get_current_context().obj == OWN_PROCESS):
            function(**given)

    return paused
