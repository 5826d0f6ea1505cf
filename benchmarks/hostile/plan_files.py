"""Hostile plan files: damaged JSON, and entries of wrong types."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.hostile.case import Case
from benchmarks.hostile.cluster_files import changed, places
from hap.cluster.topology import digest_of

VALUES: dict[str, Any] = {
    "null": None, "true": True, "-1": -1, "2**70": 2**70, "0.5": 0.5, "text": "abc", "a list": [1],
    "an empty list": [], "a mapping": {"x": 1},
}  # fmt: skip

COMMANDS = (
    ("show",), ("verify",), ("simulate",), ("show", "--code"), ("show", "--json"), ("report",),
)  # fmt: skip


def cases(plan: Path, count: int, seed: int = 0) -> Iterator[Case]:
    """Yield damaged copies of a plan file; ``count`` of them have one entry of a wrong type."""
    text = plan.read_text()
    data = json.loads(text)
    for name, content in {
        "empty": "", "a number": "3", "a list": "[]", "half": text[: len(text) // 2], "deep": "[" * 100_000,
        "binary": bytes(range(256)) * 4, "not a number": json.dumps({**data, "prediction": {**data["prediction"], "step_s": math.nan}}), "utf-16": text.encode("utf-16"),
        "two": text + text, "1e999": json.dumps({**data, "prediction": {**data["prediction"], "step_s": "@"}}).replace('"@"', "1e999"),
        "states of text": json.dumps({**data, "optimizer": {"name": "SGD", "states": "x"}}), "a path of a number": json.dumps({**data, "source": {"path": 3}}),
        "a batch of a missing tensor": json.dumps({**data, "recipe": {"batch": {"tensor": "9"}}}),
        "a later format": json.dumps({**data, "format": 99}), "no format": "{}",
    }.items():  # fmt: skip
        for command in COMMANDS[:2]:
            yield _case(f"file: {name}", command, content)
    rng = random.Random(seed)
    found = list(places(data))
    for k in range(count):
        path, (name, value) = rng.choice(found), rng.choice(list(VALUES.items()))
        wrong = changed(data, path, value)
        if path[0] == "cluster" and isinstance(wrong["cluster"], dict):
            wrong["cluster_digest"] = digest_of(wrong["cluster"])
        label = f"{'.'.join(map(str, path))} = {name} ({k})"
        yield _case(label, COMMANDS[k % len(COMMANDS)], json.dumps(wrong), exits=(0, 1, 2))


def _case(
    name: str, command: tuple[str, ...], content: str | bytes, exits: tuple[int, ...] = (2,)
) -> Case:
    return Case(
        kind="plan", name=f"{' '.join(command)}: {name}", argv=(*command, "plan.json"),
        files={"plan.json": content}, exits=exits,
    )  # fmt: skip
