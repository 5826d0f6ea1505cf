"""Fit and score GPUs by measured operators of transformers, and links by measured collectives.

    python -m benchmarks.operator_calibration            errors of the catalogue and of held-out rows
    python -m benchmarks.operator_calibration --refit    figures for hap/cluster/gpus.yaml

Rates are fitted to ``data/gpu_operator_latency.csv``. The A100 and the V100 keep the rates that
:mod:`benchmarks.calibration` fits to whole layers; the A100's TF32 rate comes from here. Held-out
rows: each of the two models is scored by figures that are fitted to the other one. A link inside a
machine is fitted to the collectives of ``data/gpu_collective_latency.csv`` from 8 MB on, and held out
is every second size.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.transformer_operators import EMBEDDING, HEAD, Transformer
from hap.cluster.catalogue import catalogue, find
from hap.cluster.device import Device
from hap.profiler.fit import Timing, fit_device, relative_error

DATA = Path(__file__).parent / "data"
TF32 = ("A100-40", "GH200", "RTX3090")
"""Kinds whose float32 rows ran with TF32."""
BY_LAYERS = ("A100-40", "V100-16")
"""Kinds whose other rates follow from measured layers."""
MODELS = {
    "GPT-Neo-2.7": {"hidden": 2560, "ffn": 10240, "heads": 32, "vocabulary": 128256},
    "OPT-30": {"hidden": 7168, "ffn": 28672, "heads": 56, "vocabulary": 50272},
}
LINEARS = ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")
"""Operators whose measured backward takes as long as the forward: it is one product of the two."""
SPELLINGS = {"RTX-2080": "RTX2080Ti"}
"""Names in the tables that are those of other GPUs in the catalogue."""
SEQUENCE = 2048
LEAST_MEGABYTES = 8.0
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPoint:
    """One measured pass of one operator."""

    kind: str
    model: str
    products: str
    batch: int
    operator: str
    backward: bool
    sample: Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """One measured collective inside a machine."""

    kind: str
    collective: str
    ranks: int
    bytes: float
    seconds: float

    @property
    def traffic_bytes(self) -> float:
        """Bytes that cross each link of a ring; ``bytes`` of an all-gather are each rank's part."""
        if self.collective == "all_gather":
            return (self.ranks - 1) * self.bytes
        rounds = 2 if self.collective == "all_reduce" else 1
        return rounds * (self.ranks - 1) / self.ranks * self.bytes

    @property
    def steps(self) -> int:
        """Messages whose latency adds: those of a tree, once or twice."""
        return (2 if self.collective == "all_reduce" else 1) * int(np.ceil(np.log2(self.ranks)))


def kind_of(gpu: str) -> str:
    entry = find(SPELLINGS.get(gpu, gpu))
    assert entry is not None, f"the catalogue does not know {gpu}"
    return entry.device.kind


@cache
def operator_points() -> tuple[OperatorPoint, ...]:
    """Return two points per row of the table of operators: forward and backward."""
    found = []
    with (DATA / "gpu_operator_latency.csv").open() as file:
        for row in csv.DictReader(file):
            kind = kind_of(row["gpu"])
            lower = row["dtype"] == "float32" and kind in TF32
            products = "tfloat32" if lower else row["dtype"]
            model = Transformer(
                **MODELS[row["model"]], sequence=SEQUENCE,
                batch=int(row["microbatch"]), products=products,
            )  # fmt: skip
            works = model.operators()[row["op"]]
            for backward, key in enumerate(("fwd_us", "bwd_us")):
                work = works[backward]
                if backward and row["op"] in LINEARS:
                    work = work[:1]
                point = OperatorPoint(
                    kind=kind, model=row["model"], products=products, batch=model.batch,
                    operator=row["op"], backward=bool(backward),
                    sample=Timing(works=work, seconds=float(row[key]) / 1e6),
                )  # fmt: skip
                found.append(point)
    return tuple(found)


def fitted_to(points: Iterable[OperatorPoint]) -> Iterable[OperatorPoint]:
    """Return the points that rates are fitted to: at least 2 rows, so that launches weigh little.

    Embedding and head hold kernels that depend on the program, not on the GPU alone.
    """
    return (p for p in points if p.batch >= 2 and p.operator not in (EMBEDDING, HEAD))


def refit(points: Iterable[OperatorPoint]) -> dict[str, Figures]:
    """Return the fitted figures by kind: rates of dtypes, and ``memory_bandwidth``."""
    by_kind: dict[str, list[Timing]] = {}
    for point in fitted_to(points):
        by_kind.setdefault(point.kind, []).append(point.sample)
    fitted = {}
    for kind, samples in sorted(by_kind.items()):
        entry = catalogue()[kind]
        prior = replace(entry.device, launch_s=0.0, flops_per_s=dict(entry.device.flops_per_s))
        if kind not in BY_LAYERS:  # begin with the vendor's figures, not with the last fit
            peak = {k: 0.76 * v for k, v in entry.peak.items()}
            bandwidth = peak.pop("memory_bandwidth")
            prior = replace(prior, flops_per_s=peak, memory_bytes_per_s=bandwidth)
        found = fit_device(samples, prior=prior, source="fitted", ridge=0.3, within=0.2)
        used = {w.dtype for sample in samples for w in sample.works if w.kind == "matmul"}
        if kind in BY_LAYERS:
            used &= {"tfloat32"}
        # GeForce boards clock above their datasheet; the catalogue does not count on it.
        rates = found.flops_per_s
        figures = {dtype: min(rates[dtype], entry.peak[dtype]) for dtype in sorted(used)}
        if kind not in BY_LAYERS:
            figures["memory_bandwidth"] = found.memory_bytes_per_s
        fitted[kind] = figures
    return fitted


def device(kind: str, figures: Mapping[str, float] | None = None) -> Device:
    """Return a device of the catalogue without launches, with other figures where given."""
    known = replace(catalogue()[kind].device, launch_s=0.0)
    if not figures:
        return known
    rates = {k: v for k, v in figures.items() if k != "memory_bandwidth"}
    return replace(
        known,
        flops_per_s={**known.flops_per_s, **rates},
        memory_bytes_per_s=figures.get("memory_bandwidth", known.memory_bytes_per_s),
    )


def errors(
    points: Iterable[OperatorPoint], fitted: Mapping[str, Figures] | None = None
) -> list[tuple[float, OperatorPoint]]:
    """Return predicted / measured - 1 of each fitted operator."""
    fitted = fitted or {}
    return [
        (relative_error(device(p.kind, fitted.get(p.kind)), p.sample), p) for p in fitted_to(points)
    ]


def held_out() -> list[tuple[float, OperatorPoint]]:
    """Score each model by figures that were fitted to the other one."""
    found = []
    for model in MODELS:
        fitted = refit(p for p in operator_points() if p.model != model)
        found += errors((p for p in operator_points() if p.model == model), fitted)
    return found


@cache
def host_seconds(kind: str) -> float:
    """Return the host's time per operator: the median constant of the forwards of light operators.

    Each constant is the intercept of the line through the microbatches of 1 and 4 rows.
    """
    constants = []
    light = ("enc-1st-layernorm", "enc-2nd-layernorm", "enc-post-attention-dropout")
    mine = [p for p in operator_points() if p.kind == kind and not p.backward]
    seconds = {(p.model, p.products, p.operator, p.batch): p.sample.seconds for p in mine}
    for (model, products, operator, batch), one in seconds.items():
        four = seconds.get((model, products, operator, 4))
        if batch == 1 and operator in light and four is not None and model == "GPT-Neo-2.7":
            constants.append(max(0.0, one - (four - one) / 3))
    return median(constants)


@cache
def collective_points() -> tuple[CollectivePoint, ...]:
    """Return the measured collectives from ``LEAST_MEGABYTES`` on."""
    with (DATA / "gpu_collective_latency.csv").open() as file:
        return tuple(
            CollectivePoint(
                kind=kind_of(row["gpu"]), collective=row["collective"], ranks=int(row["ranks"]),
                bytes=float(row["megabytes"]) * 1e6, seconds=float(row["ms"]) / 1e3,
            )
            for row in csv.DictReader(file)
            if float(row["megabytes"]) >= LEAST_MEGABYTES
        )  # fmt: skip


def fit_collectives(points: Iterable[CollectivePoint]) -> tuple[float, float]:
    """Return (latency in seconds, bytes per second) with the least relative errors squared."""
    rows = [(p.steps / p.seconds, p.traffic_bytes / p.seconds) for p in points]
    scale = np.array([1e-6, 1e-9])
    x = np.linalg.lstsq(np.array(rows) * scale, np.ones(len(rows)), rcond=None)[0] * scale
    return max(float(x[0]), 0.0), 1 / float(x[1])


def ring_rate(kind: str) -> float:
    """Return the bytes per second of a ring of four in an all-reduce: what a trained model waits for."""
    return fit_collectives(collective_groups()[kind, "all_reduce", 4])[1]


def collective_groups() -> dict[tuple[str, str, int], list[CollectivePoint]]:
    """Return the collectives by kind, name and number of ranks, the smallest first."""
    groups: dict[tuple[str, str, int], list[CollectivePoint]] = {}
    for point in sorted(collective_points(), key=lambda p: p.bytes):
        groups.setdefault((point.kind, point.collective, point.ranks), []).append(point)
    return groups


def collective_error(link: tuple[float, float], points: Iterable[CollectivePoint]) -> float:
    """Return the median relative error of a link's prices."""
    latency, rate = link
    priced = ((latency * p.steps + p.traffic_bytes / rate) / p.seconds - 1 for p in points)
    return median(abs(e) for e in priced)


def summary(found: list[tuple[float, OperatorPoint]]) -> str:
    sizes = sorted(abs(error) for error, _ in found)
    return f"{len(sizes)} points, median {median(sizes):.1%}, nine in ten within {sizes[int(0.9 * (len(sizes) - 1))]:.0%}"


def report(text: Callable[[str], None] = print) -> None:
    """Print the errors by kind, in the sample and held out."""
    for title, found in (("catalogue", errors(operator_points())), ("held out", held_out())):
        text(f"operators, {title}: {summary(found)}")
        for kind in sorted({p.kind for _, p in found}):
            text(f"  {kind:10} {summary([f for f in found if f[1].kind == kind])}")
    text(f"{'collective':32} {'latency':>8} {'GB/s':>7} {'error':>7} {'held out':>9}")
    for (kind, name, ranks), points in collective_groups().items():
        link, half = fit_collectives(points), fit_collectives(points[::2])
        text(
            f"{kind:10} {name:15} {ranks:2} ranks {link[0] * 1e6:6.0f} us {link[1] / 1e9:7.1f} "
            f"{collective_error(link, points):7.1%} {collective_error(half, points[1::2]):9.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--refit", action="store_true", help="print figures for the catalogue")
    if not parser.parse_args().refit:
        report()
        return
    for kind, figures in refit(operator_points()).items():
        texts = []
        for figure, value in figures.items():
            unit, size = ("GB/s", 1e9) if figure == "memory_bandwidth" else ("TFLOP/s", 1e12)
            texts.append(f"{figure}: {value / size:.4g} {unit}")
        print(f"  {kind}:")
        if texts:
            print(f"    fitted: {{{', '.join(texts)}}}")
        print(f"    link: {ring_rate(kind) / 1e9:.3g} GB/s")


if __name__ == "__main__":
    main()
