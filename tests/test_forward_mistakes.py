"""Mistakes in a forward are named, at their line, with the code to write in their place."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from hap.capture.tracing import capture
from hap.errors import ModelError


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), forward
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def backward(net: Net, x: Tensor) -> Tensor:
    loss = net.layer(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def new_data_of_a_buffer(net: Net, x: Tensor) -> Tensor:
    net.scale.data = torch.full((4,), 2.0)
    return (net.layer(x) * net.scale).square().mean()


def new_data_of_a_parameter(net: Net, x: Tensor) -> Tensor:
    net.layer.weight.data = net.layer.weight.data * 0.99
    return net.layer(x).square().mean()


def numbers_for_numpy(net: Net, x: Tensor) -> Tensor:
    return (net.layer(x) * torch.from_numpy(x.numpy() > 0)).square().mean()


def a_device(net: Net, x: Tensor) -> Tensor:
    return net.layer(x.to("cuda")).square().mean()


def a_collective(net: Net, x: Tensor) -> Tensor:
    y = net.layer(x)
    dist.all_reduce(y)
    return y.square().mean()


def a_generator(net: Net, x: Tensor) -> Tensor:
    return (net.layer(x) + torch.randn(4, generator=GENERATOR)).square().mean()


def untraced(net: Net, x: Tensor) -> Tensor:
    return torch.compiler.disable(net.layer)(x).square().mean()  # type: ignore[no-any-return]


def a_clock(net: Net, x: Tensor) -> Tensor:
    begun = time.perf_counter()
    y = net.layer(x).square().mean()
    print(time.perf_counter() - begun)
    return y


def a_new_module(net: Net, x: Tensor) -> Tensor:
    return nn.LayerNorm(4)(net.layer(x)).square().mean()


def a_hook(net: Net, x: Tensor) -> Tensor:
    handle = net.layer.register_forward_hook(lambda module, given, result: result * 2)
    y = net.layer(x).square().mean()
    handle.remove()
    return y


def a_policy(net: Net, x: Tensor) -> Tensor:
    """The tracer raises an error that does not know its line."""
    kept = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])  # noqa: E731
    return checkpoint(net.layer, x, use_reentrant=False, context_fn=kept).square().mean()  # type: ignore[no-any-return]


def a_branch_as_program(net: Net, x: Tensor) -> Tensor:
    """Its branches have new names in each forward."""
    return net.layer(torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))).mean()  # type: ignore[no-any-return]


def a_loop_as_program(net: Net, x: Tensor) -> Tensor:
    begin = torch.tensor(0), net.layer(x)
    return while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, y * 2), begin)[1].mean()  # type: ignore[no-any-return]


def line_of_the_library(net: Net, x: Tensor) -> Tensor:
    """The tracer ends inside of Python's own library."""
    return net.layer(x).mean() * len(json.dumps({"a": 1}))


def a_place_in_a_queue(net: Net, x: Tensor) -> Tensor:
    at = int(net.scale.sum())
    net.scale[at : at + 1] = 2.0
    return (net.layer(x) * net.scale).square().mean()


GENERATOR = torch.Generator()
MISTAKES = {
    backward: ("the forward calls backward()", "return the loss alone", False),
    new_data_of_a_buffer: ("the forward replaces the data", "copy_", True),
    new_data_of_a_parameter: ("the forward replaces the data", "only the optimizer", True),
    numbers_for_numpy: (".numpy() is not supported", "compute with torch", True),
    a_device: ("the forward fails", "name no device in the forward", True),
    a_generator: ("one graph", "no `generator=`", True),
    untraced: ("one graph", "leave out torch.compiler.disable", True),
    a_clock: ("one graph", "outside of the forward", True),
    a_new_module: ("one graph", "make modules with parameters in __init__", True),
    a_hook: ("one graph", "register hooks in __init__", True),
    a_policy: ("one graph", "outside of the forward as context_fn", True),
    a_branch_as_program: ("inside of an operator (cond)", "torch.where", True),
    a_place_in_a_queue: ("Python reads the value of a tensor", "torch.arange", True),
    a_loop_as_program: ("inside of an operator (while_loop)", "a loop in Python", True),
    line_of_the_library: ("one graph", "__init__", True),
    a_collective: ("the forward fails", "the plan adds the collectives", True),
}


@pytest.mark.parametrize("forward", MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_told_with_its_line_and_what_to_write(forward: Any) -> None:
    if forward is a_device and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, which the forward finds")
    text, hint, located = MISTAKES[forward]
    with pytest.raises(ModelError) as caught:
        capture(Net(forward), torch.randn(6, 4))
    assert text in str(caught.value)
    assert hint in caught.value.hint
    assert ("test_forward_mistakes.py:" in caught.value.where) == located


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr"])
def test_sparse_tensors_of_the_model_are_refused_by_name(kind: str) -> None:
    net = Net(lambda net, x: (net.adjacency @ net.layer(x)).square().mean())
    dense = torch.eye(6)
    net.register_buffer("adjacency", dense.to_sparse(layout=getattr(torch, kind)))
    with pytest.raises(ModelError, match=f"{kind} tensor 'adjacency'") as caught:
        capture(net, torch.randn(6, 4))
    assert "index_add" in caught.value.hint
