"""Baselines: each is the program that its name promises, and no plan is slower than any."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.placement import P, Placement, R, S
from hap.ir.program import Compute, Convert
from hap.ir.regather import backward_alias_of
from hap.synthesizer.axis_roles import batch_axis, expert_weights, tensor_parallel_axes
from hap.synthesizer.baselines import METHODS, baselines, data_parallel
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.hap_paper import PaperCost, best_ratios
from hap.synthesizer.search.program_space import Space
from hap.synthesizer.synthesize import Synthesizer, proportional_shares
from tests.random_plans import benchmark_case, make_case

MODELS = ("mlp", "wide_mlp", "vgg19", "vit", "bert", "gpt2", "llama", "bert_moe")


def cluster(speeds: tuple[float, ...], bandwidth: float, *, launch_s: float = 1e-7) -> Cluster:
    """Return a cluster with a machine per device and links of ``bandwidth`` bytes/s."""
    devices = tuple(
        Device(
            name=f"m{r}:0", kind=f"{speed:g}", node=f"m{r}", memory_bytes=1 << 32,
            flops_per_s={"float32": speed}, memory_bytes_per_s=speed / 10, launch_s=launch_s,
        )
        for r, speed in enumerate(speeds)
    )  # fmt: skip
    link = Link(bandwidth, 1e-6)
    return Cluster("test", devices, {d.node: link for d in devices}, link)


CLUSTERS = {
    "two alike, slow link": cluster((1e11, 1e11), 1e8),
    "two alike, fast link": cluster((1e10, 1e10), 1e11),
    "three unlike": cluster((4e10, 1e10, 1e10), 1e9),
    "four very unlike, fast link": cluster((1e11, 1e9, 3e10, 3e10), 1e12),
    "long launches": cluster((4e12, 1e12, 1e12), 1e10, launch_s=2e-6),
}


def space_of(model: str) -> Space:
    return benchmark_case(model, "tiny").space


@cache
def made(model: str, on: str) -> dict[str, Candidate | str]:
    return baselines(space_of(model), CLUSTERS[on], 2, every=True)


@cache
def candidate(model: str, name: str, on: str = "three unlike") -> Candidate:
    (method,) = (method for method in METHODS if method.name == name)
    return method.plan(space_of(model), CLUSTERS[on], 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, on",
    [
        ("mlp", "two alike, slow link"),
        ("bert_moe", "two alike, fast link"),
        ("vgg19", "three unlike"),
        ("gpt2", "four very unlike, fast link"),
        ("bert", "long launches"),
    ],
)
def test_no_plan_is_slower_than_any_baseline(model: str, on: str) -> None:
    """The plan is also no slower than baselines that are not its candidates."""
    found = [Synthesizer(space_of(model), CLUSTERS[on], 2).best()]
    usual = {method.name for method in METHODS if method.usual}
    found += [c for n, c in made(model, on).items() if n in usual and isinstance(c, Candidate)]
    plan = min(found, key=lambda c: c.objective)
    for name, other in made(model, on).items():
        if isinstance(other, Candidate) and other.fits:
            assert plan.timeline.step_s <= other.timeline.step_s * (1 + 1e-9), name


def stored(found: Candidate, space: Space) -> dict[str, Placement]:
    return {i.target: found.program.inputs[i.tensor] for i in space.graph.role("parameter")}


def kinds(found: Candidate) -> Counter[str]:
    return Counter(c.kind for c in found.program.collectives)


def batch_placements(found: Candidate, space: Space) -> set[Placement]:
    return {found.program.inputs[i.tensor] for i in space.graph.role("input")}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_data_parallel_reduces_every_gradient_and_nothing_large_else(model: str) -> None:
    space, found = space_of(model), candidate(model, "data parallel, even")
    assert set(stored(found, space).values()) == {R}
    assert batch_placements(found, space) == {S(0)}
    assert not kinds(found)["all_to_all"]
    batch = {len(set(units)) for name, units in found.shares.items() if name == "batch"}
    assert batch == {1}, "12 rows on three devices are even"
    reached = {c.tensor for c in found.program.collectives}
    large = [g for g in space.graph.gradients.values() if space.graph.tensors[g].numel > 100]
    ancestors = {g: _made_by_views(space, g) for g in large}
    assert all(reached & names for names in ancestors.values())


def _made_by_views(space: Space, tensor: str) -> set[str]:
    """Return the tensor and its ancestors through operators of one tensor and sums."""
    found, queue = {tensor}, [tensor]
    for name in queue:
        node = space.graph.producer.get(name)
        if node is not None and (len(node.inputs) == 1 or node.op == "aten.add.Tensor"):
            queue += [i for i in node.inputs if i not in found]
            found.update(node.inputs)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_proportional_rows_follow_the_speeds(model: str) -> None:
    found = candidate(model, "data parallel, proportional")
    assert found.shares["batch"] == (8, 2, 2)


def test_zero_stores_shards_gathers_them_and_scatters_their_gradients() -> None:
    space, found = space_of("mlp"), candidate("mlp", "ZeRO-2, proportional")
    assert all(p.sharded for p in stored(found, space).values())
    assert kinds(found)["all_gather"] >= len(space.graph.role("parameter"))
    assert kinds(found)["reduce_scatter"] >= len(space.graph.role("parameter"))
    whole = candidate("mlp", "data parallel, proportional")
    assert found.timeline.stored_bytes.sum() == pytest.approx(
        whole.timeline.stored_bytes.sum() / 3, rel=0.1
    )


def test_stage_3_gathers_again_for_the_backward_and_keeps_less() -> None:
    graph = space_of("llama").graph
    twins = set(backward_alias_of(graph).values())
    found = [candidate("llama", f"ZeRO-{n}, proportional") for n in ("2", "3 (FSDP)")]
    again = [
        {c.tensor for c in x.program.collectives if c.kind == "all_gather"} & twins for x in found
    ]
    assert not again[0]
    assert again[1] == twins
    assert found[1].timeline.communicate_s > found[0].timeline.communicate_s
    assert found[1].timeline.peak_bytes.max() < found[0].timeline.peak_bytes.max()


def test_tensor_parallel_splits_by_columns_and_then_by_rows() -> None:
    space, found = space_of("bert"), candidate("bert", "tensor parallel, even")
    assert batch_placements(found, space) == {R}
    for name, p in stored(found, space).items():
        columns = any(x in name for x in ("query", "key", "value", "intermediate"))
        rows = name.endswith("output.dense.weight")  # of attention and of the FFN
        vocabulary = (
            "word_embeddings" in name or "decoder" in name or name == "cls.predictions.bias"
        )
        assert p == (S(0) if columns or vocabulary else S(1) if rows else R), name
    made = Counter(
        (space.graph.producer[c.tensor].op.split(".")[1], c.backward)
        for c in found.program.collectives
    )
    layers = 2
    # After each row-parallel weight, and around the vocabulary-parallel embedding and loss.
    assert made["linear", False] == 2 * layers
    assert made["embedding", False] == made["cross_entropy", False] == made["sum", False] == 1
    # Before each column-parallel weight; query, key and value share one sum.
    assert made["mm", True] + made["matmul", True] + made["add", True] == 2 * layers


def test_heads_that_do_not_divide_are_split_unevenly() -> None:
    found = candidate("bert", "tensor parallel, even")
    heads = {units for name, units in found.shares.items() if name.endswith("heads")}
    assert heads == {(2, 1, 1)}


@pytest.mark.parametrize("model", MODELS)
def test_tensor_parallel_finds_the_pairs_of_layers(model: str) -> None:
    space = space_of(model)
    axes = tensor_parallel_axes(space)
    assert axes, "every one of these models has a pair"
    assert not any(space.axes.of.get((i.tensor, 0)) in axes for i in space.graph.role("input"))


def test_experts_lie_on_the_ranks_and_their_tokens_travel() -> None:
    space, found = space_of("bert_moe"), candidate("bert_moe", "expert parallel, even")
    experts = {"layers.1.ffn.up", "layers.1.ffn.down"}
    for name, p in stored(found, space).items():
        assert p == (S(0) if name in experts else R), name
    assert batch_placements(found, space) == {S(0)}
    there_and_back = Counter(
        c.backward for c in found.program.collectives if c.kind == "all_to_all"
    )
    assert there_and_back[False] >= 2 and there_and_back[True] >= 2
    gradients = {space.graph.gradients[name] for name in experts}
    assert not gradients & {c.tensor for c in found.program.collectives}


def test_a_method_that_cannot_run_a_model_says_why() -> None:
    assert made("vgg19", "three unlike")["expert parallel, even"] == "the model has no experts"
    assert expert_weights(space_of("vgg19")) == {}


def test_scalars_of_the_batch_do_not_hide_its_rows() -> None:
    class MeanByCount(torch.nn.Linear):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x).pow(2).sum() / count

    space = make_case(MeanByCount(6, 4), (torch.randn(8, 6), torch.tensor(8.0))).space
    assert batch_axis(space) == space.axes.of[space.graph.role("input")[0].tensor, 0]


@pytest.mark.parametrize("model", MODELS)
def test_the_original_has_no_partial_activation_and_one_vector_of_ratios(model: str) -> None:
    space, found = space_of(model), candidate(model, "HAP 2024", "two alike, fast link")
    batch = {tensor for (tensor, _), name in space.axes.of.items() if name == "batch"}
    for step in found.program.instructions:
        if isinstance(step, Compute) and not step.backward:
            node = space.graph.by_name[step.node]
            for out, p in zip(node.outputs, step.outs, strict=True):
                assert p != P or out not in batch
        if isinstance(step, Convert):
            assert not (step.src == R and step.dst == P and not step.backward)
    for units in found.shares.values():
        assert max(units) - min(units) <= 1, "alike devices have alike ratios"


@pytest.mark.parametrize("model", ["mlp", "vgg19", "bert"])
def test_the_originals_ratios_are_the_best_under_its_costs(model: str) -> None:
    """Compare with a fine grid. Two devices are equal, so one number determines all ratios."""
    space, on = space_of(model), cluster((4e8, 1e8, 1e8), 1e9)
    hardware = HardwareModel(on)
    program = (
        Synthesizer(space, on, 2, data_parallel(space))
        .cheapest(proportional_shares(space.axes, hardware.speed))
        .program
    )
    best = PaperCost(
        space.graph, space.axes, hardware, best_ratios(space, program, hardware, hardware.speed)
    ).step_s(program)
    grid = []
    for fast in np.linspace(0.0, 1.0, 201):
        ratios = np.array([fast, (1 - fast) / 2, (1 - fast) / 2])
        grid.append(PaperCost(space.graph, space.axes, hardware, ratios).step_s(program))
    assert best <= min(grid) * (1 + 1e-6)
    assert best >= min(grid) * 0.98
    assert max(grid) > 1.2 * min(grid), "the ratios must matter, or this shows nothing"
