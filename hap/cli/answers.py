"""Answer the errors of a command with one paragraph."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

import click

from hap.errors import HapError, InputError


def answered(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that prints errors in two lines, and their traceback with -v."""

    @functools.wraps(function)
    def told(*, verbose: bool, **given: Any) -> None:
        try:
            _check_texts(given)
            function(**given)
        except (HapError, OSError) as raised:
            if verbose:
                traceback.print_exc()
            error = raised if isinstance(raised, HapError) else _of_file(raised)
            click.echo(f"error: {error}", err=True)
            raise SystemExit(error.exit_code) from raised

    option = click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
    return option(told)


def _check_texts(given: dict[str, Any]) -> None:
    """Raise ``InputError`` for an argument that can be no name of a file."""
    for name, value in given.items():
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"the argument {name} contains a null byte", hint="leave it out")


def _of_file(error: OSError) -> InputError:
    """Return an error of the system about a file as one for people."""
    return InputError(
        f"a file or folder cannot be used: {error.strerror or error}",
        where=str(error.filename or ""),
        hint="check its name, its permissions and the disk",
    )
