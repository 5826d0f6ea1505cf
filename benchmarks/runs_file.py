"""Read and check a file of measured training runs, in the format of ``data/gpu_training_runs.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hap.cluster.catalogue import find, nearest
from hap.errors import InputError

_MODEL = ("transformer_layers", "hidden", "ffn", "heads", "vocabulary", "sequence")
_RUN = ("name", "model", "layers_per_stage", "stages", "microbatch", "global_batch", "measured_s")
PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica of a stage: (type, count) of its GPUs, and its tensor-parallel degree."""

    gpus: tuple[tuple[str, int], ...]
    tensor_parallel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run and its layout; ``stages[s][r]`` is replica ``r`` of stage ``s``."""

    name: str
    model: Mapping[str, int]
    layers_per_stage: tuple[int, ...]
    stages: tuple[tuple[Replica, ...], ...]
    microbatch: int
    global_batch: int
    measured_s: float
    gradient_sync_s: float | None
    peak_bytes: float | None
    recompute: bool
    dropout: bool
    float32_matmul_precision: str

    @property
    def replicas(self) -> int:
        return len(self.stages[0])

    @property
    def microbatches(self) -> int:
        """Microbatches per replica."""
        return self.global_batch // (self.microbatch * self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsFile:
    """Runs, and the links between machines: unordered pair of types -> bytes/s per GPU."""

    runs: tuple[Run, ...]
    between: Mapping[frozenset[str], float]
    inside: Mapping[str, float]
    """GPU type -> bytes/s of a link inside its machine, where the file states one."""

    def rate(self, a: str, b: str) -> float:
        """Return bytes/s per GPU between machines of two types.

        Raises:
            InputError: the file has no such link.
        """
        found = self.between.get(frozenset((a, b)))
        if found is None:
            raise InputError(
                f"`links.between` has no link between {a} and {b}",
                hint="add {a, b, gigabytes_per_s_per_gpu} for it",
            )
        return found


def read_runs(path: str | Path) -> RunsFile:
    """Return the runs of a file.

    Raises:
        InputError: the file is missing, is no JSON, or an entry is missing or wrong.
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path} can't be read: {error.strerror}", hint="name a file") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}", hint="see benchmarks/data") from error
    where = str(path)
    models = _entry(data, "models", dict, where)
    links = _entry(data, "links", dict, where)
    between, inside = {}, {}
    for i, link in enumerate(_entry(links, "between", list, f"{where}: links")):
        place = f"{where}: links.between[{i}]"
        ends = [_gpu(_entry(link, end, str, place), place) for end in "ab"]
        rate = _positive(link, "gigabytes_per_s_per_gpu", place)
        between[frozenset(ends)] = rate * 1e9
    for i, link in enumerate(links.get("inside", [])):
        place = f"{where}: links.inside[{i}]"
        kind = _gpu(_entry(link, "type", str, place), place)
        if not isinstance(link.get("gigabytes_per_s"), str):  # a text names a table
            inside[kind] = _positive(link, "gigabytes_per_s", place) * 1e9
    runs = _entry(data, "runs", list, where)
    if not runs:
        raise InputError(f"{where}: `runs` is empty", hint="give at least one run")
    checked = tuple(_run(run, models, f"{where}: runs[{i}]") for i, run in enumerate(runs))
    return RunsFile(runs=checked, between=between, inside=inside)


def _run(data: Any, models: Mapping[str, Any], where: str) -> Run:
    for key in _RUN:
        _entry(data, key, object, where)
    name = _entry(data, "name", str, where)
    where = f"{where} ({name})"
    model = models.get(data["model"])
    if model is None:
        raise InputError(
            f"{where}: `model` is {data['model']!r}", hint=f"`models` has {', '.join(models)}"
        )
    sizes = {key: _whole(model, key, f"{where}: model") for key in _MODEL}
    layers = _entry(data, "layers_per_stage", list, where)
    stages = _entry(data, "stages", list, where)
    if len(layers) != len(stages) or not stages:
        raise InputError(
            f"{where}: {len(stages)} stages, but {len(layers)} numbers of layers",
            hint="give one number in `layers_per_stage` for each entry of `stages`",
        )
    if any(not _is_whole(n) for n in layers) or sum(layers) != sizes["transformer_layers"] + 2:
        raise InputError(
            f"{where}: `layers_per_stage` {layers} has no sum of "
            f"{sizes['transformer_layers'] + 2}: the layers, the embedding and the head",
            hint="count the embedding and the head as one layer each",
        )
    read = tuple(
        tuple(
            _replica(replica, sizes, f"{where}: stages[{s}][{r}]")
            for r, replica in enumerate(stage if isinstance(stage, list) else ())
        )
        for s, stage in enumerate(stages)
    )
    if not read[0] or len({len(stage) for stage in read}) != 1:
        raise InputError(
            f"{where}: stages have {[len(stage) for stage in read]} replicas",
            hint="give each stage the same number of replicas, one at least",
        )
    micro, rows = _whole(data, "microbatch", where), _whole(data, "global_batch", where)
    if rows % (micro * len(read[0])):
        raise InputError(
            f"{where}: {rows} rows are no multiple of {len(read[0])} replicas with microbatches "
            f"of {micro}",
            hint="correct `global_batch` or `microbatch`",
        )
    precision = data.get("float32_matmul_precision", "high")
    if precision not in PRECISIONS:
        raise InputError(
            f"{where}: `float32_matmul_precision` is {precision!r}",
            hint=f"use one of {', '.join(PRECISIONS)}",
        )
    return Run(
        name=name, model=sizes, layers_per_stage=tuple(layers), stages=read,
        microbatch=micro, global_batch=rows, measured_s=_positive(data, "measured_s", where),
        gradient_sync_s=_optional(data, "gradient_sync_s", where),
        peak_bytes=_optional(data, "peak_bytes", where),
        recompute=_flag(data, "recompute", where), dropout=_flag(data, "dropout", where),
        float32_matmul_precision=precision,
    )  # fmt: skip


def _replica(data: Any, sizes: Mapping[str, int], where: str) -> Replica:
    degree = _whole(data, "tensor_parallel", where)
    gpus = []
    for group in _entry(data, "gpus", list, where):
        kind = _gpu(_entry(group, "type", str, where), where)
        gpus.append((kind, _whole(group, "count", where)))
    count = sum(n for _, n in gpus)
    if count != degree:
        raise InputError(
            f"{where}: {count} GPUs, but `tensor_parallel` is {degree}",
            hint="a replica of a stage divides its tensors over all of its GPUs",
        )
    if sizes["heads"] % degree or sizes["ffn"] % degree:
        raise InputError(
            f"{where}: {sizes['heads']} heads or {sizes['ffn']} inner features can't be divided "
            f"by {degree}",
            hint="choose a degree that divides both",
        )
    return Replica(gpus=tuple(gpus), tensor_parallel=degree)


def _gpu(name: str, where: str) -> str:
    if (entry := find(name)) is None:
        near = nearest(name)
        hint = (
            f"did you mean {near}?" if near else "docs/cluster-file.md has the names that are known"
        )
        raise InputError(f"{where}: unknown GPU {name!r}", hint=hint)
    return entry.device.kind


def _entry(data: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(data, dict):
        raise InputError(f"{where} is {data!r}, not an object", hint="see benchmarks/data")
    if key not in data:
        raise InputError(f"{where} has no `{key}`", hint="add it; benchmarks/data has an example")
    if not isinstance(data[key], kind):
        raise InputError(
            f"{where}: `{key}` is {data[key]!r}, not a {kind.__name__}", hint="correct its type"
        )
    return data[key]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _whole(data: Any, key: str, where: str) -> int:
    value = _entry(data, key, object, where)
    if not _is_whole(value):
        raise InputError(f"{where}: `{key}` is {value!r}", hint="give a positive whole number")
    return int(value)


def _positive(data: Any, key: str, where: str) -> float:
    value = _entry(data, key, object, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise InputError(f"{where}: `{key}` is {value!r}", hint="give a positive number")
    return float(value)


def _optional(data: Mapping[str, Any], key: str, where: str) -> float | None:
    return None if data.get(key) is None else _positive(data, key, where)


def _flag(data: Mapping[str, Any], key: str, where: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise InputError(f"{where}: `{key}` is {value!r}", hint="give true or false")
    return value
