"""Score the cost model on layers that were measured on real GPUs.

    python -m benchmarks.calibration            the score: every row, then median and worst
    python -m benchmarks.calibration --refit    fit again, and print the figures for hap/cluster/gpus.yaml

Each row of ``data/gpu_layer_latency.csv`` is a straight line over the measured batch sizes 1 to 4.
It is evaluated at batch 4: the largest size without extrapolation, at which
the noisy constants (some of them negative) weigh least. ``--batch 8`` extrapolates.

The table holds sums of kernel times, without the gaps between kernels, so the model
predicts kernel times too (``launch_s = 0``).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.layers import HEADS, Layer
from hap.cluster.catalogue import build, catalogue, find, like
from hap.cluster.device import Device
from hap.profiler.fit import Timing, fit_device, relative_error

TABLE = Path(__file__).parent / "data" / "gpu_layer_latency.csv"
BATCH = 4
SPELLINGS = {"p100": "P100-12"}
"""Names in the table that are those of other GPUs in the catalogue."""
MEMORY_SHARES = (0.75, 0.9)
"""Parts of the vendor's rate at which the memory of a GPU moves large tensors: what copies reach."""
Figures = dict[str, dict[str, float]]  # kind -> dtype or 'memory_bandwidth' -> per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured pass of one layer."""

    kind: str
    model: str
    seq: int
    dtype: str
    backward: bool
    sample: Timing

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        return f"{self.kind:13} {self.model:11} {self.seq:5} {self.dtype:8} {way:8}"


def points(batch: int = BATCH, table: Path = TABLE) -> list[Point]:
    """Return two points per row of a table: forward and backward."""
    found = []
    with table.open() as file:
        for row in csv.DictReader(file):
            entry = find(SPELLINGS.get(row["gpu"], row["gpu"]))
            assert entry is not None, f"the catalogue does not know {row['gpu']}"
            layer = Layer(
                family=row["family"],
                hidden=int(row["hidden"]),
                ffn=int(row["ffn"]),
                heads=HEADS[row["model"]],
                batch=batch,
                seq=int(row["seq"]),
                dtype=row["dtype"],
                # On the P40 the llama layers ran with unfused attention.
                fused_attention=entry.device.kind != "P40",
            )
            for way, works in (("fwd", layer.forward()), ("bwd", layer.backward())):
                ms = float(row[f"{way}_ms_per_sample"]) * batch + float(row[f"{way}_ms_const"])
                point = Point(
                    kind=entry.device.kind,
                    model=row["model"],
                    seq=layer.seq,
                    dtype=layer.dtype,
                    backward=way == "bwd",
                    sample=Timing(works=works, seconds=ms / 1e3),
                )
                found.append(point)
    return found


def device(kind: str, fitted: Mapping[str, Mapping[str, float]] | None = None) -> Device:
    """Return a device of the catalogue, or one with other fitted figures; no launches."""
    entry = catalogue()[kind] if fitted is None else build(kind, fitted)
    return replace(entry.device, launch_s=0.0)


def bounded_fit(samples: Sequence[Timing], prior: Device, peak: float) -> Device:
    """Fit a device; the rate of its memory is within ``MEMORY_SHARES`` of the vendor's peak.

    Layers are mostly products, and errors of their price would otherwise pass for a slow memory.
    """
    found = fit_device(samples, prior=prior, source="fitted", ridge=0.3)
    least, most = (share * peak for share in MEMORY_SHARES)
    rate = min(max(found.memory_bytes_per_s, least), most)
    if rate == found.memory_bytes_per_s:
        return found
    prior, held = replace(prior, memory_bytes_per_s=rate), ("memory_bytes_per_s",)
    return fit_device(samples, prior=prior, source="fitted", ridge=0.3, held=held)


def refit(measured: Iterable[Point]) -> Figures:
    """Fit every measured kind; kinds that are like another one follow it, with it as prior."""
    by_kind: dict[str, list[Point]] = {}
    for point in measured:
        by_kind.setdefault(point.kind, []).append(point)
    fitted: Figures = {}
    for kind in sorted(by_kind, key=lambda kind: (like(kind) is not None, kind)):
        samples = [point.sample for point in by_kind[kind]]
        found = bounded_fit(
            samples, device(kind, fitted), catalogue()[kind].peak["memory_bandwidth"]
        )
        dtypes = sorted({point.dtype for point in by_kind[kind]} & set(found.flops_per_s))
        fitted[kind] = {dtype: found.flops_per_s[dtype] for dtype in dtypes}
        fitted[kind]["memory_bandwidth"] = found.memory_bytes_per_s
    return fitted


def errors(measured: Iterable[Point], fitted: Figures | None = None) -> list[tuple[float, Point]]:
    """Return predicted / measured - 1 of each point."""
    devices: dict[str, Device] = {}
    found = []
    for point in measured:
        if point.kind not in devices:
            devices[point.kind] = device(point.kind, fitted)
        found.append((relative_error(devices[point.kind], point.sample), point))
    return found


def leave_one_model_out(measured: list[Point]) -> list[tuple[float, Point]]:
    """Score each model with figures that were fitted to the other models only."""
    found = []
    for model in dict.fromkeys(point.model for point in measured):
        fitted = refit(point for point in measured if point.model != model)
        found += errors((point for point in measured if point.model == model), fitted)
    return found


def summary(found: list[tuple[float, Point]]) -> str:
    sizes = sorted(abs(error) for error, _ in found)
    ninth = sizes[int(0.9 * (len(sizes) - 1))]
    worst, point = max(found, key=lambda pair: abs(pair[0]))
    return (
        f"{len(sizes)} points: median {median(sizes):.1%}, nine in ten within {ninth:.1%}, "
        f"worst {worst:+.0%} ({' '.join(str(point).split())})"
    )


def fitted_block(fitted: Figures) -> str:
    """Return the figures as lines for the catalogue, with their fractions of the peak."""
    lines, shares = [], {}
    for kind, figures in fitted.items():
        peak = catalogue()[kind].peak
        texts = []
        for figure, value in figures.items():
            unit, size = ("GB/s", 1e9) if figure == "memory_bandwidth" else ("TFLOP/s", 1e12)
            texts.append(f"{figure}: {value / size:.4g} {unit}")
            shares.setdefault(figure, []).append(value / peak[figure])
        lines.append(f"  {kind}:\n    fitted: {{{', '.join(texts)}}}")
    typical = ", ".join(f"{figure}: {median(values):.2f}" for figure, values in shares.items())
    return "\n".join([*lines, f"typical share of the peak: {typical}"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--refit", action="store_true", help="print figures for hap/cluster/gpus.yaml"
    )
    parser.add_argument(
        "--batch", type=int, default=BATCH, help="read the table at this batch size"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="score another table of its form")
    options = parser.parse_args()
    measured = points(options.batch, options.table)
    if options.refit:
        print(fitted_block(refit(measured)))
        return
    found = errors(measured)
    print(f"{'gpu':13} {'model':11} {'seq':>5} {'dtype':8} {'pass':8} measured predicted  error")
    for error, point in found:
        ms = point.sample.seconds * 1e3
        print(f"{point} {ms:8.2f} {ms * (1 + error):9.2f} {error:+6.0%}")
    print("catalogue:           ", summary(found))
    print("leave one model out: ", summary(leave_one_model_out(measured)))


if __name__ == "__main__":
    main()
