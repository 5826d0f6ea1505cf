"""Architectures of benchmarks.zoo: captured, and equal to one device under random plans.

``python -m benchmarks.coverage`` checks more: all of them, all world sizes, and the full sizes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import hap
from benchmarks import coverage
from benchmarks.coverage import by_chance, case_of, entries, plan, unlike, verify
from benchmarks.coverage_document import document
from benchmarks.coverage_results import figures
from benchmarks.zoo import Entry, native, optional
from benchmarks.zoo.optional import missing
from hap.ir.placement import P, R
from hap.runtime.values import set_apart
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.planner import choose
from hap.synthesizer.search import bucket_elimination, engines
from hap.synthesizer.search.program_space import NARROW, SHARED, build_space
from tests.random_plans import Case, make_case, random_plan, two_machines, verdict

PACKAGES = ("torchvision", "timm")
"""Families of the zoo whose package is optional."""

FAST = ("qwen2", "dlrm", "timm/vit_tiny_patch16_224", "torchvision/VisionTransformer")
ALIKE = (
    "bart", "beit", "bert", "bert-moe", "blip-2", "bloom", "deit", "distilbert", "electra", "falcon", "fnet", "gemma",
    "gemma3", "gpt-neox", "gpt-oss", "gpt2", "hubert", "internvl", "llama", "llava", "mistral", "mixtral",
    "paligemma", "qwen2-moe", "qwen2-vl", "qwen2.5-vl", "qwen3-moe",
    "nn.GRU", "nn.LSTM", "nn.Transformer", "nn.TransformerDecoder", "nn.TransformerEncoder",
    "opt", "phi", "plain-gpt", "roberta", "t5", "vit", "wav2vec2",
)  # fmt: skip
"""Built as others here are, or as the models of other tests."""
SHARED_LAYERS = "albert"
"""Its weights are those of :class:`Shared`."""

SLOW = [
    name for name, entry in entries().items()
    if entry.family not in PACKAGES and name not in (*FAST, *ALIKE, SHARED_LAYERS)
]  # fmt: skip
SAMPLE = ("timm/convnext_atto", "timm/cait_xxs24_224", "timm/test_efficientnet")
"""``python -m benchmarks.coverage`` runs all of them."""

ONE_LAYER = {"num_hidden_layers": 1}
SEEING = {"text_config": ONE_LAYER, "vision_config": {"depth": 1}}
SMALLER: dict[str, dict[str, Any]] = {
    "clip": {"text_config": ONE_LAYER, "vision_config": ONE_LAYER},
    "convnext": {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2},
    "deberta-v2": ONE_LAYER,
    "deepseek-v3": ONE_LAYER | {"first_k_dense_replace": 0},
    "glm-4v": SEEING,
    "llama4": ONE_LAYER,
    "mamba": ONE_LAYER,
    "qwen2": ONE_LAYER,
    "qwen3-vl": SEEING,
    "resnet": {"depths": [1, 1]},
    "segformer": {
        "num_encoder_blocks": 2, "hidden_sizes": [8, 16], "depths": [1, 1], "sr_ratios": [4, 1],
        "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [4, 4],
    },
    "swin": {"depths": [2, 1]},
    "wav2vec2-ctc": ONE_LAYER,
    "whisper": {"encoder_layers": 1, "decoder_layers": 1},
}  # fmt: skip
"""Fewer layers, with all that an architecture brings: what the configuration sets instead."""


def merged(options: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the others in place of them, also inside of parts."""
    inside = {
        key: merged(options[key], value)
        for key, value in other.items() if isinstance(value, dict)
    }  # fmt: skip
    return options | other | inside


def configured(entry: Entry, options: dict[str, Any]) -> Entry:
    """Return an architecture whose tiny size has these options of its configuration."""
    build, (given, rows) = entry.tiny.func, entry.tiny.args  # type: ignore[attr-defined]
    return dataclasses.replace(entry, tiny=partial(build, merged(given, options), rows))


def smaller(entry: Entry) -> Entry:
    """Return an architecture with fewer layers, if :data:`SMALLER` names it."""
    return configured(entry, SMALLER[entry.name]) if entry.name in SMALLER else entry


@cache
def case_named(name: str) -> Case:
    case: Case = case_of(smaller(entries()[name]))
    return case


def check(name: str) -> None:
    if reason := missing(entries()[name].requires):
        pytest.skip(reason)
    case = case_named(name)
    world = 2 + sum(map(ord, name)) % 4
    seen = verdict(case, by_chance(case, world))
    assert seen.ok, (world, seen.first_bad)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_random_plan_computes_what_one_device_does(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SLOW, *SAMPLE])
def test_every_architecture_computes_what_one_device_does(name: str) -> None:
    check(name)


def test_what_other_tests_cover_is_named_as_in_the_zoo() -> None:
    assert {*ALIKE, SHARED_LAYERS, *SMALLER} <= set(entries())


def test_names_are_unique_and_the_families_are_all_there() -> None:
    families = Counter(entry.family for entry in entries().values())
    assert len(entries()) == families.total() >= 150
    assert set(families) >= {
        "encoder", "decoder", "encoder-decoder", "shared layers", "vision", "audio", "contrastive", "image and text",
        "mixture of experts", "torch", *PACKAGES,
    }  # fmt: skip


class Sizes(nn.Module):
    """A masked language model whose sizes 8 does not divide: 12 heads, a large vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, 24)
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        q, k, v = (
            layer(x).unflatten(-1, (12, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        logits = x @ self.words.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), text.flatten())


@pytest.mark.slow
def test_sizes_need_not_divide() -> None:
    """8 ranks share 12 heads, a large vocabulary and a batch of 3 rows."""
    words = 50265
    torch.manual_seed(0)
    case = make_case(Sizes(words), torch.randint(words, (3, 5)))
    assert {axis.units for axis in case.space.axes.axes.values()} >= {words, 12, 3}
    plan = by_chance(case, 8)
    assert verdict(case, plan).ok
    made = hap.plan(
        case.model,
        case.batch,
        two_machines(8),
        options=PlanOptions(allow_idle=True, all_devices=True),
    )
    assert verdict(case, made).ok


class Shared(nn.Module):
    """One layer applied repeatedly, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(SHARED + 1):
            x = torch.tanh(self.layer(x))
        return self.last(x).square().mean()


@pytest.mark.slow
def test_a_weight_that_many_layers_share_need_not_tie_them() -> None:
    torch.manual_seed(0)
    case = make_case(Shared(), torch.randn(5, 6))
    free, narrower = (build_space(case.graph, narrow=k).holdings for k in (0, 1))
    parameters = {i.target: i.tensor for i in case.graph.role("parameter")}
    assert len(free[parameters["layer.weight"]]) > 1
    assert narrower[parameters["layer.weight"]] == ((R,),)
    assert narrower[parameters["last.weight"]] == free[parameters["last.weight"]]
    total = case.graph.gradients["layer.weight"]
    sums = {t for t in narrower if narrower[t] == ((P,),) and len(free[t]) > 1}
    assert len(sums) == 2 * (SHARED - 1), "of weight and bias, all sums but the whole one"
    assert total not in sums
    narrow = case.within(build_space(case.graph, narrow=1))
    for world in (2, 3):
        assert verdict(narrow, by_chance(narrow, world)).ok
    for cluster in (two_machines(4), two_machines(2)):
        made = choose(narrow.space, cluster, 2, PlanOptions(compare=True))
        assert made.pair.fits


class Positions(nn.Module):
    """Rows times a table of five positions, whose axis is of no parameter and not of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(6, 4), nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) @ self.table(torch.arange(5)).t()).square().mean()


@pytest.mark.slow
def test_a_graph_that_is_too_entangled_is_searched_in_a_narrower_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_named("graph")
    whole, shared, inner, batch = (
        set(build_space(case.graph, narrow=k).axes.axes) for k in range(len(NARROW))
    )
    assert whole == shared >= inner > batch
    assert {axis.units for axis in build_space(case.graph, narrow=3).axes.axes.values()} == {6}
    table = make_case(Positions(), torch.randn(3, 6)).graph
    shared, inner = (build_space(table, narrow=k).axes.axes for k in (1, 2))
    assert shared.keys() > inner.keys()
    assert [axis.units for name, axis in shared.items() if name not in inner] == [5]
    monkeypatch.setattr(bucket_elimination, "LARGEST_TABLE", 2_000)
    monkeypatch.setattr(engines, "SMALL", 0)  # no A* before the narrower spaces
    said: list[str] = []
    made = hap.plan(case.model, case.batch, two_machines(2), progress=said.append)
    assert any("too entangled" in text for text in said)
    assert verdict(case, made).ok


@pytest.mark.slow
def test_rows_that_the_data_choose_are_written_back() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k, expert in enumerate(self.experts):
                chosen = torch.nonzero(x[:, 0] > k).flatten()
                x = x.index_add(0, chosen, expert(x[chosen]))
            return x.sum()

    case = make_case(Experts(), torch.randn(6, 4))
    assert verdict(case, random_plan(case, 3, 0)).ok


def test_results_become_a_table() -> None:
    results = {
        "bert": {
            "verify": {"ok": True, "error": 3e-14, "nodes": 9, "operators": ["aten.mm.default"]},
            "plan": {"ok": True, "nodes": 900, "parameters": 109_500_000, "wall_s": 12.4,
                     "cpu_s": 11.0, "operators": ["aten.mm.default", "aten.exp.default"]},
        },
        "t5": {"verify": {"ok": False, "reason": "t5.py:7: no rule"}},
    }  # fmt: skip
    text = document(results)
    assert "1 verified, 1 planned, 1 of them within 60 s; 2 operators" in text
    assert (
        "| bert | absolute positions, tied vocabulary | 3e-14 | 109.5 M | 900 | 12 s (11) |" in text
    )
    assert "- t5, verify: t5.py:7: no rule" in text
    assert all(f"| {name} |" in text for name in entries())


def test_the_summary_counts_against_the_targets() -> None:
    planned = {"ok": True, "nodes": 9, "cpu_s": 5.0, "operators": []}
    results = {
        "bert": {"plan": planned | {"parameters": 10**8, "wall_s": 61.0}},
        "timm/test_vit": {
            "verify": {"ok": True, "error": 1e-15, "operators": []},
            "plan": planned | {"parameters": 10**5, "wall_s": 11.0},
        },
        "graph": {"plan": planned | {"parameters": 10**5, "wall_s": 9.0}},
    }  # fmt: skip
    seen = {figure.name: figure for figure in figures(results)}
    assert seen["seconds of planning, median"][1:] == ("11.0 (5.0)", "at most 15", True)
    assert seen["seconds of planning, maximum"][1:] == ("61 (5)", "at most 60", False)
    assert seen["planned in more than 60 s"].seen == "1 of 3"
    assert seen["planned in more than 10 s, below 1 million parameters"].seen == "1 of 2"
    assert seen["written by others, verified and planned"].seen.startswith("1 of ")
    text = document(results)
    assert "| seconds of planning, median | 11.0 (5.0) | at most 15: met |" in text
    assert "bert (61 s)." in text


def test_architectures_of_packages_that_are_not_installed_are_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optional, "find_spec", lambda name: None if name == "timm" else object())
    names = ["graph", "timm/test_vit", "torchvision/resnet18", "timm/resnet18"]
    assert coverage._built_here(names) == ["graph", "torchvision/resnet18"]
    said = capsys.readouterr().out
    assert "SKIPPED 2 architectures, the package timm is not installed" in said
    assert "pip install -e '.[zoo]': timm/test_vit timm/resnet18" in said


def test_an_unknown_architecture_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["coverage", "--only", "timm/nothing"])
    with pytest.raises(SystemExit):
        coverage.main()
    assert "no such architecture: timm/nothing" in capsys.readouterr().err


def test_operators_that_this_build_lacks_do_not_stop_an_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register = torch.library.register_fake

    def imported(name: str) -> ModuleType:
        torch.library.register_fake("hap_lacks::operator")(lambda x: x)
        return ModuleType(name)

    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    monkeypatch.setattr(optional, "import_module", imported)
    with pytest.raises(RuntimeError, match="does not exist"):
        imported("one")
    assert optional.package.__wrapped__("one").__name__ == "one"
    assert torch.library.register_fake is register


def test_an_unlike_cluster_has_two_kinds() -> None:
    import random

    for world in range(2, 6):
        cluster = unlike(world, random.Random(world))
        assert cluster.world_size == world
        assert len(cluster.types()) == 2


@pytest.mark.slow
def test_stages_report_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    built = partial(native.graphs, 10, 24, 1, 7, 6, 9)
    small = dataclasses.replace(entries()["graph"], full=built, tiny=built)
    monkeypatch.setattr(coverage, "entries", lambda: {"graph": small})
    monkeypatch.setattr(coverage, "WORLDS", (2,))
    found = verify("graph")
    assert found["ok"] and found["plans"] == 2 and found["error"] < 1e-9
    monkeypatch.setattr(coverage, "CLUSTER", two_machines(2))
    found = plan("graph")
    assert found["ok"] and found["parameters"] > 0 and found["step_s"] > 0


def test_values_and_helpers_get_distinct_names() -> None:
    """A value named ``full`` and the helper ``torch.full`` get distinct names."""
    code = fx.Graph()
    helper = code.call_function(torch.full, ([3], 0))
    value = code.call_function(torch.exp, (helper,))
    value.name, value.meta["value"] = helper.name, "full"
    code.output(value)
    with pytest.raises(RuntimeError, match="redefined"):
        code.lint()
    set_apart(code)
    code.lint()
    assert value.name == "full" and helper.name == "full_0"
