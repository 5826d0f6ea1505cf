"""Every entry of a plan file that has another type is refused, or harms no command that reads it."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hostile.cluster_files import changed, places
from benchmarks.hostile.plan_files import VALUES
from hap.cli.plan_screen import program_lines
from hap.cli.simulation import simulation_json
from hap.cluster.topology import digest_of
from hap.errors import HapError, PlanError
from hap.ir.graph import Graph
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan
from tests.small_plan import small_plan


def loaded(tmp_path: Path, data: dict[str, Any]) -> Plan | None:
    """Return the plan of damaged data, whose digests fit; ``None`` if it is refused."""
    path = tmp_path / "plan.json"
    with contextlib.suppress(KeyError, ValueError, TypeError):  # what can't be read has no digest
        data["graph_digest"] = Graph.from_json(data["graph"]).digest
    if isinstance(data.get("cluster"), dict):
        data["cluster_digest"] = digest_of(data["cluster"])
    path.write_text(json.dumps(data))
    try:
        return Plan.load(path)
    except PlanError as error:
        assert error.where and error.hint
        return None


@pytest.mark.parametrize(
    "part", ["graph", "program", "shares", "cluster", "prediction", "recipe", ""]
)
def test_entries_of_other_types_are_refused_or_harmless(tmp_path: Path, part: str) -> None:
    plan = small_plan()
    data = json.loads(json.dumps(plan.to_json()))
    refused, rng = 0, random.Random(part)
    for path in places(data):
        if path[0] != part and (part or len(path) > 1):
            continue
        for value in rng.sample([*VALUES.values()], 3):
            made = loaded(tmp_path, changed(data, path, value))
            if made is None:
                refused += 1
                continue
            try:
                list(program_lines(made))
                json.dumps(simulation_json(simulate_plan(made)))
            except HapError:
                continue
            except Exception as error:
                raise AssertionError(f"{path} = {value!r}: {error!r}") from error
    assert refused or part == "recipe"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("graph", "nodes", 0, 6), True, "node 0 of the graph has True where a text belongs"),
        (("graph", "nodes", 0, 3), 3, "node 0 of the graph has 3 where a list belongs"),
        (("graph", "rules"), True, "the graph's rules has True where a mapping belongs"),
        (("graph", "inputs", 0), ["x"], "inputs has a list of 1 entries, not of 3"),
        (("program", "axes"), True, "the program's axes has True where a mapping belongs"),
        (("shares",), [1], "the shares has .* where a mapping belongs"),
    ],
)
def test_the_message_names_the_entry(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    file = tmp_path / "plan.json"
    data = json.loads(json.dumps(small_plan().to_json()))
    file.write_text(json.dumps(changed(data, path, value)))
    with pytest.raises(PlanError, match=message):
        Plan.load(file)
