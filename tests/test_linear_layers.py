"""Linear layers as one operator each: which graphs, and the same step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.ir.graph import Graph
from hap.ir.linear_layers import LINEAR, MATMUL, TENSORDOT
from hap.ir.placement import P, R, S
from hap.ir.widening import widened_later
from hap.synthesizer.rules.textual_rules import rows_of
from tests.random_plans import make_case, random_plan, verdict

ROWS, WORDS, WIDTH = 6, 10, 12
SQUARES = ("aten.mm.default", "aten.addmm.default", "aten.t.default")


class Heads(nn.Module):
    """Attention's layers: the dims of the result are split, and those of the input merged."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(ROWS, WORDS, 3, 4).transpose(1, 2).sigmoid()
        return self.outer(heads.transpose(1, 2).reshape(ROWS, WORDS, WIDTH))


class Shared(nn.Module):
    """Three layers of one input, and the sum of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (layer(x) for layer in self.layers)
        return a * b + c


class Turned(nn.Module):
    """A weight with its inputs first, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, WIDTH), self.weight)
        return flat.view(ROWS, WORDS, 8) @ self.weight.t()


class Flat(nn.Module):
    """The result of a layer is read as a matrix, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + y.flatten(0, 1).softmax(0).view(ROWS, WORDS, 8)


class Ranks(nn.Module):
    """A batch of four dims, and one that is a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.view(ROWS, 2, 5, WIDTH).sin()).sum(2) + self.b(x[:, 0]).unsqueeze(1)


MODELS = {
    "chain": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 6)),
    "heads": Heads, "shared": Shared, "turned": Turned, "flat": Flat, "ranks": Ranks,
}  # fmt: skip


def loss(y: Tensor, _batch: Tensor) -> Tensor:
    return y.square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, WORDS, WIDTH, generator=torch.Generator().manual_seed(0))


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_linear_layers_is_that_of_one_device(model: str) -> None:
    torch.manual_seed(1)
    case = make_case(MODELS[model](), batch(), loss)
    found = operators(case.space.graph)
    assert found[LINEAR] and found[TENSORDOT]
    for seed in range(2):
        assert verdict(case, random_plan(case, 2 + seed, seed)).ok


@pytest.mark.parametrize(
    ("model", "left"),
    [("chain", {}), ("heads", {}), ("shared", {}), ("turned", {"aten.t.default": 1}),
     ("flat", {}), ("ranks", {"aten.addmm.default": 1, "aten.mm.default": 1, "aten.t.default": 2})],
)  # fmt: skip
def test_products_of_flattened_tensors_are_replaced(model: str, left: dict[str, int]) -> None:
    found = operators(capture(MODELS[model](), batch(), loss))
    assert {op: found[op] for op in SQUARES if found[op]} == left


def test_a_chain_of_layers_has_no_view() -> None:
    graph = capture(MODELS["chain"](), batch(), loss)
    found = operators(graph)
    assert (found[LINEAR], found[MATMUL], found[TENSORDOT]) == (3, 2, 3)
    assert not found["aten.view.default"]


def test_casts_of_the_backward_are_found_in_any_order_of_tensors() -> None:
    """New views and aliases are at the end of the table, wherever the step defines them."""
    graph = capture(MODELS["chain"](), batch(), loss, autocast="bfloat16")
    assert {*graph.defined} == {*graph.tensors}
    found = widened_later(graph)
    assert found
    turned = dict(reversed(graph.tensors.items()))
    assert widened_later(replace(graph, tensors=turned)) == found


def test_layers_can_be_sharded_along_each_leading_dim() -> None:
    graph = capture(MODELS["chain"](), batch(), loss)
    first = next(node for node in graph.nodes if node.op == LINEAR)
    rows = {(row.ins, row.outs) for row in rows_of(first, graph)}
    assert {((S(d), R, R), (S(d),)) for d in range(2)} <= rows
    assert {((R, S(0), S(0)), (S(2),)), ((S(2), S(1), P), (P,))} <= rows
    gradient = next(node for node in graph.nodes if node.op == TENSORDOT)
    rows = {(row.ins, row.outs) for row in rows_of(gradient, graph)}
    assert {((S(d), S(d)), (P,)) for d in range(2)} <= rows


def test_a_bias_of_one_number_stays_a_product_of_matrices() -> None:
    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(WIDTH, 8)),
                nn.Parameter(torch.randn(1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(ROWS, WORDS, 8)

    case = make_case(Number(), batch(), loss)
    assert operators(case.space.graph)["aten.addmm.default"] == 1
    assert verdict(case, random_plan(case, 3, 0)).ok
