"""The race: its arithmetic on made-up cells, its files, and contenders that fail."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import race
from benchmarks.ablation import (
    SCHEDULED,
    SEARCHED,
    WHOLE,
    Variant,
    raced,
    shown,
    synthesizer_of,
    variants,
)
from benchmarks.contenders import EVEN, OURS, PROPORTIONAL
from benchmarks.contenders.base import size_of
from benchmarks.race import HERE
from benchmarks.racing import document, floors, results, tables
from benchmarks.racing.agenda import AGENDA, CLUSTERS, MODELS, REPEATED, RUNS, chosen
from benchmarks.racing.cell import Said, Task, sits_out
from benchmarks.racing.clock import Tick
from benchmarks.racing.memory import traced
from benchmarks.racing.results import Cell, Entry, judge_losses, judge_memory
from benchmarks.racing.run import reference, run_cell
from benchmarks.racing.summary import (
    PLAN,
    best_by_hand,
    distance,
    geometric_mean,
    rank_correlation,
    ratio,
    steady_errors,
    summary,
)
from hap.capture.model_file import load_model_file
from hap.capture.tracing import capture
from hap.cluster.cluster_file import load_cluster
from hap.profiler.probes import product_probe
from hap.runtime.launch import spawn
from hap.runtime.testbed import Testbed
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.synthesize import Synthesizer


def cell(model: str, unlike: bool, **medians: float) -> Cell:
    """Return a cell of contenders (``_`` for ``-``), with rounds below and above each median."""
    entries = [
        Entry(name=name.replace("_", "-"), seconds=[m * 0.9, m, m * 1.2])
        for name, m in medians.items()
    ]
    return Cell(
        model=model, cluster="some", unlike=unlike, reference=[], entries=entries,
        arithmetic_s=0.5,
    )  # fmt: skip


def figures(cells: list[Cell]) -> dict[str, float]:
    return {figure.name: figure.value for figure in summary(cells)}


def test_ratios_are_within_a_round() -> None:
    ours = Entry(name=OURS, seconds=[1.0, 10.0, 1.0])
    other = Entry(name=EVEN, seconds=[2.0, 20.0, 30.0])
    assert ratio(other, ours) == 2.0  # the ratio of the medians is 20


def test_the_best_by_hand_is_no_plan_and_not_void() -> None:
    found = cell("m", True, ours=1.0, ddp_even=3.0, hap_paper=1.5, zero=2.0)
    found.entries[-1].void = "loss"
    found.entries.append(Entry(name=f"{PLAN}ZeRO-2", seconds=[0.1]))
    best = best_by_hand(found)
    assert best is not None
    assert best.name == EVEN


def test_summary_of_known_cells() -> None:
    cells = [
        cell("a", True, ours=1.0, ddp_even=4.0, ddp_proportional=2.0, hap_paper=1.5),
        cell("b", True, ours=1.0, ddp_even=2.0, ddp_proportional=8.0, hap_paper=6.0),
        cell("c", False, ours=2.0, ddp_even=1.9, hap_paper=100.0),
    ]
    got = figures(cells)
    assert got["over the best by hand, unlike clusters, geometric mean"] == pytest.approx(2.0)
    assert got["over the best by hand, unlike clusters, worst cell"] == pytest.approx(2.0)
    assert got["over the best by hand, equal devices, geometric mean"] == pytest.approx(0.95)
    assert got["over hap-paper, unlike clusters, geometric mean"] == pytest.approx(3.0)
    assert got["unlike cells at 2.41x over equal-share DDP or more"] == 0.5
    assert got["measured over the limit, median"] == pytest.approx(2.0)
    met = {figure.name: figure.met for figure in summary(cells)}
    assert met["over the best by hand, unlike clusters, geometric mean"]
    assert not met["over the best by hand, equal devices, geometric mean"]


def test_only_the_first_run_counts_for_speed() -> None:
    first, second = cell("a", True, ours=1.0, ddp_even=2.0), cell("a", True, ours=1.0, ddp_even=9.0)
    second.run = 2
    got = figures([first, second])
    assert got["over the best by hand, unlike clusters, geometric mean"] == pytest.approx(2.0)


def test_rounded_gradients_and_stages_have_figures_of_their_own() -> None:
    medians = {
        "ours": 1.0,
        "ddp_even": 2.0,
        "ours_bf16": 0.5,
        "ddp_fastest_bf16": 0.6,
        "ours_stages": 0.8,
    }
    one = cell("a", True, **medians)
    one.cluster = "paper"
    got = figures([one])
    assert got["over the best by hand, unlike clusters, geometric mean"] == pytest.approx(2.0)
    assert got["with stages, over without, slow links, geometric mean"] == pytest.approx(1.25)
    halves = "gradients in bfloat16, over the best DDP with its hook, geometric mean"
    assert got[halves] == pytest.approx(1.2)


def test_the_agenda_has_no_slot_twice_and_every_repeated_one_first() -> None:
    assert len(set(AGENDA)) == len(AGENDA)
    for slot in REPEATED:
        runs = [AGENDA.index(slot._replace(run=run)) for run in range(1, RUNS + 1)]
        assert runs == sorted(runs)
    assert {slot.cluster for slot in AGENDA} == set(CLUSTERS)
    assert {slot.model for slot in AGENDA} == set(MODELS)
    assert all(slot in chosen(("vit",), None) for slot in AGENDA if slot.model == "vit")
    assert {slot.model for slot in chosen(("vit",), None)} == {"vit"}


def test_predictions() -> None:
    one = cell("a", True, ours=1.0, hap_paper=2.0, ddp_even=3.0)
    for entry, predicted, peak in zip(one.entries, (0.9, 2.4, 0.0), (90, 220, 0), strict=True):
        entry.predicted_s = predicted
        entry.predicted_bytes = [10, peak] if peak else []
        entry.peak_bytes = [1000, 100 if entry.name == OURS else 200]
    got = figures([one])
    assert got["predicted step, median error"] == pytest.approx(0.15)
    assert got["predicted step, worst error"] == pytest.approx(0.2)
    assert got["predicted peak memory, median error"] == pytest.approx(0.1)  # of the fullest rank
    assert got["rank correlation of predicted and measured"] == 1.0


def test_devices_that_were_held_were_as_fast_as_profiled() -> None:
    one = cell("a", True, ours=1.0)
    own = one.entry(OURS)
    assert own is not None
    own.predicted_s = 0.8
    assert steady_errors(one) == pytest.approx({OURS: -0.2})
    one.drift = [1.25, 1.0, 1.3]
    assert steady_errors(one) == pytest.approx({OURS: 0.0})
    one.pace = [1.25, 1.0, 1.0]
    assert steady_errors(one) == pytest.approx({OURS: -0.2})


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    assert rank_correlation([1, 2, 2, 3], [1, 5, 5, 9]) == pytest.approx(1.0)
    assert math.isnan(rank_correlation([1], [1]))
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_a_cell_without_ours_counts_for_nothing() -> None:
    found = cell("a", True, ddp_even=3.0)
    assert summary([found]) == []
    assert distance(found) is None
    assert "void" not in tables.cell_text(found)


@pytest.mark.parametrize(
    ("losses", "void"),
    [
        ([2.0, 1.0001], False),
        ([2.0, 1.01], True),
        ([2.0, math.nan], True),
        ([2.0], False),  # fewer steps taken
    ],
)
def test_other_losses_make_an_entry_void(losses: list[float], void: bool) -> None:
    entry = Entry(name=EVEN, losses=losses)
    judge_losses(entry, [2.0, 1.0, 0.5], tolerance=1e-3)
    assert bool(entry.void) == void


def test_too_much_memory_makes_an_entry_void() -> None:
    entry = Entry(name=EVEN, peak_bytes=[5 << 20, 9 << 20])
    judge_memory(entry, [5 << 20, 9 << 20], ["a", "b"])
    assert not entry.void
    judge_memory(entry, [5 << 20, 8 << 20], ["a", "b"])
    assert entry.void == "out of memory: 9 of 8 MiB on b"


def reduces_and_forgets() -> int:
    """Return the peak after many tensors were reduced and released."""
    with traced() as trace:
        for _ in range(40):
            dist.all_reduce(torch.ones(1 << 18))
        trace.mark()
        torch.ones(4)
    return trace.peak_bytes


@pytest.mark.gloo
def test_tensors_released_last_by_a_gloo_thread_are_not_counted() -> None:
    assert all(peak < 1000 for peak in spawn(reduces_and_forgets, 2, timeout_s=100))


def test_lines_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert results.read(path) == []
    first, second = cell("a", True, ours=1.0), cell("b", False, ours=2.0, ddp_even=3.0)
    again = cell("a", True, ours=5.0)
    again.run = 2
    for each in (first, second, again):
        results.append(path, each)
    assert results.read(path) == [first, second, again]
    results.append(path, again)
    with pytest.raises(ValueError, match="two cells of one slot"):
        results.read(path)


@pytest.mark.slow
def test_tables_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one = cell("a", True, ours=1.0, ddp_even=4.0)
    one.entries.append(Entry(name="horovod", void="does not build"))
    tables.write(tmp_path, [one, cell("b", True, ours=1.0)])
    text = (tmp_path / "race.md").read_text()
    assert "| ddp-even | 4 s |" in text
    assert "| horovod | void |" in text
    assert (tmp_path / "race.png").stat().st_size > 1000
    assert (tmp_path / "race.json").exists()


@pytest.mark.parametrize(
    "given", ["", "--rounds 3 --budget 60", "--quick", "--sit-out 2.5 --size tiny --trust-cluster"]
)
def test_a_cell_says_the_options_that_change_it(given: str) -> None:
    assert race._options([*given.split(), "--resume", "--models", "bert"]).said == given


def test_the_page_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, other = cell("a", True, ours=1.0, ddp_even=4.0), cell("b", True, ours=1.0)
    one.entries += [Entry(name="horovod", void="does not build"), Entry(name="zero", void="lost")]
    one.drift, one.pace = [1.0, 1.2, 1.1], [1.0, 1.0, 1.1]
    one.options, one.code = "--rounds 3 --budget 60", "5eed123"
    other.options, other.code = one.options, one.code
    third = cell("a", True, ours=1.1, ddp_even=4.0)
    third.options, third.code, third.run = one.options, one.code, 2
    own = one.entry(OURS)
    assert own is not None
    own.predicted_s, own.predicted_bytes, own.peak_bytes = 0.9, [0, 30], [10, 20]
    own.note = "without slow:0; all devices: predicted 1.64x"
    own_again = third.entry(OURS)
    assert own_again is not None
    own_again.predicted_s = 0.99
    document.write(tmp_path, [one, other, third])
    text = (tmp_path / document.PAGE).read_text()
    assert "| ours | 1 s | 1 s |" in text
    assert "| ddp-even | 4 s, 4.00x | void |" in text
    assert "- zero for a is void: lost" in text and "horovod" not in text
    assert (
        f"| a on some | ours | 900 ms | 1 s | -10.0% | +50.0% | 1.10, 1.00 | {own.note} |" in text
    )
    assert "| `some` | 2 | 10.0% | 10.0% | 5eed123 |" in text
    assert "| a on some | 1 s, 1.1 s | 4.00x, 3.64x | 10.0% | -10.0%, -10.0% |" in text
    assert "| a on some | slow:0 | 1.64x |" in text
    assert "python -m benchmarks.race --rounds 3 --budget 60\n" in text
    assert (tmp_path / document.PLOT).stat().st_size > 1000


@pytest.mark.parametrize("codes", [("5eed123", "beef456"), ("5eed123+",), ("",)])
def test_a_page_of_several_commits_or_of_changed_code_is_refused(
    tmp_path: Path, codes: tuple[str, ...]
) -> None:
    cells = [cell(f"m{k}", True, ours=1.0, ddp_even=2.0) for k in range(len(codes))]
    for one, code in zip(cells, codes, strict=True):
        one.code = code
    with pytest.raises(ValueError, match="raced by"):
        document.write(tmp_path, cells)


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_race_needs_one_core(name: str) -> None:
    cluster = load_cluster(HERE / "clusters" / f"race_{name}.yaml")
    total = sum(device.rate("matmul", "float32") for device in cluster.devices)
    assert total <= 100e9 * (1 + 1e-9)
    assert cluster.world_size == 4


TWO = load_cluster("""
links: {between: 1 Gbit/s}
nodes:
  - {name: one, count: 2, gpus: 1, type: cpu, memory: 2 GiB, flops: 40 GFLOP/s}
""")

FAILS_ON_ONE_RANK = """
import os
import torch
from benchmarks.models.mlp import loss, tiny as model, tiny_batch as batch

def optimizer(params):
    if os.environ["RANK"] == "1":
        raise ValueError("only here")
    return torch.optim.SGD(params, lr=0.1)
"""


def task(spec: str, *names: str, rounds: int = 2, patience_s: float = 60.0) -> Task:
    return Task(
        file=load_model_file(spec), names=names, plans={"broken": Path("no-such-plan.json")},
        speeds=(1.0, 1.0), devices=("one-0:0", "one-1:0"), rounds=rounds, warm_up=1, least=1,
        budget_s=60.0, patience_s=patience_s,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.gloo
def test_a_contender_that_fails_everywhere_is_dropped() -> None:
    spec = f"{HERE / 'models' / 'wide_mlp'}.py:race_tiny"
    told: list[Said] = []
    with Testbed(TWO, links="unlimited") as bed:
        broken, good = run_cell(bed, asked := task(spec, "broken", PROPORTIONAL), told.append)
    assert "no such plan file" in broken.void
    assert not broken.counts
    assert good.counts
    assert len(good.seconds) == 2
    assert good.losses == pytest.approx(reference(asked.file, asked.steps), rel=1e-5)
    assert all(peak > 0 for peak in good.peak_bytes)
    assert sum(said.what == "built" for said in told) == 1


def test_contenders_far_behind_in_every_round_sit_out() -> None:
    rounds = [{"a": 1.0, "b": 5.0, "c": 9.0}, {"a": 2.0, "b": 7.0, "c": 9.0}]
    assert sits_out(rounds, 4.0) == {"c"}
    assert sits_out([*rounds, {"a": 1.0, "b": 9.0}], 4.0) == {"c"}
    assert sits_out(rounds, math.inf) == set()


@pytest.mark.slow
@pytest.mark.gloo
def test_a_contender_that_sits_out_takes_the_warm_up_alone() -> None:
    spec = f"{HERE / 'models' / 'wide_mlp'}.py:race_tiny"
    with Testbed(TWO, links="unlimited") as bed:
        entries = run_cell(bed, replace(task(spec, EVEN, PROPORTIONAL, rounds=3), sit_out=0.0))
    assert [(len(entry.warm_up), len(entry.seconds)) for entry in entries] == [(1, 0), (1, 0)]
    assert tables.missing(entries[0]).startswith("sat out after ")


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_are_held_at_the_speed_of_their_profile() -> None:
    spec = f"{HERE / 'models' / 'wide_mlp'}.py:race_tiny"
    told: list[Said] = []
    with Testbed(TWO, 0.5, links="unlimited") as bed:
        name = product_probe(torch.device("cpu")).name
        once = Tick(name=name, part=1.0, seconds=(1e-9, 1e-9))  # profiled as instantaneous
        slow = replace(task(spec, EVEN, rounds=1), ticks=(once,))
        run_cell(bed, slow, told.append)
        assert bed._quotas is not None
        assert bed.pace > 1 or not bed._quotas.enforced
    looks = [said for said in told if said.what == "looked"]
    assert [said.counted for said in looks] == [False, True]
    assert all(said.slower > 1e3 for said in looks)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_contender_that_fails_on_one_rank_ends_the_ranks_not_the_race(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FAILS_ON_ONE_RANK)
    with Testbed(TWO, links="unlimited") as bed:
        (entry,) = run_cell(bed, task(str(path), EVEN, patience_s=3.0))
    assert entry.void.startswith("rank 1: ")
    assert "only here" in entry.void


@pytest.mark.slow
def test_no_part_of_a_cluster_is_faster_than_the_floor() -> None:
    file = load_model_file(f"{HERE / 'models' / 'wide_mlp'}.py:race_tiny")
    graph = capture(file.model(), file.batch(), file.loss)
    written = load_cluster(HERE / "clusters" / "race_straggler.yaml")
    space, floor_s = build_space(graph), floors.bound_s(graph, written, 2)
    assert floor_s > 0
    parts = [written.keep(ranks) for size in (1, 2, 3, 4) for ranks in combinations(range(4), size)]
    unlike = {tuple(replace(d, name="", node="") for d in p.devices): p for p in parts}
    assert len(unlike) < len(parts), "parts of equal devices have equal plans"
    found = [Synthesizer(space, part, 2).best().timeline.step_s for part in unlike.values()]
    assert floor_s <= min(found) * (1 + 1e-9)
    assert floor_s < Synthesizer(space, written, 2).relaxed.bound_s  # of all devices together
    assert floors.arithmetic_s(graph, written) < min(
        floors.arithmetic_s(graph, part) for part in parts[:-1]
    )


def test_every_model_has_its_size() -> None:
    for name in MODELS:
        once, four = (
            load_model_file(f"{HERE / 'models' / name}.py:race{rows}").batch()
            for rows in ("", "_x4")
        )
        assert size_of(four) == 4 * size_of(once)


@pytest.mark.slow
def test_ablations_are_no_faster_than_the_planner() -> None:
    spec = f"{HERE}/models/wide_mlp.py:tiny"
    found = variants(synthesizer_of(spec, load_cluster(HERE / "clusters" / "demo4.yaml")))
    assert set(found) == {WHOLE, *SEARCHED, *SCHEDULED}
    best = found[WHOLE]
    assert isinstance(best, Variant)
    for name in ("even shares", "the batch split alone", "nothing overlapped", "one bucket"):
        value = found[name]
        assert isinstance(value, Variant) and value.step_s >= best.step_s * (1 - 1e-9), name


@pytest.mark.slow
@pytest.mark.gloo
def test_ablations_have_the_losses_of_one_device() -> None:
    """All variants run, and their losses are those of one device."""
    spec = f"{HERE}/models/wide_mlp.py:race_tiny"
    with Testbed(TWO, links="unlimited") as bed:
        synthesizer = synthesizer_of(spec, bed.cluster)
        found = variants(synthesizer)
        entries = raced(bed, spec, synthesizer, found, rounds=1)
    assert set(entries) == {row for row, variant in found.items() if isinstance(variant, Variant)}
    assert {row: entry.void for row, entry in entries.items() if not entry.counts} == {}
    assert "x, " in shown("one bucket", found, entries)
