"""The error of a capture that met code which it can't trace."""

from __future__ import annotations

import re
from pathlib import Path


class GraphBreak(Exception):
    """Capture met code that it can't trace; ``line`` is the user's line if known."""

    def __init__(self, error: Exception, on_data: bool) -> None:
        text = str(error).strip()
        (first, *lines) = text.splitlines() or [type(error).__name__]
        told = next((x for x in lines if "Explanation: " in x), "").partition("Explanation: ")[2]
        told = re.sub(r" in file `[^`]*`", "", told)
        while (shorter := re.sub(r"\([^()]*\)", "", told)) != told:  # parentheses may be nested
            told = shorter
        told = " ".join(told.partition(". ")[0].split())
        super().__init__(f"{first.strip()}: {told}" if told else first)
        self.detail = text
        self.depends_on_data = on_data or bool(
            re.search(r"data.dependent|dynamic shape|\.item\b", text, re.IGNORECASE)
        )
        stack = getattr(error, "real_stack", None) or ()
        own = str(Path(__file__).parent)  # which calls the user's loss, for example
        frames = [f for f in stack if "/torch/" not in f.filename and own not in f.filename]
        self.line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
