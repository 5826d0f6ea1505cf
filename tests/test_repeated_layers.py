"""Layers that are traced once: the graph is that of the whole trace, whatever the layers do."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hap.capture import joint, regions_private, tracing
from hap.capture.captured_step import CapturedStep
from hap.capture.repeated_layers import repeated_kinds
from hap.errors import ModelError
from hap.ir.graph import Graph
from tests.random_plans import make_case, random_plan, verdict

pytestmark = pytest.mark.skipif(
    not regions_private.HAS_REGIONS, reason="this torch does not compare layers"
)
SETTINGS = {"scale": 1.0}


class Layer(nn.Module):
    def __init__(self, number: int = 0, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.number = nn.Dropout(p), number
        self.register_buffer("shift", torch.full((8,), float(number)))

    def forward(self, x: Tensor) -> Any:
        return x + self.drop(self.b(F.gelu(self.a(self.norm(x))))) * self.shift


class Net(nn.Module):
    """Layers, four by default, called one after the other or by ``run``."""

    def __init__(self, make: Callable[[int], nn.Module], run: Any = None, count: int = 4) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(make(k) for k in range(count)), nn.Linear(8, 1)
        self.kept: list[Tensor] = []
        self._run = run or (lambda net, k, layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = self._run(self, k, layer, x)
        return self.head(x).square().mean()


class Scaled(Layer):
    """Reads a number of its own, and a global one."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * SETTINGS["scale"] * (self.number + 1)


class Mixed(Layer):
    """Constants, writes in place, random numbers, and a number that Python reads."""

    def forward(self, x: Tensor, seen: list[Tensor]) -> Any:
        h = self.a(x + torch.rand_like(x)) + torch.arange(8) * torch.tensor(float(self.number))
        seen.append(h.mean())
        h.add_(1)
        return x + self.b(h.relu_()) / x.abs().sum().item()


class Several(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.a(x), x.detach() * 2


class Partly(Layer):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.a(x)
        with torch.autocast("cpu", torch.float16):
            return x + self.b(y)


class Counting(Layer):
    def forward(self, x: Tensor) -> Any:
        self.shift += 1
        return super().forward(x)


class Clearing(Layer):
    """Empties a cache that nothing was written to."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        self.cache.clear()
        return super().forward(x)


class Returning(Layer):
    """Returns ``None`` as well, and a mask, which the first layer makes."""

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        mask = (x > 0).float() * self.a.weight.sum() if mask is None else mask
        return super().forward(x) * mask * scale, None, mask


class Writing(Layer):
    def forward(self, x: Tensor) -> Any:
        return x.add_(self.a.bias * self.b.bias), None


class Viewing(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.view(-1)


def frozen(number: int) -> nn.Module:
    return Layer(number).requires_grad_(number > 3)


OWN = ("", "", "probability", "mode", "number", "global", "autocast", "strides")
"""The property that only this layer has; the first layer has the batch as its input."""


def with_its_own(k: int) -> nn.Module:
    layer = Scaled(int(OWN[k] == "number"), 0.2 if OWN[k] == "probability" else 0.1)
    return layer.train(OWN[k] != "mode")


def run_in_its_own_way(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    SETTINGS["scale"] = 2.0 if OWN[k] == "global" else 1.0
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if OWN[k] == "strides" else x.contiguous()
    with torch.autocast("cpu", torch.bfloat16, enabled=OWN[k] == "autocast"):
        return layer(x)


def hooked(number: int) -> nn.Module:
    layer = Layer(number)
    layer.register_forward_hook(lambda module, given, made: made * 2)
    layer.a.register_forward_hook(lambda module, given, made: made.tanh())
    return layer


def some_no_grad(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    with torch.set_grad_enabled(k != 2):
        return layer(x)


def reading_one_mask(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    mask = net.kept.pop() if k % 3 else None
    found, nothing, mask = layer(x, mask=mask) if k % 2 else layer(x, mask=mask, scale=0.5)
    assert nothing is None
    net.kept.append(mask)
    return found


def written(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    x = x * 2
    found, _ = layer(x)
    return found + x


def called_twice(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    found, _, mask = layer(x)
    return layer(found, mask=mask)[0]


def some_unused(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    y, z, _ = layer(x)
    return y + z if k < 3 else y


def listed(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    seen: list[Tensor] = []
    return layer(x, seen) + sum(seen)


def recomputed(net: Net, k: int, layer: nn.Module, x: Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=False)


Case = tuple[Callable[[int], nn.Module], Any, str]
ONCE: dict[str, Case] = {
    "something of its own": (with_its_own, run_in_its_own_way, ""),
    "results that are not used, and one without gradient": (Several, some_unused, ""),
    "None, and an input that is returned": (Returning, reading_one_mask, ""),
    "much": (Mixed, listed, ""),
    "frozen layers": (frozen, None, ""),
    "hooks": (hooked, None, ""),
    "modes inside": (Partly, None, ""),
    "gradients of some": (Layer, some_no_grad, ""),
    "checkpoints and autocast": (lambda k: Layer(k, 0.1), recomputed, "float16"),
    "a cache that is not used": (lambda k: Clearing(), None, ""),
    "an encoder": (lambda k: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), None, ""),
}  # fmt: skip
WHOLE: dict[str, Case] = {
    "a buffer that is written": (Counting, None, ""),
    "an input that is written and returned": (Writing, written, ""),
    "an argument that some calls return": (Returning, called_twice, ""),
    "a view of an input": (Viewing, lambda net, k, layer, x: layer(x)[0], ""),
}
"""Layers that are not traced once, as torch can't."""


def captured(case: Case, *, whole: bool = False) -> tuple[CapturedStep, bool]:
    """Return a captured step, and whether layers were traced once."""
    make, run, autocast = case
    torch.manual_seed(0)
    count = len(OWN) if make is with_its_own else 4
    net, once = Net(make, run, count), list[bool]()
    trace = joint._traced

    def traced(step: Any, tensors: Any, kinds: Any = (), calls: Any = ()) -> Any:
        once[:] = [False]
        found = trace(step, tensors, kinds, calls)
        once[:] = [bool(kinds)]
        return found

    kinds = mock.patch.object(
        tracing, "repeated_kinds", lambda m: () if whole else repeated_kinds(m)
    )
    with kinds, mock.patch.object(joint, "_traced", traced):
        step = tracing.captured(net, {"x": torch.zeros(4, 6, 8)}, autocast=autocast)
    return step, once[0]


def values(graph: Graph) -> tuple[Any, Any]:
    """Return how often each value is computed at each line and module, and what the outputs are."""
    known = {i.tensor: hash((i.role, i.target)) for i in graph.inputs}
    found = collections.Counter[Any]()
    for node in graph.nodes:
        names = re.split(r"Ref\(name='([^']+)'\)", repr((node.args, node.kwargs)))
        made = hash((node.op, *names[::2], *(known[name] for name in names[1::2])))
        known |= {name: hash((made, k)) for k, name in enumerate(node.outputs) if name}
        found[made, node.source, node.module] += 1
    return found, {(o.role, o.target): known[o.tensor] for o in graph.outputs}


@pytest.mark.slow
@pytest.mark.parametrize("case", ONCE)
def test_layers_traced_once_are_those_of_the_whole_trace(case: str) -> None:
    step, once = captured(ONCE[case])
    whole, _ = captured(ONCE[case], whole=True)
    assert once
    assert values(step.graph) == values(whole.graph)
    assert values(step.recomputing("blocks")) == values(whole.recomputing("blocks"))


@pytest.mark.parametrize("make", [Layer, Clearing])
def test_alike_layers_are_traced_twice(make: Callable[[], nn.Module]) -> None:
    """The input of the first one is the batch, without a gradient; the others are alike."""
    with mock.patch.object(regions_private._LOGGER, "info") as said:
        captured((lambda k: make(), None, ""))
    assert said.call_args.args[1:] == (2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE)
def test_other_layers_are_traced_as_a_whole(case: str) -> None:
    """The log says why, if a trace of each kind of layer was tried."""
    info = mock.patch.object(joint._LOGGER, "info")
    with info as said, mock.patch.object(joint, "_traced", wraps=joint._traced) as traced:
        step, once = captured(WHOLE[case])
    assert not once
    assert said.call_count == traced.call_count - 1
    assert values(step.graph) == values(captured(WHOLE[case], whole=True)[0].graph)


@pytest.mark.slow
def test_layers_do_not_keep_keys_and_values() -> None:
    """A cache that all layers write into would make each of them another one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
    net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, use_cache=True, **sizes))
    words = torch.zeros(4, 6, dtype=torch.long)
    with mock.patch.object(joint, "_traced", wraps=joint._traced) as traced:
        step = tracing.captured(net, {"input_ids": words, "labels": words})
    assert net.config.use_cache
    assert traced.call_count == 1
    kinds = collections.Counter(node.op for node in step.graph.nodes)
    assert kinds["hap.sdpa.default"] == 4
    assert {n.module.split(".")[2] for n in step.graph.nodes if "layers" in n.module} == {*"0123"}


@pytest.mark.slow
def test_layers_of_transformers_are_traced_once_and_checkpointed() -> None:
    """The forward of their class checkpoints the one that it wraps, if the class still has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
    net = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **sizes)).train()
    words = torch.zeros(4, 6, dtype=torch.long)
    net.gradient_checkpointing_enable()
    with mock.patch.object(joint, "_traced", wraps=joint._traced) as traced:
        step = tracing.captured(net, {"input_ids": words, "labels": words})
    assert traced.call_count == 1
    kinds = collections.Counter(node.op for node in step.recomputing("").nodes)
    assert kinds["hap.sdpa.default"] == 8
    assert kinds["hap.sdpa_backward.default"] == 4


def test_errors_are_those_of_the_whole_trace() -> None:
    class Branching(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if x.sum() > 0 else x

    with pytest.raises(ModelError, match="can't be captured as one graph") as error:
        captured((Branching, None, ""))
    assert "test_repeated_layers.py" in str(error.value)


def test_errors_inside_of_the_tracer_are_those_of_the_model() -> None:
    """The tracer fails on a module in a decorator by an assertion of its own."""
    decorated = (Layer, lambda net, k, layer, x: torch.no_grad()(layer)(x), "")
    with pytest.raises(ModelError, match="can't be captured as one graph"):
        captured(decorated)


@pytest.mark.slow
def test_sums_of_gradients_over_layers_are_right() -> None:
    """Layers that share a parameter and an input add up their gradients in another order."""
    net = Net(Reading, lambda net, k, layer, x: layer(x, net.head.weight * 2))
    for layer in net.layers:
        layer.a.weight = net.layers[0].a.weight  # type: ignore[union-attr]
    case = make_case(net.double(), {"x": torch.randn(8, 6, 8, dtype=torch.double)})
    for seed in range(2):
        assert verdict(case, random_plan(case, 3, seed)).ok


class Reading(Layer):
    def forward(self, x: Tensor, memory: Tensor) -> Any:
        return super().forward(x) + self.a(memory) + memory.tanh()


def test_the_outermost_layers_that_repeat_are_found() -> None:
    layers = [Layer() for _ in range(4)]
    assert repeated_kinds(nn.Sequential(nn.ModuleList(layers), nn.Linear(8, 1))) == (Layer,)
    assert repeated_kinds(nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 1))) == (Layer,)
    assert repeated_kinds(Net(lambda k: Group())) == (Group,)
    assert not repeated_kinds(nn.Sequential(*layers[:3]))
    norms = nn.Sequential(*(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(4)))
    assert not repeated_kinds(norms)


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
