"""Predict training iterations that were measured on real clusters, with their layouts as given.

    python -m benchmarks.measured_runs [--runs FILE] [--write-docs]

Operators are priced by the cost model on the catalogue's GPUs, collectives on its links, the
pipeline by :mod:`hap.synthesizer.schedule.pipeline_simulator`. The host's time per operator is that of
the measured operators; a stage takes the longer of host and device. No figure is fitted to the runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks.operator_calibration import (
    collective_groups,
    device,
    fit_collectives,
    host_seconds,
    operator_points,
    report,
)
from benchmarks.runs_file import Replica, Run, RunsFile, read_runs
from benchmarks.transformer_operators import DROPOUTS, EMBEDDING, HEAD, LAYER, NORM, Transformer
from hap.cluster.catalogue import catalogue
from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.cluster.work import Work
from hap.synthesizer.cost.collective_cost import NetworkModel
from hap.synthesizer.cost.operator_work import update_work
from hap.synthesizer.schedule.pipeline_simulator import StageSeconds, simulate_pipeline

RUNS = Path(__file__).parent / "data" / "gpu_training_runs.json"
PAGE = Path(__file__).parents[1] / "docs" / "measured-runs.md"
FRAMEWORK_BYTES = 2.5e9
"""The framework's own memory: the middle of the 2 to 3 GB that the file of the runs states."""
INTRODUCTION = """
# Predictions of measured training runs

The 26 iterations of `benchmarks/data/gpu_training_runs.json` ran on 4 to 256 GH200s, with pipeline
stages, tensor and data parallelism. Each layout is priced as given:

- operators by the cost model, with the catalogue's rates at the run's `float32_matmul_precision`;
- all-reduces of tensor parallelism by the cost model, on a link fitted to measured all-reduces of as
  many GPUs;
- the host's time per operator by light measured operators; a stage takes the longer of host and device;
- the 1F1B pipeline by its events; a transfer occupies its sender. As in the published trainer (a
  modified Megatron-DeepSpeed), each GPU sends its part of the activations, and the GPUs of the next
  stage gather the parts;
- the all-reduce of float32 gradients over replicas, that of the tied embedding, and AdamW;
- memory: 16 bytes per parameter, the activations in flight, the head's logits, its new gradient beside
  the stored one, and 2.5 GB of the framework, the middle of what the file states.

No constant is fitted to these iteration times. One part of the model followed a first comparison: the
kernels of a layer that the table of operators lacks (copies of heads, gradients of biases, accumulation
of gradients) were counted afterwards. Without them the mean error was 19.4 %, and the worst 45.8 %.
Sending whole activations, as Megatron does, would give a mean error of 12.9 % by too long transfers.
Dropout is off: with it, the measured growth of the peaks with the microbatch could not be so small.

Written by `python -m benchmarks.measured_runs --write-docs`.
"""
DISCUSSION = """
## What the errors are

- Runs of GPT-Neo-2.7B with microbatches of 4 rows are predicted within 7 %, by two errors that cancel.
- OPT-350M with microbatches of 2 to 8 rows is predicted too fast. The table below tells why: the
  measured time of a microbatch grows with its rows as the device's is predicted to, and has a constant of
  about 2 ms per layer besides, as in the runs of GPT-Neo-2.7B. So neither the size of the heads nor the
  precision of the softmax is missing, which would grow with the rows. The constant is 0.6 to 0.8 of what
  the host is predicted to need for a layer's operators, as if host and device took turns. The predictions
  overlap them, as PyTorch does by default. Launches that block (a setting for debugging) would give such
  a constant; nothing in the data says that they were used, so nothing is added for it.
- In GPT-Neo-2.7B, device times that are predicted too long per row make up for the missing constant.
- With microbatches of 1 row the host bounds the step. Its time per operator is a median over few
  operators on one machine. A single microbatch of GPT-Neo is worst: there the first microbatch's start-up
  counts in full.
- Peaks of small runs are predicted about 2 GB too small: the framework's own memory is nearer to 4.5 GB
  than to the 2 to 3 GB stated, as the peaks of one GPU group over the microbatch's size extrapolate. It
  is not corrected here, because the correction would be fitted to the runs.
- GPT-NEO-N8_D2 is predicted 25 % too large; N16_D4 has the same stages and depth, and peaks 9 GB
  higher. The file does not say why.
- Gradient synchronisation is predicted at the stated link's peak rate, and small or many-replica
  all-reduces reach a half to a fourth of it.

## Time per microbatch over its rows

A line through the measured seconds per microbatch of runs that differ in their rows alone, per layer of
the busiest stage, beside the predicted seconds of its device and of its host:

AFFINE

## The rates and links behind it

Errors of the fit, and of rows that the fit did not see (each model by figures fitted to the other one;
every second size of a collective):
"""
AIMS = {"seconds, mean": 0.08, "seconds, worst": 0.20, "memory, mean": 0.06}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one microbatch on one replica of a stage, and its bytes per GPU.

    Of its two parts, forward and backward, each takes the longer of the device and of the host,
    whose seconds are added up over both.
    """

    forward_s: float
    backward_s: float
    device_s: float
    host_s: float
    layers: int
    parameters: float
    saved_bytes: float
    extra_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """Predicted figures of a run."""

    run: Run
    seconds: float
    gradient_sync_s: float
    peak_bytes: float
    costs: tuple[StageCost, ...]
    """Those of the first replica's stages."""

    @property
    def error(self) -> float:
        return self.seconds / self.run.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        return self.run.peak_bytes and self.peak_bytes / self.run.peak_bytes - 1


@cache
def inside_link(kinds: tuple[str, ...], stated: float, collective: str = "all_reduce") -> Link:
    """Return the link of a collective among GPUs of a machine: measured, else stated, else typical."""
    groups = collective_groups()
    own = groups.get((kinds[0], collective, len(kinds)))
    if len(set(kinds)) == 1 and own and not stated:
        latency, rate = fit_collectives(own)
        return Link(rate, latency)
    links = [catalogue()[kind].link for kind in kinds]
    rate = stated or min(link.bandwidth_bytes_per_s for link in links)
    return Link(rate, max(link.latency_s for link in links))


@cache
def collective_s(count: int, link: Link, nbytes: float, collective: str = "all_reduce") -> float:
    """Return the seconds of a collective over alike links, by the cost model."""
    if count == 1:
        return 0.0
    pattern = next(iter(catalogue().values())).device
    devices = tuple(replace(pattern, name=f"m:{i}", node="m") for i in range(count))
    network = NetworkModel(Cluster(name="ring", devices=devices, intra={"m": link}, inter=link))
    even = np.full(count, 1 / count)
    return network.choices(collective, int(nbytes), even, even)[0].seconds


def stage_cost(file: RunsFile, run: Run, s: int, replica: Replica) -> StageCost:
    """Return the cost of a stage on one replica; its slowest GPU bounds it."""
    kinds, stated = _inside(file, replica)
    model, layers, first, last = _part(run, s, replica)
    operators = model.operators()
    skipped = () if run.dropout else DROPOUTS
    layer = [operators[name] for name in LAYER if name not in skipped]
    layer.append(model.unmeasured())
    if not run.dropout:
        layer += [model.residual()] * 2
    passes = [*layer * layers, *([operators[EMBEDDING]] * first)]
    passes += [operators[NORM], operators[HEAD]] * last
    forward = [work for ahead, _ in passes for work in ahead]
    backward = [work for _, behind in passes for work in behind]
    if run.recompute:
        backward += [work for ahead, _ in layer * layers for work in ahead]
    link = inside_link(kinds, stated)
    reduce_s = collective_s(len(kinds), link, model.boundary_bytes)
    reductions = 2 * layers  # of the forward; as many in the backward
    sides = ((forward, first), (backward, last + run.recompute * reductions))
    elapsed = [
        [
            _elapsed(device(kind), works, (reductions + more) * reduce_s, (reductions + more))
            for works, more in sides
        ]
        for kind in sorted(set(kinds))
    ]
    seconds = [max(max(of_kind[side]) for of_kind in elapsed) for side in (0, 1)]
    device_s, host_s = (
        max(ahead[part] + behind[part] for ahead, behind in elapsed) for part in (0, 1)
    )
    saved = model.saved_bytes(dropout=run.dropout) * layers
    if run.recompute:
        saved = layers * model.boundary_bytes
    parameters = layers * model.layer_parameters + (first or last) * model.embedding_parameters
    parameters += first * model.position_parameters
    # The gradient of the head's weight, until it is added to that of the microbatches before.
    beside = 4 * model.embedding_parameters * (run.microbatches > 1)
    return StageCost(
        forward_s=seconds[0], backward_s=seconds[1], device_s=device_s, host_s=host_s,
        layers=layers, parameters=parameters, saved_bytes=saved,
        extra_bytes=last * (model.head_saved_bytes + beside)
        + run.recompute * model.saved_bytes(dropout=run.dropout),
    )  # fmt: skip


def _part(run: Run, s: int, replica: Replica) -> tuple[Transformer, int, bool, bool]:
    """Return the model on a GPU of the stage, its layers, and whether embedding and head are there."""
    first, last = s == 0, s == len(run.stages) - 1
    sizes = {k: v for k, v in run.model.items() if k != "transformer_layers"}
    products = "float32" if run.float32_matmul_precision == "highest" else "tfloat32"
    model = Transformer(
        **sizes, batch=run.microbatch, products=products, tensor_parallel=replica.tensor_parallel
    )
    return model, run.layers_per_stage[s] - first - last, first, last


def _elapsed(
    gpu: Device, works: list[Work], communication_s: float, collectives: int
) -> tuple[float, float]:
    """Return the seconds of the device, and those of the host, which issues each operator."""
    known = {point.kind for point in operator_points()}
    host_s = host_seconds(gpu.kind) if gpu.kind in known else catalogue()[gpu.kind].device.host_s
    device_s = sum(gpu.seconds(work) for work in works) + communication_s
    return device_s, host_s * (len(works) + collectives)


def predict_run(file: RunsFile, run: Run) -> RunPrediction:
    """Return the predicted seconds, gradient synchronisation and peak bytes of a run."""
    stages = range(len(run.stages))
    costs = [[stage_cost(file, run, s, replica) for replica in run.stages[s]] for s in stages]
    depth = [min(run.microbatches, len(stages) - s) for s in stages]
    ends = []
    for r in range(run.replicas):
        boundaries = [*(_boundary_s(file, run, s, r) for s in stages[:-1]), 0.0]
        seconds = [
            StageSeconds(
                forward_s=costs[s][r].forward_s, backward_s=costs[s][r].backward_s,
                send_s=boundaries[s], return_s=boundaries[s], in_flight=depth[s],
            )
            for s in stages
        ]  # fmt: skip
        ends.append(simulate_pipeline(seconds, run.microbatches, blocking=True).end_s)
    syncs = [_sync_s(file, run, s, costs[s]) for s in stages]
    tied = _tied_s(file, run)
    begun = [max(end[s] for end in ends) for s in stages]
    reduced = [begun[s] + syncs[s] for s in stages]
    if len(run.stages) > 1:
        reduced[0] = reduced[-1] = max(reduced[0], reduced[-1]) + tied
    updates = [max(_update_s(run, s, r, costs[s][r]) for r in range(run.replicas)) for s in stages]
    peaks = [
        FRAMEWORK_BYTES + 16 * cost.parameters + depth[s] * cost.saved_bytes + cost.extra_bytes
        for s in stages
        for cost in costs[s]
    ]
    return RunPrediction(
        run=run, seconds=max(a + b for a, b in zip(reduced, updates, strict=True)),
        gradient_sync_s=max(syncs) + tied, peak_bytes=max(peaks),
        costs=tuple(cost[0] for cost in costs),
    )  # fmt: skip


def _slowest_between(file: RunsFile, kinds: list[set[str]]) -> float:
    """Return the least bytes/s per GPU between consecutive machines of a ring."""
    pairs = zip(kinds, kinds[1:] + kinds[:1], strict=True)
    return min(file.rate(a, b) for one, other in pairs for a in one for b in other)


def _inside(file: RunsFile, replica: Replica) -> tuple[tuple[str, ...], float]:
    """Return a replica's GPUs, and the bytes/s that the file states between them, or 0."""
    kinds = tuple(kind for kind, count in replica.gpus for _ in range(count))
    return kinds, min(file.inside.get(kind, 0.0) for kind in kinds)


def _kinds(replica: Replica) -> set[str]:
    return {kind for kind, _ in replica.gpus}


def _boundary_s(file: RunsFile, run: Run, s: int, r: int) -> float:
    """Return the seconds of a microbatch's activations, whose parts all GPUs of a stage send."""
    here, there = run.stages[s][r], run.stages[s + 1][r]
    rate = min(file.rate(a, b) for a in _kinds(here) for b in _kinds(there))
    nbytes = _part(run, s, here)[0].boundary_bytes
    # Each GPU sends its part to its peer, and the GPUs of the next stage gather the parts.
    kinds, stated = _inside(file, there)
    gather = collective_s(
        len(kinds), inside_link(kinds, stated, "all_gather"), nbytes, "all_gather"
    )
    return nbytes / here.tensor_parallel / rate + gather


def _sync_s(file: RunsFile, run: Run, s: int, costs: list[StageCost]) -> float:
    """Return the seconds of the all-reduce of float32 gradients over a stage's replicas."""
    if run.replicas == 1:
        return 0.0
    rate = _slowest_between(file, [_kinds(replica) for replica in run.stages[s]])
    largest = max(cost.parameters for cost in costs)
    latency = catalogue()[run.stages[s][0].gpus[0][0]].link.latency_s
    return collective_s(run.replicas, Link(rate, latency), 4 * largest)


def _tied_s(file: RunsFile, run: Run) -> float:
    """Return the seconds in which first and last stage add the gradients of the tied embedding."""
    if len(run.stages) == 1:
        return 0.0
    rate = min(file.rate(a, b) for a in _kinds(run.stages[0][0]) for b in _kinds(run.stages[-1][0]))
    model = _part(run, 0, run.stages[0][0])[0]
    latency = catalogue()[run.stages[0][0].gpus[0][0]].link.latency_s
    return collective_s(2, Link(rate, latency), 4 * model.embedding_parameters)


def _update_s(run: Run, s: int, r: int, cost: StageCost) -> float:
    each = update_work("float32", 2)
    work = Work("update", "float32", each.flops * cost.parameters, 4 * each.bytes * cost.parameters)
    return max(device(kind).seconds(work) for kind in _kinds(run.stages[s][r]))


def scores(found: list[RunPrediction]) -> dict[str, float]:
    """Return mean and worst relative errors."""
    seconds = [abs(p.error) for p in found]
    memory = [abs(p.memory_error) for p in found if p.memory_error is not None]
    sync = [
        abs(p.gradient_sync_s / p.run.gradient_sync_s - 1) for p in found if p.run.gradient_sync_s
    ]
    result = {"seconds, mean": mean(seconds), "seconds, worst": max(seconds)}
    if memory:
        result |= {"memory, mean": mean(memory), "memory, worst": max(memory)}
    return result | ({"gradient sync, mean": mean(sync)} if sync else {})


def table(found: list[RunPrediction]) -> list[str]:
    """Return the rows of runs, then the scores, in Markdown."""
    lines = [
        "| run | GPUs | microbatches | measured s | predicted s | error | sync measured, predicted s "
        "| peak measured, predicted GB | error |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for p in found:
        run = p.run
        gpus = sum(n for stage in run.stages for replica in stage for _, n in replica.gpus)
        sync = "-" if run.gradient_sync_s is None else f"{run.gradient_sync_s:.3f}"
        peak = "-" if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.1f}"
        off = "-" if p.memory_error is None else f"{p.memory_error:+.1%}"
        lines.append(
            f"| {run.name} | {gpus} | {run.microbatches} | {run.measured_s:.3f} | {p.seconds:.3f} "
            f"| {p.error:+.1%} | {sync}, {p.gradient_sync_s:.3f} "
            f"| {peak}, {p.peak_bytes / 1e9:.1f} | {off} |"
        )
    lines += ["", "| error | value | aim |", "|---|--:|---|"]
    for name, value in scores(found).items():
        aim = AIMS.get(name)
        said = "" if aim is None else f"{aim:.0%}: {'met' if value <= aim else 'missed'}"
        lines.append(f"| {name} | {value:.1%} | {said} |")
    return lines


def affine(found: list[RunPrediction]) -> list[str]:
    """Return rows of the time per microbatch over its rows, in Markdown.

    Runs of one model in the same stages differ in their microbatches alone. A line through their
    seconds per microbatch has a slope and a constant; the predictions are those of the busiest stage.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[RunPrediction]] = {}
    for p in found:
        groups.setdefault((p.run.model["hidden"], p.run.layers_per_stage), []).append(p)
    lines = [
        "| hidden size | stages | layers | rows | measured ms per row and layer | device, predicted "
        "| measured constant, ms per layer | host, predicted |",
        "|--:|--:|--:|---|--:|--:|--:|--:|",
    ]
    for (hidden, stages), own in groups.items():
        rows = [p.run.microbatch for p in own]
        if len(set(rows)) < 2:
            continue
        largest = max(own, key=lambda p: p.run.microbatch)
        busiest = max(largest.costs, key=lambda cost: cost.device_s)
        layers = busiest.layers
        each = [
            1e3 * (p.run.measured_s - (p.run.gradient_sync_s or 0.0))
            / (p.run.microbatches + len(stages) - 1) / layers for p in own
        ]  # fmt: skip
        slope, constant = np.polyfit(rows, each, 1)
        device_ms = 1e3 * busiest.device_s / layers / largest.run.microbatch
        lines.append(
            f"| {hidden} | {len(stages)} | {layers} | {', '.join(map(str, sorted(set(rows))))} "
            f"| {slope:.2f} | {device_ms:.2f} | {constant:.2f} | {1e3 * busiest.host_s / layers:.2f} |"
        )
    return lines


def document(lines: list[str], more: list[str]) -> str:
    """Return the page about the runs."""
    found: list[str] = []
    report(found.append)
    told = DISCUSSION.strip().replace("AFFINE", "\n".join(more))
    return "\n".join([INTRODUCTION.strip(), "", *lines, "", told, "", "```text", *found, "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="a file of the same format")
    parser.add_argument("--write-docs", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    file = read_runs(options.runs)
    found = [predict_run(file, run) for run in file.runs]
    lines, more = table(found), affine(found)
    print("\n".join([*lines, "", *more]))
    if options.write_docs:
        PAGE.write_text(document(lines, more))


if __name__ == "__main__":
    main()
