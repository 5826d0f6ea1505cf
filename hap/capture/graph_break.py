"""The error of a capture that met code which it can't trace."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hap.capture.source_lines import innermost


class GraphBreak(Exception):
    """Capture met code that it can't trace; ``line`` is the user's line if known.

    Args:
        frames: files and lines that the tracer was at, for an error that does not know them.
    """

    def __init__(
        self, error: Exception, on_data: bool, frames: Sequence[tuple[str, object]] = ()
    ) -> None:
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
        self.line = innermost([(f.filename, f.lineno) for f in stack] or frames)
