"""Models that others write: unusual ones that plan and verify, and those that are refused by name."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

import hap
from hap.capture import tensor_constants, torch_private
from hap.capture.building import without_data
from hap.capture.graph_break import GraphBreak
from hap.capture.hidden_tensors import hidden_tensors
from hap.capture.tracing import capture
from hap.cli.commands import main
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


@pytest.mark.slow
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
    return torch.fft.fft(net.linear(x)).exp().abs().mean()


def sparse_gradient(net: Net, x: Tensor) -> Tensor:
    return net.table(x.long().clamp(0, 3)).mean()  # type: ignore[no-any-return,operator]


def counted(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.linear(x * net.calls).mean()


def counted_in_a_tensor(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    return net.linear(x * torch.tensor(float(net.calls))).mean()


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
        (counted_in_a_tensor, r"changes the attribute 'calls'(.|\n)*buffer"),
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


def test_truncated_normals_need_no_data() -> None:
    def make() -> nn.Module:
        net = nn.Linear(8, 8)
        nn.init.trunc_normal_(net.weight, std=0.02)
        return net

    said: list[str] = []
    net = without_data(make, said.append)
    assert not said and torch_private.is_fake(net.weight)  # type: ignore[arg-type]
    assert make().weight.abs().max() > 0  # type: ignore[operator,union-attr]


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


class Pair(nn.Module):
    """Two weights, which ``tie`` may put into the same memory."""

    def __init__(self, tie: Callable[[Pair], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        tie(self)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(self.a(x))).square().mean()


def by_data(net: Pair) -> None:
    net.b.weight.data = net.a.weight.data


def by_slices(net: Pair) -> None:
    whole = torch.randn(8, 16)
    net.a.weight, net.b.weight = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 8:])


def by_overlap(net: Pair) -> None:
    whole = torch.randn(8, 16)
    net.a.weight, net.b.weight = nn.Parameter(whole[:, :8]), nn.Parameter(whole[:, 7:15])


def by_name(net: Pair) -> None:
    net.b.weight = net.a.weight


def frozen(net: Pair) -> None:
    by_data(net.requires_grad_(False))


MADE: list[Any] = [contextlib.nullcontext, torch_private.building_without_data,
                   lambda: torch.device("meta")]  # fmt: skip


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("tie", [by_data, by_overlap])
def test_two_parameters_in_the_same_memory_are_refused_by_name(
    tie: Callable[[Pair], Any], made: Callable[[], Any]
) -> None:
    with made():
        net = Pair(tie)
    with pytest.raises(ModelError, match=r"'a.weight' and 'b.weight' are two tensors in the same"):
        capture(net, torch.randn(8, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tie", "made"),
    [
        (lambda net: None, contextlib.nullcontext), (frozen, contextlib.nullcontext),
        *itertools.product((by_slices, by_name), MADE),
    ],
)  # fmt: skip
def test_parameters_in_memory_of_their_own_and_tied_ones_are_captured(
    tie: Callable[[Pair], Any], made: Callable[[], Any]
) -> None:
    with made():
        net = Pair(tie)
    assert capture(net, torch.randn(8, 8)).role("parameter")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Dropout(0.5), r"its module 'part' runs dropout"),
        (nn.BatchNorm1d(8), r"its module 'part' runs batch norm"),
        (nn.BatchNorm1d(8, track_running_stats=False), r"its module 'part' runs batch norm"),
        (nn.Dropout(0.0), ""),
    ],
)
def test_a_part_that_trains_in_a_model_that_does_not_is_refused(
    layer: nn.Module, words: str
) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        return net.part(net.linear(x)).square().mean()  # type: ignore[operator]

    net = Net(forward, part=layer)
    if layer.state_dict():
        capture(net, torch.randn(8, 8))
    net.eval()
    layer.train()
    if not words:
        capture(net, torch.randn(8, 8))
        return
    with pytest.raises(ModelError, match=words):
        capture(net, torch.randn(8, 8))
    layer.eval()
    if layer.state_dict() or isinstance(layer, nn.Dropout):
        capture(net.train(), torch.randn(8, 8))


class Weighted(nn.Module):
    """A loss with a constant."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__()
        self.register_buffer("w", torch.arange(8.0))
        self.scale = nn.Parameter(torch.ones(()), requires_grad=trained)

    def forward(self, output: Tensor, batch: Tensor) -> Tensor:
        return (self.scale * self.w * output).square().mean()


def test_a_loss_that_is_a_module_holds_constants() -> None:
    torch.manual_seed(0)
    case = make_case(Net(lambda net, x: net.linear(x)), torch.randn(8, 8), Weighted())
    assert {i.target for i in case.graph.role("buffer")} == set()
    assert verdict(case, random_plan(case, 2, 1)).ok
    with pytest.raises(ModelError, match="the loss has the parameter 'scale'"):
        capture(case.model, case.batch, Weighted(trained=True))


@pytest.mark.parametrize(
    "value", [threading.Lock(), [torch.ones(2, requires_grad=True) * 2]], ids=["lock", "computed"]
)
def test_an_attribute_that_can_not_be_copied_is_named(value: Any) -> None:
    net = Net(lambda net, x: net.linear(x).mean(), part=nn.Linear(8, 8))
    net.part.kept = value
    with pytest.raises(
        ModelError, match=r"the attribute 'part\.kept' of the model can't be copied"
    ):
        capture(net, torch.randn(8, 8))


def test_tensors_without_data_in_a_list_are_refused_by_name() -> None:
    net = Net(lambda net, x: (net.linear(x) @ net.mats[0]).mean())
    with torch_private.fake_mode():
        net.mats = [torch.randn(8, 8)]
    with pytest.raises(ModelError, match=r"tensors without data in 'mats\.0'\n.*register_buffer"):
        capture(net, torch.randn(8, 8))


PROMPTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.prompts = nn.Embedding(8, 16), {"default": torch.arange(4).long()}
    def forward(self, x):
        prompts = self.table(self.prompts["default"].unsqueeze(0).expand(len(x), -1))
        return torch.cat([prompts, self.table(x)], 1).square().mean()

def model(): return Net()
def batch(): return torch.randint(8, (64, 6))
"""


def test_whole_numbers_in_a_plain_dict_are_known_without_data(tmp_path: Path) -> None:
    """As the tokens of peft's prompts, whose model would not fit this machine with data."""
    path, said = tmp_path / "model.py", []
    path.write_text(PROMPTS)
    plan = hap.api.plan_file(str(path), "local:1", progress=said.append)
    assert not any("with data" in text for text in said)
    assert hap.verify(plan).ok


SCHEDULE = """
import torch
from torch import nn

class Schedule:
    def __init__(self):
        self.alphas = torch.linspace(0, 1, 10)
        self.more = {"scales": [torch.full((3,), 2.0)]}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.schedule = nn.Linear(16, 16), Schedule()
    def forward(self, x, t):
        x = self.layer(x) * self.schedule.alphas[t].unsqueeze(1)
        return x.square().mean() * self.schedule.more["scales"][0].sum()

def model(): return Net()
def batch(): return {"x": torch.randn(64, 16), "t": torch.randint(10, (64,))}
"""


def test_a_model_whose_plain_objects_hold_tensors_is_built_with_data(tmp_path: Path) -> None:
    path, said = tmp_path / "model.py", []
    path.write_text(SCHEDULE)
    plan = hap.api.plan_file(str(path), "local:1", progress=said.append)
    assert "a plain object of the model holds tensors: building the model with data" in said
    assert hap.verify(plan).ok
    (tmp_path / "one.yaml").write_text("nodes: [{name: a, gpus: 1, type: cpu}]")
    words = ["what-if", str(path), "--cluster", str(tmp_path / "one.yaml"), "--rows", "32"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert "32 rows" in result.stdout


def test_tensors_of_lists_and_plain_objects_are_found() -> None:
    class Held:
        def __init__(self, net: nn.Module) -> None:
            self.of_net, self.own = [net.linear.weight], ({"x": torch.ones(2)},)
            self.net, self.itself = net, self

    net = Net(lambda net, x: net.linear(x).mean())
    net.held, net.plain = Held(net), torch.ones(3)
    assert list(hidden_tensors(net)) == ["held.own.0.x"]


def test_a_global_that_the_forward_writes_into_is_refused() -> None:
    steps = torch.ones(8)

    def forward(net: Net, x: Tensor) -> Tensor:
        steps.mul_(2)
        return (net.linear(x) * steps).mean()

    with pytest.raises(ModelError, match=r"second time(.|\n)*writes into, in buffers"):
        capture(Net(forward), torch.randn(8, 8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_numbers_beyond_the_range_of_a_dtype_are_infinite(dtype: torch.dtype) -> None:
    for data in (1e39, [-1e39, 1.0]):
        assert torch.equal(tensor_constants.tensor(data, dtype=dtype).isinf(),
                           torch.tensor(data, dtype=torch.float64).abs() > 1)  # fmt: skip


def test_labels_that_the_forward_does_not_take_are_explained() -> None:
    with pytest.raises(ModelError, match="takes 2 positional arguments") as error:
        capture(
            nn.Linear(4, 2), (torch.randn(6, 4), torch.randn(6, 2)), lambda out, batch: out.sum()
        )
    assert "y=None" in error.value.hint


def test_explanations_of_torch_lose_their_parentheses() -> None:
    text = "Data-dependent branching\n  Explanation: It saw a branch (e.g. `if x.sum() > 0:`) here."
    assert str(GraphBreak(RuntimeError(text), on_data=True)).endswith(": It saw a branch here.")
