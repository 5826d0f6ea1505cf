"""Models that others write: unusual ones that plan and verify, and those that are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.api import without_data
from hap.capture.tracing import capture
from hap.errors import HapError, ModelError
from hap.rule_sources import with_rules
from tests.random_plans import make_case, random_plan, verdict

Forward = Callable[["Net", Tensor], Any]


class Net(nn.Module):
    """A linear layer, and a forward of the test."""

    calls = 0

    def __init__(self, forward: Forward, **parts: nn.Module) -> None:
        super().__init__()
        self.linear, self._forward = nn.Linear(8, 8), forward
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


def one_hot(net: Net, x: Tensor) -> Tensor:
    """Its range of classes is checked on the data."""
    y = net.linear(x)
    return (y * F.one_hot(y.detach().argmax(1), 8)).square().mean()


def inverse(net: Net, x: Tensor) -> Tensor:
    """Singular matrices are reported by an operator that is ordered by tokens."""
    return torch.linalg.inv(net.linear(x) + 30 * torch.eye(8)).square().mean()


def second_derivative(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    (slope,) = torch.autograd.grad(y.tanh().sum(), y, create_graph=True)
    return slope.square().mean() + y.mean()


def recurrent(net: Net, x: Tensor) -> Tensor:
    """A GRU over the first dim splits its gates by an operator without a rule of its own."""
    out, _ = net.gru(x.unsqueeze(1))  # type: ignore[operator]
    return net.linear(out[-1]).square().mean()


def graph_network(net: Net, data: Any) -> Tensor:
    """Messages along edges, whose tensor has two rows."""
    x, (source, target) = data
    sent = net.linear(x)[source]
    summed = torch.zeros_like(x).index_add(0, target, sent)
    most = torch.zeros_like(x).scatter_reduce(
        0, target[:, None].expand_as(sent), sent, "amax", include_self=False
    )
    return (summed + most).square().mean()


@pytest.mark.parametrize("forward", [one_hot, second_derivative, recurrent])
def test_unusual_forwards_are_verified(forward: Forward) -> None:
    torch.manual_seed(0)
    parts = {"gru": nn.GRU(8, 8)} if forward is recurrent else {}
    case = make_case(Net(forward, **parts), torch.randn(8, 8))
    assert verdict(case, random_plan(case, 2, 1)).ok


def test_edges_of_a_graph_are_no_rows_of_the_batch() -> None:
    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(lambda net, x: net.linear(x))

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return graph_network(self.net, (x, edges))

    batch = (torch.randn(16, 8), torch.randint(16, (2, 40)))
    made = hap.plan(Graphs(), batch, "local:3", options=hap.PlanOptions(all_devices=True))
    assert made.world_size == 3


def through_cond(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)).square().mean()  # type: ignore[no-any-return]


def without_derivative(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    return (torch.heaviside(y, y * 0 + 1) * y).mean()


def complex_numbers(net: Net, x: Tensor) -> Tensor:
    return torch.fft.fft(net.linear(x)).abs().mean()


def sparse_gradient(net: Net, x: Tensor) -> Tensor:
    return net.table(x.long().clamp(0, 3)).mean()  # type: ignore[no-any-return,operator]


def counted(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.linear(x * net.calls).mean()


def seeded(net: Net, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return net.linear(x).mean()


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (through_cond, r"test_unusual_models\.py:\d+: .*programs inside of an operator \(cond\)"),
        (without_derivative, r"test_unusual_models\.py:\d+: .*derivative for aten::heaviside"),
        (complex_numbers, r"test_unusual_models\.py:\d+: .*complex64(.|\n)*real and imaginary"),
        (sparse_gradient, r"layout sparse_coo(.|\n)*sparse=False"),
        (counted, r"changes the attribute 'calls'(.|\n)*buffer"),
        (seeded, r"test_unusual_models\.py:\d+: .*function `manual_seed`(.|\n)*hint: compute this"),
    ],
)
def test_what_can_be_no_program_is_refused_by_name(forward: Forward, words: str) -> None:
    net = Net(forward, table=nn.Embedding(4, 8, sparse=True))
    with pytest.raises(ModelError) as refused:
        capture(net, torch.randn(8, 8))
    assert refused.match(words)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (torch.compile, r"the model is wrapped by torch.compile(.|\n)*--backend inductor"),
        (lambda net: torch.jit.trace(net, torch.ones(8, 8)), "compiled by torch.jit"),
        (lambda net: nn.Sequential(nn.LazyLinear(3), net), "no shape before the first forward"),
    ],
)
def test_wrapped_and_lazy_modules_are_refused_by_name(
    wrap: Callable[[nn.Module], nn.Module], words: str
) -> None:
    net = wrap(Net(lambda net, x: net.linear(x).mean()))
    with pytest.raises(HapError, match=words):
        hap.plan(net, torch.randn(8, 8), "local:2")


def test_lazy_modules_that_ran_are_built_with_data() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.LazyLinear(3))
        net(torch.ones(2, 8))
        return net

    def told() -> nn.Module:
        try:
            return make()
        except RuntimeError as error:
            raise ModelError("model() raised") from error

    said: list[str] = []
    net = without_data(told, said.append)
    assert isinstance(net, nn.Sequential)
    assert [p.shape for p in net.parameters()] == [(3, 8), (3,)]
    assert len(said) == 1


def test_checks_of_matrices_are_no_part_of_the_program() -> None:
    ops = [node.op for node in capture(Net(inverse), torch.randn(8, 8)).nodes]
    assert "aten.linalg_inv_ex.default" in ops
    assert not [op for op in ops if "check" in op or "effects" in op]


def test_a_number_of_results_that_depends_on_the_sizes_gives_no_row() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        first, *_ = torch.ops.aten.split_copy.Tensor(net.linear(x), 4)
        return first.mean()

    graph = with_rules(capture(Net(forward), torch.randn(20, 8)), {})
    (lines,) = (rule for name, rule in graph.rules.items() if "split_copy" in name)
    assert "S0 -> S0" not in "".join(lines)
