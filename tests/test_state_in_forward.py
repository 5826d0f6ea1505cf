"""State that a forward keeps in Python: what a second call would compute differently is refused."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.errors import ModelError

COUNTS = {"calls": 0}
STEPS = 0


class Net(nn.Module):
    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), forward
        self.held: dict[str, Any] = {"step": 0}
        self.numbers = itertools.count(1)
        self.own_random = random.Random(0)
        self.begun, self.calls, self.after = False, 0, 10**9
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def in_a_dict(net: Net, x: Tensor) -> Tensor:
    net.held["step"] += 1
    return (net.layer(x) * net.held["step"]).square().mean()


def in_a_list(net: Net, x: Tensor) -> Tensor:
    net.held.setdefault("list", []).append(1)
    return (net.layer(x) * len(net.held["list"])).square().mean()


def in_a_global(net: Net, x: Tensor) -> Tensor:
    global STEPS
    STEPS += 1
    return (net.layer(x) * STEPS).square().mean()


def in_a_global_dict(net: Net, x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return (net.layer(x) * COUNTS["calls"]).square().mean()


def in_an_iterator(net: Net, x: Tensor) -> Tensor:
    return (net.layer(x) * next(net.numbers)).square().mean()


def drawn_by_python(net: Net, x: Tensor) -> Tensor:
    return (net.layer(x) * random.randint(1, 10**6)).square().mean()


def drawn_by_its_own_generator(net: Net, x: Tensor) -> Tensor:
    return (net.layer(x) * net.own_random.randint(1, 10**6)).square().mean()


def initialized_by_data(net: Net, x: Tensor) -> Tensor:
    if not net.begun:
        with torch.no_grad():
            net.scale.copy_(1 / (x.std(0) + 1e-3))
        net.begun = True
    return (net.layer(x) * net.scale).square().mean()


def made_in_the_first_call(net: Net, x: Tensor) -> Tensor:
    if not hasattr(net, "extra"):
        net.extra = nn.Linear(4, 4)
    return net.extra(net.layer(x)).square().mean()


def after_some_calls(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    y = net.layer(x)
    return (y * 5 if net.calls > 3 else y).square().mean()


def failing_in_its_second_call(net: Net, x: Tensor) -> Tensor:
    if net.begun:
        raise RuntimeError("called twice")
    net.begun = True
    return net.layer(x).square().mean()


REFUSED = (
    in_a_dict, in_a_list, in_a_global, in_a_global_dict, in_an_iterator, drawn_by_python,
    drawn_by_its_own_generator, failing_in_its_second_call, initialized_by_data, made_in_the_first_call, after_some_calls,
)  # fmt: skip


@pytest.mark.parametrize("forward", REFUSED)
def test_a_forward_that_differs_in_its_next_call_is_refused(forward: Any) -> None:
    with pytest.raises(ModelError, match=r"computes something else|may do|called twice") as refused:
        capture(Net(forward), torch.randn(6, 4))
    assert refused.value.hint


def test_the_line_of_the_first_difference_is_named() -> None:
    with pytest.raises(ModelError, match=r"second time") as refused:
        capture(Net(in_an_iterator), torch.randn(6, 4))
    line = in_an_iterator.__code__.co_firstlineno + 1
    assert refused.value.where.endswith(f"test_state_in_forward.py:{line}")


class CountingLoss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        return output * self.calls


def test_a_loss_that_counts_is_refused() -> None:
    with pytest.raises(ModelError, match="second time"):
        capture(Net(plain), torch.randn(6, 4), CountingLoss())


def plain(net: Net, x: Tensor) -> Tensor:
    return net.layer(x).square().mean()


def counted_for_nothing(net: Net, x: Tensor) -> Tensor:
    net.calls += 1
    net.held["step"] += 1
    return plain(net, x)


@functools.lru_cache
def mask(n: int) -> Tensor:
    return torch.tril(torch.ones(n, n))


def cached_by_a_function(net: Net, x: Tensor) -> Tensor:
    return (net.layer(x) @ mask(4)).square().mean()


@pytest.fixture
def thawed() -> Iterator[None]:
    """The caches of functions are found among the objects that the tests' collector has not frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.parametrize("forward", [plain, counted_for_nothing, cached_by_a_function])
def test_state_that_changes_no_result_is_allowed(forward: Any, thawed: None) -> None:
    net, x = Net(forward), torch.randn(6, 4)
    capture(net, x)
    loss = net(x)
    assert type(loss) is Tensor, "the cache of a function holds no tensor of the capture"
    assert loss.isfinite()
