"""Files that are read, and files that are written as a whole or not at all."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from hap.errors import InputError, reason_of

_LONGEST_NAME = 240
"""Limit in bytes of a file's name; that of the temporary file is a little longer."""


_UMASK = os.umask(0)
os.umask(_UMASK)  # here, where no other thread makes files


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/hap``, by default in ``~/.cache``; one for this process if there is no home."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(_without_home() if home.startswith("~") else home) / "hap"


@functools.cache
def _without_home() -> str:
    folder = tempfile.mkdtemp(prefix="hap-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def check_output(path: str, *inputs: str | None, hint: str = "change -o") -> None:
    """Check that :func:`write_whole` can write a file, before the long work begins.

    A symbolic link is followed: its target is written.

    Args:
        inputs: files that must not be overwritten.

    Raises:
        InputError: the file cannot be written; the message gives the reason.
    """

    def fail(reason: str) -> None:
        raise InputError(f"cannot write there: {reason}", where=repr(path)[1:-1], hint=hint)

    if not path or "\0" in path:
        fail("that is no file name")
    target = Path(os.path.realpath(path))
    if len(os.fsencode(target.name)) > _LONGEST_NAME:
        fail(f"the name is longer than {_LONGEST_NAME} bytes")
    if target.is_dir():
        fail("it is a folder")
    if not target.parent.is_dir():
        fail(f"there is no folder {target.parent}")
    if target.exists() and not target.is_file():
        fail("it is a device, a socket or a pipe, not a file")
    if any(given and target == Path(os.path.realpath(given)) for given in inputs):
        fail("it is one of the command's own inputs")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        fail(reason_of(error))


def read_whole(path: str | Path) -> str:
    """Return the text of a file, as UTF-8.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, which may have no end.
        UnicodeDecodeError: it is no text.
    """
    if "\0" in str(path) or not str(path):
        raise OSError(errno.EINVAL, "that is no file name")
    found = Path(path)
    if found.exists() and not found.is_file() and not found.is_dir():
        raise OSError(errno.EINVAL, "it is a device, a socket or a pipe, not a file")
    return found.read_text(encoding="utf-8")


def write_whole(path: str | Path, parts: Iterable[str]) -> None:
    """Write a text file atomically: on an error the previous file stays.

    A symbolic link stays, and its target is written.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    path = Path(os.path.realpath(path))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(handle)
        os.chmod(temporary, 0o666 & ~_UMASK)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
