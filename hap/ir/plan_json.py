"""Parts of a plan as plain data, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from hap.ir.axes import Shares
from hap.ir.mesh import Inside
from hap.ir.plain_data import read_count, read_flag, read_list, read_map, read_text
from hap.ir.program import Program
from hap.ir.stages import PipelineStages, Stage

T = TypeVar("T")


def packed(record: Any) -> Any:
    """Return a dataclass, including nested ones, as plain data of its own without default values."""
    if isinstance(record, tuple | list):
        return [packed(entry) for entry in record]
    if isinstance(record, dict):
        return {key: packed(value) for key, value in record.items()}
    if not is_dataclass(record):
        return record
    kept = ((f, getattr(record, f.name)) for f in fields(record))
    return {f.name: packed(value) for f, value in kept if value != f.default}


def unpacked(kind: type[T], data: Any, where: str) -> T:
    """Return a dataclass of texts, counts and other fields: the inverse of :func:`packed`."""
    found = kind(**read_map(data, where))
    for field in fields(kind):  # type: ignore[arg-type]
        read = {"str": read_text, "int": read_count, "bool": read_flag}.get(str(field.type))
        if read is not None:
            read(getattr(found, field.name), f"{field.name} of {where}")
    return found


def finite(text: str) -> float:
    """Parse a number of JSON; one that no float can hold, as 1e999, is refused."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def noted(found: list[str]) -> Callable[[str], float]:
    """Return a parser of ``Infinity`` and ``NaN``, which JSON lacks, that notes them."""

    def read(text: str) -> float:
        found.append(text)
        return float(text)

    return read


def pack_inside(inside: Inside) -> dict[str, Any]:
    shares = {name: list(units) for name, units in inside.shares.items()}
    return {"program": inside.program.to_json(), "shares": shares}


def unpack_inside(data: Mapping[str, Any]) -> Inside:
    return Inside(program=Program.from_json(data["program"]), shares=read_shares(data["shares"]))


def read_shares(data: Any) -> Shares:
    return {
        name: tuple(read_list(units, f"the shares of axis {name}"))
        for name, units in read_map(data, "the shares").items()
    }


def pack_stages(stages: PipelineStages) -> dict[str, Any]:
    return {
        "cuts": list(stages.cuts),
        "stages": [
            {
                "ranks": list(stage.ranks), "in_flight": stage.in_flight,
                **({"delay": stage.delay} if stage.delay else {}),
                **({"recompute": True} if stage.recompute else {}),
                **({"gather_each": True} if stage.gather_each else {}),
                "program": stage.program.to_json(),
                "shares": {name: list(units) for name, units in stage.shares.items()},
            }
            for stage in stages.stages
        ],
    }  # fmt: skip


def unpack_stages(data: Any) -> PipelineStages:
    fields = read_map(data, "the stages")
    found = []
    for k, entry in enumerate(read_list(fields["stages"], "the stages")):
        where = f"stage {k}"
        stage = read_map(entry, where)
        ranks = read_list(stage["ranks"], f"the ranks of {where}")
        found.append(
            Stage(
                ranks=tuple(read_count(r, f"the ranks of {where}") for r in ranks),
                program=Program.from_json(stage["program"]),
                shares=read_shares(stage["shares"]),
                in_flight=read_count(stage["in_flight"], f"the microbatches in flight of {where}"),
                delay=read_count(stage.get("delay", 0), f"the delay of {where}"),
                recompute=read_flag(stage.get("recompute", False), f"recompute of {where}"),
                gather_each=read_flag(stage.get("gather_each", False), f"gather_each of {where}"),
            )
        )
    cuts = tuple(read_text(c, "a cut") for c in read_list(fields["cuts"], "the cuts"))
    return PipelineStages(cuts=cuts, stages=tuple(found))
