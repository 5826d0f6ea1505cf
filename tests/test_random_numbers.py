"""Random numbers of any distribution: ranks draw what one device does, and from the right distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Exponential,
    Gumbel,
    Independent,
    Laplace,
    Normal,
    RelaxedOneHotCategorical,
    Uniform,
    kl_divergence,
)

from hap.capture import random_numbers
from hap.capture.random_numbers import DRAWS, IN_PLACE
from hap.errors import UnsupportedOpError
from hap.runtime.context import scaled
from tests.random_plans import make_case, random_plan, verdict

aten = torch.ops.aten


class Noisy(nn.Module):
    def __init__(self, *noises: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.noises = nn.Linear(8, 8), noises

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return sum(noise(x).square().mean() for noise in self.noises)  # type: ignore[return-value]


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "normal": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "normal of a size": lambda x: x + torch.normal(0.0, 0.1, x.shape),
    "normal of tensors": lambda x: torch.normal(x, torch.ones_like(x)) * x,
    "normal of means": lambda x: torch.normal(x, 0.1) * x,
    "normal of deviations": lambda x: torch.normal(1.0, x.exp()) * x,
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "bernoulli in place": lambda x: x * torch.empty_like(x).bernoulli_(torch.full_like(x, 0.3)),
    "Gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "log-normal": lambda x: x * torch.empty_like(x).log_normal_(0, 0.1),
    "Cauchy": lambda x: x * torch.empty_like(x).cauchy_().clamp(-3, 3),
    "geometric": lambda x: x * torch.empty_like(x).geometric_(0.5),
    "whole numbers": lambda x: x * torch.randint_like(x, 3) * torch.randint_like(x, 1, 4),
    "permutation": lambda x: x[:, torch.randperm(8)] * x,
    "no generator": lambda x: x + torch.randn(x.shape, generator=None),
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 2)),
    "a posterior": lambda x: Normal(x, x.exp()).rsample(),
    "its divergence": lambda x: kl_divergence(Normal(x, x.exp()), Normal(0.0, 1.0)),
    "independent": lambda x: Independent(Normal(x, 1.0), 1).rsample(),
    "categories": lambda x: x * Categorical(logits=x).sample().unsqueeze(1),
    "relaxed categories": lambda x: RelaxedOneHotCategorical(torch.tensor(0.5), logits=x).rsample(),
    "uniform between tensors": lambda x: Uniform(x, x + 1).rsample(),
    "Laplace": lambda x: Laplace(x, 1.0).rsample(),
    "Gumbel": lambda x: Gumbel(x, 1.0).rsample(),
    "exponential": lambda x: Exponential(x.exp()).rsample(),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [[*NOISES][k::5] for k in range(5)], ids=", ".join)
def test_ranks_draw_what_one_device_does(names: list[str]) -> None:
    torch.manual_seed(0)
    case = make_case(Noisy(*(NOISES[name] for name in names)), torch.randn(6, 8))
    seen = verdict(case, random_plan(case, 3, 0))
    assert seen.ok, seen.first_bad


X = torch.zeros(100_000)
CALLS: list[tuple[Any, tuple[Any, ...], Callable[[], Tensor]]] = [
    (aten.uniform.default, (X, -1.0, 3.0), lambda: torch.empty_like(X).uniform_(-1, 3)),
    (aten.normal_functional.default, (X, 1.0, 2.0), lambda: torch.empty_like(X).normal_(1, 2)),
    (aten.normal.float_float, (1.0, 2.0, X.shape), lambda: torch.normal(1.0, 2.0, X.shape)),
    (aten.normal.Tensor_float, (X, 2.0), lambda: torch.normal(X, 2.0)),
    (aten.normal.float_Tensor, (1.0, X + 2), lambda: torch.normal(1.0, X + 2)),
    (aten.normal.Tensor_Tensor, (X + 1, X + 2), lambda: torch.normal(X + 1, X + 2)),
    (aten.bernoulli.default, (X + 0.3,), lambda: torch.bernoulli(X + 0.3)),
    (aten.bernoulli.Tensor, (X, X + 0.3), lambda: torch.bernoulli(X + 0.3)),
    (aten.exponential.default, (X, 2.0), lambda: torch.empty_like(X).exponential_(2)),
    (aten.log_normal.default, (X, 0.5, 0.2), lambda: torch.empty_like(X).log_normal_(0.5, 0.2)),
    (aten.cauchy.default, (X, 1.0, 2.0), lambda: torch.empty_like(X).cauchy_(1, 2)),
    (aten.geometric.default, (X, 0.3), lambda: torch.empty_like(X).geometric_(0.3)),
    (aten.randint_like.default, (X, 5), lambda: torch.randint_like(X, 5)),
    (aten.randint_like.low_dtype, (X, 2, 5), lambda: torch.randint_like(X, 2, 5)),
    (aten.randperm.default, (100_000,), lambda: torch.randperm(100_000)),
    (aten.multinomial.default, (X[:4] + torch.arange(4) + 0.5, 1),
     lambda: torch.multinomial(X[:4] + torch.arange(4) + 0.5, 1)),
    (aten.rand.generator, ([100_000],), lambda: torch.rand(100_000)),
    (aten.randn.generator, ([100_000],), lambda: torch.randn(100_000)),
    (aten.randint.generator, (5, [100_000]), lambda: torch.randint(5, [100_000])),
    (aten.randint.low_generator, (2, 5, [100_000]), lambda: torch.randint(2, 5, [100_000])),
    (aten.randperm.generator, (100_000,), lambda: torch.randperm(100_000)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_numbers_have_the_distribution_of_torch(number: int) -> None:
    torch.manual_seed(0)
    op, given, theirs = CALLS[number]
    few = op is aten.multinomial.default
    samples = [
        torch.cat([draw() for _ in range(20_000 if few else 1)]).double().flatten()
        for draw in (lambda: DRAWS[op](*given), theirs)
    ]
    assert samples[0].shape == samples[1].shape and DRAWS[op](*given).dtype == theirs().dtype
    # The distance of two samples' distributions (Kolmogorov-Smirnov).
    both = torch.cat(samples).sort().values
    below = [torch.searchsorted(s.sort().values, both, right=True) / len(s) for s in samples]
    assert (below[0] - below[1]).abs().max() < (0.02 if few else 0.01)


def test_every_operator_of_the_tables_is_tried() -> None:
    assert {op for op, *_ in CALLS} == DRAWS.keys()
    assert set(IN_PLACE.values()) <= set(DRAWS.values())


def test_exponential_numbers_are_never_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_numbers.torch, "rand_like", torch.zeros_like)
    assert DRAWS[aten.exponential.default](torch.zeros(3)).log().isfinite().all()


def test_categories_drawn_again_and_again_are_refused_by_name() -> None:
    model = Noisy(lambda x: x.gather(1, torch.multinomial(x.softmax(-1), 2, True)))
    with pytest.raises(UnsupportedOpError, match=r"aten\.multinomial\.default"):
        make_case(model, torch.randn(6, 8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_kept_elements_are_scaled(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(5, 7, 3, device=device, dtype=dtype).transpose(0, 1)
    mask = torch.rand(7, 5, 3, device=device) > 0.3
    kernel = torch.ops.aten.native_dropout_backward(x, mask, 1.25)  # CUDA's, in each dtype
    for found in (scaled(x, mask, 1.25), kernel):
        torch.testing.assert_close(found, torch.where(mask, x * 1.25, 0.0))
