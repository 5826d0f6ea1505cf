"""Judge a mutated plan file: loaded, verified, and compared independently."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutations.independent import first_unequal
from benchmarks.mutations.mutators import Data
from benchmarks.mutations.subjects import Subject
from benchmarks.time_limit import TooLongError, limited
from hap.errors import PlanError, VerifyError
from hap.ir.plan import Plan
from hap.runtime.verify import verify

REFUSED, OTHER_MODEL = "refused at load", "another model"
FAILED, EQUAL = "fails verification", "equal"
FALSE_EQUAL, TRACEBACK, HANG = "FALSE EQUAL", "TRACEBACK", "HANG"
VIOLATIONS = (FALSE_EQUAL, TRACEBACK, HANG)
OUTCOMES = (REFUSED, OTHER_MODEL, FAILED, EQUAL, *VIOLATIONS)

LIMIT_S = 30.0


class Judgement(NamedTuple):
    """An outcome, and its reason."""

    outcome: str
    why: str


def judge(subject: Subject, data: Data, path: Path, limit_s: float = LIMIT_S) -> Judgement:
    """Return the outcome of one mutated plan, within a time limit."""
    try:
        with limited(limit_s):
            return _judged(subject, data, path)
    except TooLongError:
        return Judgement(HANG, f"no outcome after {limit_s:g} processor seconds")
    except Exception:
        return Judgement(TRACEBACK, traceback.format_exc())


def _judged(subject: Subject, data: Data, path: Path) -> Judgement:
    path.write_text(json.dumps(data))
    case = subject.case
    try:
        plan = Plan.load(path)
    except PlanError as error:
        if not (error.what and error.where and error.hint):
            return Judgement(TRACEBACK, f"no message for people: {error}")
        return Judgement(REFUSED, str(error))
    try:
        plan.check_model(case.graph)
    except PlanError as error:
        return Judgement(OTHER_MODEL, str(error))
    try:
        verdict = verify(plan, case.model, case.batch, case.loss, case.optimizer)
    except VerifyError as error:
        return Judgement(FAILED, str(error))
    if not verdict.ok:
        return Judgement(FAILED, verdict.first_bad or "")
    unequal = first_unequal(plan, data, subject.expected)
    return Judgement(FALSE_EQUAL, unequal) if unequal else Judgement(EQUAL, "")
