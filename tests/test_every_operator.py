"""Operators that torch lists for its own tests are verified, refused with a reason, or counted apart."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from benchmarks.coverage_document import every_operator

pytest.importorskip("expecttest")


@pytest.mark.slow
def test_operators_are_verified_refused_or_counted_apart() -> None:
    """In a process of its own: torch's list of operators changes settings of torch."""
    words = ["-m", "benchmarks.every_operator", "--only", "atan", "masked_select", "acos"]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    verified, refused, alone, total = run.stdout.splitlines()
    assert "'ok': True" in verified
    assert "'inputs': 1" in verified
    assert "can't be captured as one graph" in refused
    assert "'alone': 'no finite gradient'" in alone
    assert total == "{'ok': 1, 'refused': 1, 'alone': 1}"


def test_results_become_a_section() -> None:
    results: dict[str, Any] = {
        "a": {"ok": True, "error": 1e-12, "rules": ["aten.a.default(float32#0[a])"], "inputs": 2},
        "b": {"ok": True, "error": 1e-15, "rules": [], "inputs": 1},
        "c": {"ok": False, "reason": "differs: x"},
        "d": {"alone": "no finite gradient"},
    }
    text = every_operator(results)
    assert "| 4 | 2 | 1 | 1 | 1e-12 |" in text
    assert "| c | differs: x |" in text
    assert every_operator({}) == ""
