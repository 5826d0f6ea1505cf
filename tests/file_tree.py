"""Write docs/tree.md: every file with the first sentence of its docstring.

python -m tests.file_tree
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tree.md"
FOLDERS = ("hap", "synthesizer", "runtime", "profiler", "examples", "benchmarks")
LINKS = {"profiler", "runtime", "synthesizer"}
"""Folders at the top that ``hap/`` links to."""


def page() -> str:
    """Return the text of docs/tree.md, built from the current docstrings."""
    lines = [
        "# Every file",
        "",
        "Written by `python -m tests.file_tree` from the files' docstrings.",
    ]
    for folder in FOLDERS:
        lines += ["", *_section(ROOT / folder)]
    return "\n".join(lines) + "\n"


def _section(folder: Path) -> Iterator[str]:
    name = folder.relative_to(ROOT).as_posix()
    yield f"## {name}/"
    yield ""
    face = folder / "__init__.py"
    if face.exists() and (said := first_sentence(face)):
        yield said
        yield ""
    inner = []
    for entry in sorted(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink() and any(entry.glob("*.py")):
            inner.append(entry)
        elif entry.suffix == ".py" and not entry.name.startswith("__"):
            yield f"- `{entry.name}`: {first_sentence(entry)}"
    for entry in inner:
        if entry.parent.name != "hap" or entry.name not in LINKS:
            yield ""
            yield from _section(entry)


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring."""
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    first = " ".join(said.split("\n\n")[0].split())
    end = first.find(". ")
    return first[: end + 1] if end >= 0 else first


if __name__ == "__main__":
    PAGE.write_text(page())
