"""Compare the plans of two versions of the code by digests.

    python -m benchmarks.plan_digests --out before.json
    python -m benchmarks.plan_digests --against before.json     after a change

Plans ten models on catalogue clusters, over one mesh axis and over two, and prints a digest of each
plan's program, shares and prediction. A digest does not depend on the format of the plan file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hap.api import plan_file
from hap.synthesizer.plan_options import PlanOptions

HERE = Path(__file__).parent


class Case(NamedTuple):
    """A model file and its function, and a cluster file, both by name."""

    model: str
    cluster: str
    options: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        return " ".join([self.model, self.cluster, *map(str, self.options)])


CASES = (
    Case("bert.py:batch_64", "unlike8"),
    Case("bert.py", "hap_testbed"),
    Case("bert.py", "lab_mixed", {"mesh": False}),
    Case("bert_moe.py", "unlike8"),
    Case("gpt2.py", "three_types8"),
    Case("llama.py:batch_64", "three_types64", {"mesh": False}),
    Case("mlp.py:tiny", "unlike8", {"compare": True}),
    Case("mlp.py:tiny", "unlike8", {"mesh": True}),
    Case("t5.py:tiny", "irregular29", {"allow_idle": True}),
    Case("vgg19.py", "three_types8"),
    Case("vit.py:batch_64", "even8"),
    Case("wide_mlp.py", "race_4411"),
    Case("vit.py:tiny", "race_paper", {"prove": 10}),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan every case, print the digests, compare them; exit 1 if any differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="compare with the digests in this file")
    parser.add_argument("--model", default="", help="cases whose name holds this text")
    options = parser.parse_args(arguments)
    before = json.loads(options.against.read_text()) if options.against else {}
    table = Table("case", "program", "shares", "prediction", "step", "planned in", "against")
    seen: dict[str, dict[str, str]] = {}
    for case in CASES:
        if options.model not in case.name:
            continue
        began = time.perf_counter()
        found, step_s = digests(case)
        seen[case.name] = found
        took = f"{time.perf_counter() - began:.1f} s"
        verdict = _verdict(found, before.get(case.name)) if options.against else ""
        table.add_row(case.name, *found.values(), f"{step_s:.6g} s", took, verdict)
        print(case.name, verdict, took, file=sys.stderr, flush=True)
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table)
    if options.out:
        options.out.write_text(json.dumps(seen, indent=1) + "\n")
    if options.against and any(found != before.get(name) for name, found in seen.items()):
        sys.exit(1)


def digests(case: Case) -> tuple[dict[str, str], float]:
    """Return (digest of the program, of the shares and of the prediction; the predicted step)."""
    models, clusters = HERE / "models", HERE / "clusters"
    cluster = str(clusters / f"{case.cluster}.yaml")
    plan = plan_file(str(models / case.model), cluster, options=PlanOptions(**case.options))
    inside = plan.inside
    program = [plan.program.to_json(), inside.program.to_json() if inside else None]
    shares = [plan.shares, inside.shares if inside else None, plan.idle, plan.left_out]
    said = {"program": program, "shares": shares, "prediction": dataclasses.asdict(plan.prediction)}
    return {name: _digest(what) for name, what in said.items()}, plan.prediction.step_s


def _digest(what: Any) -> str:
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _verdict(found: Mapping[str, str], before: Mapping[str, str] | None) -> str:
    if before is None:
        return "not there"
    differ = [name for name, digest in found.items() if digest != before.get(name)]
    return f"differs: {', '.join(differ)}" if differ else "same"


if __name__ == "__main__":
    main()
