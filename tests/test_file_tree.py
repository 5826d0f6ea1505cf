"""docs/tree.md lists every file, and every file has a docstring."""

from __future__ import annotations

from tests.file_tree import FOLDERS, LINKS, PAGE, ROOT, first_sentence, page


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.file_tree"


def test_every_file_says_what_it_is() -> None:
    files = [
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        if not (
            file.relative_to(ROOT).parts[0] == "hap" and file.relative_to(ROOT).parts[1] in LINKS
        )
    ]
    assert not [str(file) for file in files if file.stat().st_size and not first_sentence(file)]
