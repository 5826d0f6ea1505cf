"""Hostile cluster files: a good file with every entry replaced by every wrong value, and garbage."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

from ruamel.yaml import YAML

from benchmarks.hostile.case import CLUSTER, Case
from benchmarks.hostile.model_files import PLAN

VALUES: dict[str, Any] = {
    "null": None, "true": True, "-1": -1, "0": 0, "1e-9": 1e-9, "1e400": float("inf"), "nan": float("nan"),
    "ten million": 10_000_000, "2**70": 2**70, "text": "abc", "empty text": "", "a list": [1, "x"],
    "an empty list": [], "a mapping": {"x": 1}, "1e-9 B/s": "1e-9 B/s", "-5 GB": "-5 GB", "1 parsec": "1 parsec",
    "a long text": "x" * 100_000,
}  # fmt: skip

TEXTS: dict[str, str | bytes] = {
    "empty": "", "a number": "3", "a list": "- 1\n- 2\n", "text": "hello", "a tab": "name:\tx\n\tnodes: 1\n",
    "an unclosed bracket": "nodes: [", "two documents": CLUSTER + "---\n" + CLUSTER,
    "a tag of Python": "!!python/object/apply:os.system ['true']\n", "an alias of itself": "a: &a [*a]\n",
    "a billion laughs": "a: &a [x, x]\n" + "".join(f"{chr(98 + k)}: &{chr(98 + k)} [*{chr(97 + k)}, *{chr(97 + k)}]\n" for k in range(24)),
    "deep": "[" * 5000 + "]" * 5000, "binary": bytes(range(256)) * 4, "a key twice": CLUSTER + "name: again\n",
    "an unknown key": CLUSTER + "colour: red\n", "no nodes": "name: x\nlinks: {between: 1 GB/s}\n",
    "nodes of one name": CLUSTER.replace("name: b", "name: a"), "utf-16": CLUSTER.encode("utf-16"),
    "a control character": CLUSTER.replace("lab", '"\x07"'), "a date that is none": CLUSTER.replace("lab", "2026-13-45"),
    "a tag of an int": CLUSTER.replace("gpus: 2", "gpus: !!int abc"), "5000 digits": CLUSTER.replace("gpus: 2", f"gpus: {'9' * 5000}"),
    "5000 hexadecimal digits": CLUSTER.replace("gpus: 2", f"gpus: 0x{'f' * 5000}"), "400 digits": CLUSTER.replace("memory: 8 GiB", f"price_per_hour: {'9' * 400}"),
    "more bytes than a float": CLUSTER.replace("8 GiB", "1e400 GiB"), "more bytes than a decimal": CLUSTER.replace("8 GiB", "1e999999 GiB"),
    "a merge that lacks a figure": CLUSTER + "- &d {name: d, gpus: 1, type: P100}\n- {<<: *d, name: e, memory: 3}\n",
    "a device of no type": CLUSTER.replace("type: A100", "type: Z999"),
}  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all entries of nested lists and dicts."""
    if path:
        yield path
    entries = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in entries:
        yield from places(inner, (*path, key))


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of nested lists and dicts with one entry replaced."""
    found = copy.deepcopy(data)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


def cases() -> Iterator[Case]:
    """Yield wrong values at every place, and wrong files."""
    yaml = YAML(typ="safe", pure=True)
    data = yaml.load(CLUSTER)
    for path in places(data):
        for name, value in VALUES.items():
            text = io.StringIO()
            yaml.dump(changed(data, path, value), text)
            where = ".".join(map(str, path))
            yield Case(
                kind="cluster", name=f"{where} = {name}", argv=PLAN,
                files={"cluster.yaml": text.getvalue()}, exits=(0, 2, 3),
            )  # fmt: skip
    for name, content in TEXTS.items():
        yield Case(kind="cluster", name=f"file: {name}", argv=PLAN, files={"cluster.yaml": content})
