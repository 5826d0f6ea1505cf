"""Errors with a location and a remedy, for users.

Every error that a user can cause derives from :class:`HapError` and carries the exit code
of the command line. Broken invariants of our own code are ``AssertionError`` instead.
"""

from __future__ import annotations

from typing import ClassVar

LONGEST_LINE = 600
"""Limit of a line of a message, in characters: names and errors of libraries may be longer."""


def _cut(text: str, longest: int = LONGEST_LINE) -> str:
    """Return a text, without its middle if it is too long."""
    if len(text) <= longest:
        return text
    half = longest // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


def reason_of(error: OSError) -> str:
    """Return the operating system's reason of an error, which some errors lack."""
    return error.strerror or str(error)


class HapError(Exception):
    """Base of all errors meant for people.

    Args:
        what: One sentence that states the fault.
        where: The place, as ``file``, ``file:line`` or a name in the model; may be empty.
        hint: The remedy; may be empty.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        where = _cut(self.where, LONGEST_LINE // 2)
        text = "\n".join(_cut(line) for line in self.what.split("\n"))
        text = f"{where}: {text}" if where else text
        return f"{text}\n  hint: {_cut(self.hint)}" if self.hint else text


class InputError(HapError):
    """A file or an argument that the user gave is wrong."""

    exit_code = 2


class ClusterError(InputError):
    """The cluster file cannot be used."""


class ModelError(InputError):
    """The model file, or a result of its functions, cannot be used."""


class UnsupportedOpError(InputError):
    """The model uses an operator without a rule."""


class PlanError(InputError):
    """A plan file cannot be used here: damaged, of another model, or of another world size."""


class CheckpointError(InputError):
    """A checkpoint cannot be written or read: a full disk, a damaged file, or another model."""


class InfeasibleError(HapError):
    """No program fits the devices' memory."""

    exit_code = 3


class UnfinishedError(HapError):
    """Planning was stopped: by default before it had a plan that fits the memory."""

    exit_code = 5


class NoProgramError(HapError):
    """No program of the space has what was asked for."""


class SearchLimitError(HapError):
    """A search reached its limit before it found a program."""


class TooEntangledError(HapError):
    """The exact search would need too large a table for this graph's space of programs."""


class VerifyError(HapError):
    """The distributed program and one device compute different results."""


class PlanningStopped(BaseException):
    """A time limit or Ctrl-C stops the search; the message says which of them.

    Raised anywhere in the main thread, so no handler of ``Exception`` may catch it.
    """


class Terminated(SystemExit):
    """A signal ends the program; handlers of ``SystemExit`` from other code must re-raise it."""
