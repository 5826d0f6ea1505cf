"""State that a forward keeps in Python: what a second call would compute differently is refused."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

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


@pytest.fixture
def thawed() -> Iterator[None]:
    """The caches of functions are found among the objects that the tests' collector has not frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


class Tables:
    """Tables of a class, which its objects share, and of an object."""

    of_class: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        self.one: Any = None


TABLE: dict[int, Any] = {}
ROW: Any = None
OBJECT = Tables()


def kept_in_a_global_dict(net: Net, x: Tensor) -> Tensor:
    if 4 not in TABLE:
        TABLE[4] = [torch.arange(4.0), (torch.linspace(0, 1, 4),)]
    return (net.layer(x) * TABLE[4][0].to(x) + TABLE[4][1][0].to(x)).square().mean()


def kept_in_a_global(net: Net, x: Tensor) -> Tensor:
    global ROW
    if ROW is None:
        ROW = torch.arange(4.0)
    return (net.layer(x) * ROW.to(x)).square().mean()


def kept_in_an_object(net: Net, x: Tensor) -> Tensor:
    if OBJECT.one is None:
        OBJECT.one = torch.arange(4.0)
    if 4 not in OBJECT.of_class:
        OBJECT.of_class[4] = torch.ones(4)
    return (net.layer(x) * OBJECT.one.to(x) * OBJECT.of_class[4].to(x)).square().mean()


@pytest.mark.parametrize("forward", [kept_in_a_global_dict, kept_in_a_global, kept_in_an_object])
def test_constants_kept_outside_of_the_module_are_made_anew(thawed: None, forward: Any) -> None:
    net, x = Net(forward), torch.randn(6, 4)
    ops = [node.op for node in capture(net, x).nodes]
    assert "aten.arange.start_step" in ops or "aten.arange.default" in ops
    assert (TABLE, ROW, OBJECT.one, Tables.of_class) == ({}, None, None, {})
    assert net(x).item() > 0
    again = [node.op for node in capture(net, x).nodes]
    assert "hap.constant.default" in again  # the caches now hold real tensors
    TABLE.clear()
    Tables.of_class.clear()
    OBJECT.one, globals()["ROW"] = None, None


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


@pytest.mark.parametrize("forward", [plain, counted_for_nothing, cached_by_a_function])
def test_state_that_changes_no_result_is_allowed(forward: Any, thawed: None) -> None:
    net, x = Net(forward), torch.randn(6, 4)
    capture(net, x)
    loss = net(x)
    assert type(loss) is Tensor, "the cache of a function holds no tensor of the capture"
    assert loss.isfinite()
