"""Run the tests with the mark ``gpu``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings

PART = "suite"
ROOT = Path(__file__).parents[2]


def run(settings: Settings) -> Iterator[Line]:
    """Yield one line per test."""
    output = settings.folder.absolute() / "suite.xml"
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={output}"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 1) or not output.exists():
        text = (done.stdout + done.stderr)[-2000:]
        yield Line(part=PART, claim="pytest -m gpu runs", outcome=MISSED, reason=text)
        return
    for case in ElementTree.parse(output).getroot().iter("testcase"):
        problem = next(
            (case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None
        )
        skipped = case.find("skipped")
        told = problem if problem is not None else skipped
        yield Line(
            part=PART, claim=f"{case.get('classname')}.{case.get('name')}",
            outcome=MISSED if problem is not None else SKIPPED if skipped is not None else MET,
            reason="" if told is None else str(told.get("message", "")),
        )  # fmt: skip
