"""Forwards that ask whether they are compiled, write messages, show their progress, or move modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.ir.graph import Graph


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def captured(forward: Callable[[Net, Tensor], Tensor]) -> Graph:
    return capture(Net(forward), torch.randn(6, 4))


def products(graph: Graph) -> int:
    """Return the number of products of the forward."""
    return sum(node.op == "aten.addmm.default" for node in graph.nodes)


def asks(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if torch.compiler.is_compiling() else net.layer(x)).square().mean()


def asks_the_tracer(net: Net, x: Tensor) -> Tensor:
    return net.layer(x if torch._dynamo.is_compiling() else net.layer(x)).square().mean()  # type: ignore[attr-defined]


def asks_for_a_script(net: Net, x: Tensor) -> Tensor:
    exported = torch.jit.is_scripting() or torch.jit.is_tracing()  # type: ignore[no-untyped-call]
    return net.layer(x if exported else net.layer(x)).square().mean()


@pytest.mark.parametrize("forward", [asks, asks_the_tracer, asks_for_a_script])
def test_a_plan_computes_what_the_eager_model_would(forward: Any) -> None:
    assert products(captured(forward)) == 2


def test_a_branch_for_compilers_is_taken_where_the_eager_one_cannot_be() -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.sum() > 0:
            x = net.layer(x)
        return net.layer(x).square().mean()

    with pytest.warns(UserWarning, match=r"test_questions_and_messages\.py:\d+: .*torch\.compile"):
        graph = captured(forward)
    assert products(graph) == 1


def test_packages_are_told_that_they_are_compiled() -> None:
    text = """
def forward(net, x):
    return net.layer(x if torch.compiler.is_compiling() else net.layer(x)).square().mean()
"""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(text, "/somewhere/site-packages/package/file.py", "exec"), names)
    assert products(captured(names["forward"])) == 1


def logs(net: Net, x: Tensor) -> Tensor:
    log = logging.getLogger("a.library")
    log.info("shape %s", x.shape)
    if log.isEnabledFor(logging.DEBUG):
        log.debug("mean %s", x.mean())
    return net.layer(x).square().mean()


def shows_progress(net: Net, x: Tensor) -> Tensor:
    from tqdm import tqdm, trange
    from tqdm.auto import tqdm as automatic

    for _ in tqdm(range(2), desc="layers", disable=True):
        x = net.layer(x)
    for k in automatic([1.0, 2.0], disable=True):
        x = x * k
    for _ in trange(1, 3, disable=True):
        x = net.layer(x)
    with tqdm(total=2, disable=True) as bar:
        bar.set_postfix(rows=x.shape[0])
        bar.update(1)
    return x.square().mean()


def test_messages_and_progress_are_no_part_of_the_program() -> None:
    assert products(captured(logs)) == 1
    pytest.importorskip("tqdm")
    assert products(captured(shows_progress)) == 4


@pytest.mark.parametrize("where", ["device", "dtype", "like"])
def test_a_module_that_is_moved_to_where_it_is_stays(where: str) -> None:
    def forward(net: Net, x: Tensor) -> Tensor:
        there = x if where == "like" else getattr(x, where)
        return net.layer.to(there)(x).square().mean()  # type: ignore[no-any-return]

    assert products(captured(forward)) == 1


def test_a_module_that_is_cast_is_refused_with_what_to_write() -> None:
    with pytest.raises(ModelError, match="swap") as refused:
        captured(lambda net, x: net.layer.to(torch.float16)(x.half()).square().mean())
    assert "cast tensors in the forward" in refused.value.hint
