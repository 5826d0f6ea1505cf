"""The race's clock: the kinds of work that it samples, and the slowdown that it derives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.race import HERE
from benchmarks.racing import clock
from benchmarks.racing.plans import graph_of
from hap.capture.model_file import load_model_file
from hap.cli.profiling import Settings
from hap.ir.graph import Graph
from hap.profiler.probes import Probe, probes
from hap.profiler.samples import OpRecord, line
from hap.synthesizer.cost.operator_work import ELEMENTS, FLOPS, node_work
from tests.known_device import TRUTH

CPU = torch.device("cpu")


def graph(model: str) -> Graph:
    return graph_of(load_model_file(f"{HERE / 'models' / model}.py:race_tiny"))


def record(probe: Probe, seconds: float) -> OpRecord:
    """Return two measurements each of two ranks, the second twice as slow."""
    return OpRecord(
        name=probe.name, work=probe.work, seconds=((seconds,) * 2, (2 * seconds,) * 2)
    )  # fmt: skip


def written(folder: Path) -> Path:
    """Return the path of a cluster file whose samples have 1 s for a call of every probe."""
    path = folder / "c.yaml"
    samples = Settings(output=str(path)).samples
    samples.write_text("".join(line(record(probe, 1.0)) for probe in probes(CPU)))
    return path


def test_each_kind_of_work_in_a_model_can_be_sampled() -> None:
    kinds = {kind for kind, _ in FLOPS.values()} | set(ELEMENTS.values()) | {"memory"}
    assert kinds <= {probe.work.kind for probe in clock._glances()}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["vgg19", "bert", "wide_mlp"])
def test_parts_are_those_of_the_predicted_step(model: str) -> None:
    of = graph(model)
    found = clock.parts(of, TRUTH)
    assert sum(found.values()) == pytest.approx(1.0)
    works = [node_work(node, of) for node in of.nodes]
    step_s = sum(TRUTH.seconds(work) for work in works)
    for kind, part in found.items():
        mine = sum(TRUTH.seconds(work) for work in works if work.kind == kind)
        assert part == pytest.approx(mine / step_s), kind


def test_the_sampled_kinds_are_those_that_take_time(tmp_path: Path) -> None:
    path, of = written(tmp_path), graph("vgg19")
    told = {probe.name: probe.work.kind for probe in probes(CPU)}
    found = clock.ticks(of, TRUTH, path)
    kinds = [told[tick.name] for tick in found]
    assert len(set(kinds)) == len(kinds)
    assert {"conv", "conv_backward"} <= set(kinds)
    assert set(kinds) == {k for k, part in clock.parts(of, TRUTH).items() if part >= clock._LEAST}
    assert all(tick.seconds == (1.0, 2.0) for tick in found)


def test_a_kind_counts_as_much_as_the_model_spends_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([3.0, 3.0, 3.0])  # a call of three products, then a convolution

    def seconds(call: Callable[[], object], *_: object) -> list[float]:
        call()
        return [next(now)]

    monkeypatch.setattr(clock, "seconds_per_call", seconds)
    product, conv = "linear float32 512x512x512", "conv float32 8x64x16x16"
    told = [
        clock.Tick(name=product, part=0.6, seconds=(9.0, 0.5)),  # rank 1: twice as slow as profiled
        clock.Tick(name=conv, part=0.2, seconds=(9.0, 0.5)),  # six times as slow
    ]
    assert clock.Clock(told, 1).slower() == pytest.approx((0.6 * 2 + 0.2 * 6) / 0.8)


@pytest.mark.parametrize(
    ("looks", "counts"),
    [([1.05], 1.05), ([0.95], 0.95), ([1.4, 1.02, 1.0], 1.02), ([1.4, 1.38, 1.5], 1.4)],
)
def test_a_surprise_is_looked_at_again(looks: list[float], counts: float) -> None:
    left = list(looks)
    assert clock.settled(lambda: left.pop(0)) == counts
    assert left == []
