"""The fit recovers known figures, and the cost model predicts layers measured on real GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks import operator_calibration
from benchmarks.calibration import (
    MEMORY_SHARES,
    device,
    errors,
    fitted_block,
    leave_one_model_out,
    points,
    refit,
    summary,
)
from benchmarks.layers import Layer
from benchmarks.operator_calibration import host_seconds, operator_points
from hap.cluster.catalogue import build, catalogue, typical_host_s
from hap.cluster.cluster_file import load_cluster
from hap.cluster.work import Work
from hap.profiler.fit import Timing, fit_device, predict

# Rows that no figures per GPU explain (errors above 25 %). The T4 runs gpt_6.7b in float16 as
# slowly as in float32. The T4 and the L4 slow down during a run, as 70 W cards do when warm. The
# P40 computes float16 on its float32 units, at a rate that depends on the shape. The rows are
# pinned, so that a new one is noticed.
QUIRKS = {
    ("T4", "gpt_6.7b", "float16"),
    ("T4", "llama_tiny", "float16"),
    ("P40", "llama_tiny", "float16"),
    ("L4", "llama_7b", "float32"),
    ("L4", "llama_tiny", "float16"),
    ("L4", "bert_large", "float16"),
}


def test_every_row_of_the_table_is_scored() -> None:
    measured = points()
    assert len(measured) == 2 * 104
    assert all(point.sample.seconds > 0 for point in measured)


def test_the_catalogue_predicts_the_measured_layers() -> None:
    found = errors(points())
    assert median(abs(error) for error, _ in found) <= 0.06
    assert {(p.kind, p.model, p.dtype) for error, p in found if abs(error) > 0.25} == QUIRKS
    for kind in {p.kind for _, p in found}:
        own = [abs(error) for error, p in found if p.kind == kind]
        assert median(own) <= 0.12, f"{kind}: {summary([f for f in found if f[1].kind == kind])}"


@pytest.mark.slow
def test_it_predicts_models_that_it_was_not_fitted_to() -> None:
    found = leave_one_model_out(points())
    assert len(found) == 2 * 104
    assert median(abs(error) for error, _ in found) <= 0.09
    for model in {p.model for _, p in found}:
        assert median(abs(error) for error, p in found if p.model == model) <= 0.12, model


@pytest.mark.slow
def test_the_catalogue_holds_what_the_fit_gives() -> None:
    """The figures in gpus.yaml are reproducible from the table beside them."""
    fitted = refit(points())
    for kind, figures in fitted.items():
        least, most = (part * catalogue()[kind].peak["memory_bandwidth"] for part in MEMORY_SHARES)
        assert least <= figures["memory_bandwidth"] <= most
        known = catalogue()[kind].device
        stored = {**known.flops_per_s, "memory_bandwidth": known.memory_bytes_per_s}
        for figure, value in figures.items():
            assert stored[figure] == pytest.approx(value, rel=2e-3), f"{kind} {figure}"
    assert "V100-16:\n    fitted: {float16: " in fitted_block(fitted)


def test_unmeasured_gpus_reach_the_share_of_their_like() -> None:
    like = catalogue()["GH200"]
    share = like.device.flops_per_s["float16"] / like.peak["float16"]
    found = catalogue()["H200"]
    assert found.device.flops_per_s["bfloat16"] == pytest.approx(share * found.peak["bfloat16"])
    unknown = build("H200", {})
    assert "typical" in unknown.device.source["flops_per_s.float16"]


def test_layers_count_the_textbook_flops() -> None:
    """A step takes 6 flops per parameter and token, in addition to attention."""
    for family, params in (("llama", 4 + 3 * 11008 / 4096), ("gpt", 12), ("bert", 12)):
        ffn = 11008 if family == "llama" else 4 * 4096
        layer = Layer(
            family=family, hidden=4096, ffn=ffn, heads=32, batch=2, seq=512, dtype="float32"
        )
        linear = 2.0 * params * 4096**2 * layer.tokens
        attention = 4.0 * layer.tokens * 512 * 4096
        forward = sum(work.flops for work in layer.forward())
        assert forward == pytest.approx(linear + attention)
        # Fused attention recomputes its scores: 2.5 times the forward instead of twice.
        times = 2.5 if family == "llama" else 2
        backward = sum(work.flops for work in layer.backward())
        assert backward == pytest.approx(2 * linear + times * attention)


# --- the fit -------------------------------------------------------------------------------

TRUTH = replace(
    device("V100-16"),
    flops_per_s={"float32": 9e12, "float16": 50e12},
    memory_bytes_per_s=400e9,
    launch_s=8e-6,
)
WORKS = [
    [Work("matmul", dtype, 2.0 * n**3, 3.0 * n * n * size)]
    for dtype, size in (("float32", 4), ("float16", 2))
    for n in (16, 64, 256, 1024, 4096)
] + [[Work("memory", "float32", 0.0, 4.0 * n)] * 3 for n in (10**3, 10**6, 10**8)]


def test_the_fit_recovers_a_known_device() -> None:
    samples = [Timing(works=works, seconds=predict(TRUTH, works)) for works in WORKS]
    prior = replace(TRUTH, **_tripled())
    found = fit_device(samples, prior=prior, source="measured")
    assert found.flops_per_s == pytest.approx(TRUTH.flops_per_s, rel=0.02)
    assert found.memory_bytes_per_s == pytest.approx(TRUTH.memory_bytes_per_s, rel=0.02)
    assert found.source["flops_per_s.float16"] == "measured"


def test_a_held_figure_keeps_the_prior() -> None:
    samples = [Timing(works=works, seconds=predict(TRUTH, works)) for works in WORKS]
    prior = replace(TRUTH, **_tripled())
    held = ("memory_bytes_per_s",)
    found = fit_device(samples, prior=prior, source="measured", held=held)
    assert found.memory_bytes_per_s == prior.memory_bytes_per_s
    assert found.source.get("memory_bytes_per_s") != "measured"
    assert found.flops_per_s["float32"] == pytest.approx(TRUTH.flops_per_s["float32"], rel=0.2)


def test_one_absurd_sample_does_not_carry_the_fit_away() -> None:
    samples = [Timing(works=works, seconds=predict(TRUTH, works)) for works in WORKS]
    samples[4] = replace(samples[4], seconds=10 * samples[4].seconds)
    found = fit_device(samples, prior=TRUTH, source="measured")
    assert found.flops_per_s["float32"] == pytest.approx(TRUTH.flops_per_s["float32"], rel=0.05)


def test_figures_without_samples_keep_the_prior() -> None:
    samples = [Timing(works=works, seconds=predict(TRUTH, works)) for works in WORKS[3:5]]
    prior = replace(TRUTH, **_tripled())
    found = fit_device(samples, prior=prior, source="measured")
    assert found.flops_per_s["float16"] == prior.flops_per_s["float16"]
    assert found.launch_s == prior.launch_s
    assert found.memory_bytes_per_s == pytest.approx(prior.memory_bytes_per_s)
    changed = {figure for figure in found.source if found.source[figure] == "measured"}
    assert changed == {"flops_per_s.float32"}


@pytest.mark.parametrize("samples", [[], [Timing(works=WORKS[0], seconds=0.0)]])
def test_the_fit_refuses_what_it_cannot_use(samples) -> None:
    with pytest.raises(ValueError, match="positive time"):
        fit_device(samples, prior=TRUTH, source="measured")


def _tripled() -> dict[str, object]:
    return {
        "flops_per_s": {dtype: 3 * rate for dtype, rate in TRUTH.flops_per_s.items()},
        "memory_bytes_per_s": 3 * TRUTH.memory_bytes_per_s,
    }


def test_the_typical_time_of_the_host_is_the_median_of_the_measured_ones() -> None:
    published = [host_seconds(kind) for kind in {point.kind for point in operator_points()}]
    clusters = Path(operator_calibration.__file__).parent / "clusters"
    profiled = [
        load_cluster(str(clusters / f"{name}.yaml")).devices[0].host_s for name in ("h100", "h200")
    ]
    assert len(published) == 6
    assert median([*published, *profiled]) == pytest.approx(typical_host_s(), abs=1e-6)
