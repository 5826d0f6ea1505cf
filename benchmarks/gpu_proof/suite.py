"""Run the tests with the mark ``gpu``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings

PART = "suite"
ROOT = Path(__file__).parents[2]
OUTCOMES = {"PASSED": MET, "SKIPPED": SKIPPED, "FAILED": MISSED, "ERROR": MISSED}
RAN = re.compile(rf"(tests/\S+::.+?) ({'|'.join(OUTCOMES)})(?: \((.*)\))?\s+\[ *\d+%\]$")
"""A line of ``pytest -v``: the test, its outcome, and the reason of a skip."""


def run(settings: Settings) -> Iterator[Line]:
    """Yield one line per test as it ends; the reasons of failures are in pytest's own output."""
    files = sorted(
        str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("test_*.py")
        if "mark.gpu" in file.read_text()
    )  # fmt: skip
    words = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--tb=short", *files]
    log = settings.folder / "suite.log"
    with (
        log.open("w") as kept,
        subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "400"},  # for whole reasons
        ) as tests,  # fmt: skip
    ):
        assert tests.stdout is not None
        for text in tests.stdout:
            kept.write(text)
            kept.flush()
            if found := RAN.match(text.strip()):
                name, outcome, reason = found.groups()
                yield Line(
                    part=PART, claim=name, outcome=OUTCOMES[outcome],
                    reason=reason or (f"see {log}" if OUTCOMES[outcome] == MISSED else ""),
                )  # fmt: skip
    if tests.returncode not in (0, 1):
        reason = f"exit {tests.returncode}: {log.read_text()[-2000:]}"
        yield Line(part=PART, claim="pytest -m gpu runs", outcome=MISSED, reason=reason)
