"""Types of a plan's entries, checked after it was read from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from hap.cluster.topology import Cluster
from hap.ir.graph import Graph
from hap.ir.prediction import Prediction


def _whole(value: object) -> bool:
    return _number(value) and float(value).is_integer()  # type: ignore[arg-type]


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(v, str) for kv in value.items() for v in kv
    )


def _numbers(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(k, str) and _number(v) for k, v in value.items()
    )


_TYPES: dict[str, Callable[[object], bool]] = {
    "int": _whole,
    "float": _number,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, float]": _numbers,
    "Mapping[str, str]": _texts,
}
"""Annotation -> whether a value is of that type."""


def check_entries(graph: Graph, cluster: Cluster, prediction: Prediction) -> None:
    """Check the scalars of a plan that commands print.

    Raises:
        TypeError: an entry is of another type; the message names it.
    """
    for node in graph.nodes:
        _check_record(node, f"node {node.name}")
    for i in graph.inputs:
        _check_record(i, f"input {i.tensor}")
    for o in graph.outputs:
        _check_record(o, f"output {o.tensor}")
    for rank, device in enumerate(cluster.devices):
        _check_record(device, f"device {rank}")
    _check_record(prediction, "prediction")


def _check_record(record: Any, where: str) -> None:
    """Check the scalar fields of a dataclass, and of those in its tuples."""
    for field in fields(record):
        value = getattr(record, field.name)
        check = _TYPES.get(str(field.type))
        if check is not None and not check(value):
            raise TypeError(f"{where}: {field.name} is {value!r}")
        if isinstance(value, tuple):
            for at, entry in enumerate(value):
                if is_dataclass(entry):
                    _check_record(entry, f"{where}.{field.name}.{at}")
