"""Aliases of parameters for the backward, and random plans that gather them again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hap.capture.tracing import capture
from hap.ir.program import Convert
from hap.ir.regather import ALIAS, backward_alias_of
from hap.synthesizer.shares.storage_sharding import STORED
from tests.random_plans import benchmark_case, random_plan, verdict


@pytest.mark.slow
def test_the_backward_reads_large_parameters_through_aliases() -> None:
    for file in "bert_moe", "gpt2", "vgg19":
        graph = benchmark_case(file, "tiny").graph
        large = {
            i.tensor for i in graph.role("parameter") if len(graph.tensors[i.tensor].shape) > 1
        }
        aliases = backward_alias_of(graph)
        assert aliases and set(aliases) <= large
        for node in graph.nodes:
            if node.op == ALIAS:
                assert node.name in graph.backward
            elif node.name in graph.backward:
                assert not large.intersection(node.inputs)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 3, 5))
        self.down = nn.Parameter(torch.randn(4, 2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.bmm(x, self.up.permute(0, 2, 1))
        loss: torch.Tensor = torch.bmm(y, self.down.permute(0, 2, 1)).square().sum()
        return loss


def test_views_of_a_parameter_are_made_again_for_the_backward() -> None:
    graph = capture(Experts(), torch.randn(4, 2, 5))
    ((down, alias),) = backward_alias_of(graph).items()
    forward = {o for n in graph.nodes if n.name not in graph.backward for o in n.outputs}
    views = {n.outputs[0] for n in graph.nodes if down in n.inputs} & forward
    read = {name for n in graph.nodes if n.name in graph.backward for name in n.inputs}
    assert views and not views & read
    assert alias in read


def test_a_parameter_that_one_pass_reads_has_no_alias() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))

    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.square().sum()

    graph = capture(model, torch.randint(7, (6,)), loss)
    targets = {i.tensor: i.target for i in graph.role("parameter")}
    assert [targets[name] for name in backward_alias_of(graph)] == ["1.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["mlp", "bert_moe"])
def test_random_plans_gather_again_and_store_apart_and_are_right(file: str) -> None:
    case = benchmark_case(file, "tiny")
    aliases = set(backward_alias_of(case.graph).values())
    again = apart = 0
    for seed in range(3):
        plan = random_plan(case, 3, seed)
        again += sum(
            isinstance(s, Convert) and s.tensor in aliases and s.kind == "all_gather" and s.backward
            for s in plan.program.instructions
        )
        apart += sum(len(set(s)) > 1 for name, s in plan.shares.items() if name.startswith(STORED))
        assert verdict(case, plan).ok
    assert again and apart
