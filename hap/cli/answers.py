"""Answer the errors of a command with one paragraph, and read its numbers."""

from __future__ import annotations

import functools
import io
import math
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

import click

from hap.errors import HapError, InputError, reason_of

UNEXPECTED: Final = "this is a bug of hap or of the model"
"""Begins the answer to an error that no command expects."""

_TRACEBACK: Final = "HAP_TRACEBACK"


def answered(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that prints errors in two lines, and their traceback with -v.

    It ends quietly when nobody reads its output any more, as after ``| head``.
    """

    @functools.wraps(function)
    def told(*, verbose: bool, **given: Any) -> None:
        _open_streams()
        try:
            _check_texts(given)
            function(**given)
            sys.stdout.flush()  # here, not at exit, where Python reports a broken pipe
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("stopped by Ctrl-C", err=True)
            raise SystemExit(128 + signal.SIGINT) from None
        except Exception as raised:
            if isinstance(raised, BrokenPipeError) and _unread():
                raise SystemExit(128 + signal.SIGPIPE) from None
            if verbose or os.environ.get(_TRACEBACK) == "1":
                traceback.print_exc()
            error = _for_people(raised)
            click.echo(f"error: {error}", err=True)
            raise SystemExit(error.exit_code) from raised

    option = click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
    return option(told)


def _open_streams() -> None:
    """Discard what is printed to a stream that is closed, as by ``>&-``.

    A character that stdout cannot write, as under a locale other than UTF-8, is printed as its code.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _unread() -> bool:
    """Is stdout a pipe that nobody reads any more? If so, discard what is left to print."""
    out = sys.stdout.fileno()
    pipe = select.poll()
    pipe.register(out, 0)  # errors are reported without being asked for
    if not any(events & (select.POLLERR | select.POLLHUP) for _, events in pipe.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return True


def _check_texts(given: dict[str, Any]) -> None:
    """Raise ``InputError`` for an argument that can be no name of a file."""
    for name, value in given.items():
        if not isinstance(value, str):
            continue
        if "\0" in value:
            raise InputError(f"the argument {name} contains a null byte", hint="leave it out")
        try:
            value.encode()
        except UnicodeEncodeError:
            what = f"the argument {name} is no text in UTF-8: {value!r}"
            raise InputError(what, hint="rename the file, or set LC_ALL=C.UTF-8") from None


def _for_people(error: Exception) -> HapError:
    """Return any error as one for people."""
    if isinstance(error, HapError):
        return error
    if isinstance(error, OSError):
        return InputError(
            f"a file or folder cannot be used: {reason_of(error)}",
            where=str(error.filename or ""),
            hint="check its name, its permissions and the disk",
        )
    frames = traceback.extract_tb(error.__traceback__)
    summary = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return InputError(
        f"{UNEXPECTED}: {summary.removesuffix(': ')}",
        where=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
        hint=f"if the model runs without hap, please report this to hap's authors, with the command, "
        f"its files, and the traceback that {_TRACEBACK}=1 shows",
    )


class Seed(click.types.IntParamType):
    """A number that torch's generators can be seeded with."""

    least, most = -(2**63), 2**64 - 1

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> int:
        seed: int = super().convert(value, param, context)
        if not self.least <= seed <= self.most:
            self.fail(f"{seed} is not in the range of torch's seeds, 64 bits", param, context)
        return seed


class Seconds(click.FloatRange):
    """A time above zero that a timer can be set to."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=1e6)

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, context)
        if math.isnan(seconds):
            self.fail(f"{value} is no time", param, context)
        return seconds
