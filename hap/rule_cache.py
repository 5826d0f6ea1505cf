"""Keep discovered rules on disk, by operator, overload and torch version. (torch)

Only rules of torch's own operators are stored: another library's operator may change under the same
name and version. Discovery is deterministic, so a plan is the same with and without the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from hap.files import cache_folder, write_whole
from hap.synthesizer.rules.textual_rules import read

VERSION = 4
"""Version of the discovery; increased when a change alters its results."""

_TORCH = ("aten.", "prims.")


def folder() -> Path:
    """Return the folder of the rules: ``$XDG_CACHE_HOME/hap/rules``, by default in ``~/.cache``."""
    return cache_folder() / "rules" / f"{VERSION}-torch-{torch.__version__}"


class RuleCache:
    """The rules of kinds of calls, one file per operator.

    Args:
        progress: called once if nothing can be stored, with the reason.
    """

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._known: dict[str, dict[str, list[str]]] = {}
        self._writable = True

    def get(self, op: str, kind: str) -> tuple[str, ...] | None:
        """Return the stored lines of a kind of call, or ``None``."""
        if not op.startswith(_TORCH):
            return None
        if op not in self._known:
            self._known[op] = self._read(op)
        lines = self._known[op].get(kind)
        return None if lines is None else tuple(lines)

    def put(self, op: str, kind: str, lines: tuple[str, ...]) -> None:
        """Store the lines of a kind of call."""
        if not op.startswith(_TORCH) or not self._writable:
            return
        self._known.setdefault(op, {})[kind] = list(lines)
        try:
            folder().mkdir(parents=True, exist_ok=True)
            write_whole(folder() / f"{op}.json", [json.dumps(self._known[op], indent=1)])
        except OSError as error:
            self._writable = False
            self._progress(f"discovered rules cannot be cached: {error}")

    def _read(self, op: str) -> dict[str, list[str]]:
        try:
            text = (folder() / f"{op}.json").read_bytes()
        except OSError:
            return {}
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):  # not UTF-8, or no JSON
            found = None
        if not isinstance(found, dict) or not all(_is_rule(lines) for lines in found.values()):
            self._progress(f"the cached rules of {op} are damaged: discovering them again")
            return {}
        return found


def _is_rule(lines: object) -> bool:
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        return False
    try:
        read(lines)
    except ValueError:
        return False
    return True
