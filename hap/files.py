"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: str | Path, parts: Iterable[str]) -> None:
    """Write a text file; on an error nothing is left, and what was there before stays.

    Raises:
        OSError: the folder cannot be written to, or the disk is full.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.writelines(parts)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
