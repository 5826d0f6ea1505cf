"""Decomposed operators compute the same as ATen's own; constants keep their values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from hap.capture import decompositions, local_counts, tensor_constants
from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.ir.graph import Dtype
from tests.random_plans import make_case, random_plan, verdict

aten = torch.ops.aten


def f(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same(op: object, *args: object) -> None:
    torch.manual_seed(0)
    found = decompositions.DECOMPOSED[op](*args)
    wanted = op(*args)  # type: ignore[operator]
    pairs = zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
    for mine, theirs in pairs:
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine: bool) -> None:
    x, weight, bias = f(3, 6, 5, 2), f(6) if affine else None, f(6) if affine else None
    same(aten.native_group_norm.default, x, weight, bias, 3, 6, 10, 2, 1e-5)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, 3, 6, 10, 2, 1e-5)
    mask = [True, affine, affine]
    grad = f(3, 6, 5, 2)
    same(aten.native_group_norm_backward.default, grad, x, mean, rstd, weight, 3, 6, 10, 2, mask)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim: int) -> None:
    v = f(4, 3, 5)
    g = f(*(n if d == dim else 1 for d, n in enumerate(v.shape)))
    same(aten._weight_norm_interface.default, v, g, dim)
    _, norm = aten._weight_norm_interface(v, g, dim)
    same(aten._weight_norm_interface_backward.default, f(4, 3, 5), v, g, norm, dim)


class Means(nn.Module):
    """Means of numbers whose sums are beyond float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 96)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + 900
        return (
            (y.mean() + y.float().mean(1, dtype=y.dtype) - y.mean(0).mean()).float().square().sum()
        )


@pytest.mark.parametrize(("dtype", "middle"), [(torch.float16, 900), (torch.bfloat16, 0)])
def test_means_of_halves_are_summed_in_float32(dtype: torch.dtype, middle: float) -> None:
    torch.manual_seed(0)
    x = middle + torch.randn(48, 96).to(dtype)
    for dims in ([], [0], [0, 1]):
        made = local_counts.DECOMPOSITIONS[aten.mean.dim](x, dims)
        torch.testing.assert_close(made, x.mean(dims), rtol=0, atol=0)
    wide = local_counts.DECOMPOSITIONS[aten.mean.default](x.float(), dtype=dtype)
    torch.testing.assert_close(wide, x.mean(), rtol=0, atol=0)
    case = make_case(Means().to(dtype), torch.randn(48, 4).to(dtype))
    for world in (2, 3):
        found = verdict(case, random_plan(case, world, seed=1))
        assert found.ok, found.first_bad


@pytest.mark.parametrize(
    ("pixels", "out"), [((1, 1), (7, 7)), ((2, 3), (4, 9)), ((2, 3), (2, 6)), ((3, 3), (3, 3))]
)
def test_adaptive_pooling_to_a_multiple_of_the_pixels(
    pixels: tuple[int, int], out: tuple[int, int]
) -> None:
    for planes in ((2, 3), (3,)):
        x = f(*planes, *pixels)
        same(aten._adaptive_avg_pool2d.default, x, list(out))
        same(aten._adaptive_avg_pool2d_backward.default, f(*planes, *out), x)


def test_adaptive_pooling_to_other_sizes_keeps_the_kernel() -> None:
    forward = decompositions.DECOMPOSED[aten._adaptive_avg_pool2d.default]
    backward = decompositions.DECOMPOSED[aten._adaptive_avg_pool2d_backward.default]
    assert forward(f(2, 3, 4, 4), [7, 7]) is NotImplemented
    assert forward(f(2, 3, 7, 4), [7, 2]) is NotImplemented
    assert backward(f(2, 3, 7, 7), f(2, 3, 4, 4)) is NotImplemented


class Pooled(nn.Module):
    """Repeats pixels; then leaves their number, and changes the result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 6, 3, stride=2)
        self.repeat, self.keep = nn.AdaptiveAvgPool2d((4, 6)), nn.AdaptiveAvgPool2d((4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.repeat(self.layer(x))
        z = self.keep(y).mul_(2).relu_()
        return (y * z).square().sum()


def test_pooling_that_repeats_pixels_in_random_plans() -> None:
    case = make_case(Pooled().double(), f(6, 2, 6, 7))
    assert not any("pool" in node.op for node in case.graph.nodes)
    for world in (2, 3):
        found = verdict(case, random_plan(case, world, seed=1))
        assert found.ok, found.first_bad


@pytest.mark.parametrize("repeats", [[2, 3], [1, 1], [4, 1, 3]])
def test_repeat(repeats: list[int]) -> None:
    same(aten.repeat.default, f(2, 5), repeats)


def test_any_view_of_what_is_repeated_can_be_taken() -> None:
    repeated = decompositions.DECOMPOSED[aten.repeat.default](f(1, 4, 3), [6, 1, 1])
    assert repeated.view(24, 3).shape == (24, 3)


def test_looks_by_strides_are_views_or_not_known() -> None:
    same(aten.as_strided.default, f(6, 4, 1, 1), [6, 4, 1, 1], [4, 1, 4, 4])
    same(aten.as_strided.default, f(24), [6, 4], [4, 1], 0)
    same(aten.as_strided_scatter.default, f(24), f(6, 4), [6, 4], [4, 1], 0)
    strided = decompositions.DECOMPOSED[aten.as_strided.default]
    assert strided(f(24), [4, 6], [1, 4]) is NotImplemented
    assert strided(f(24), [3, 4], [4, 1], 2) is NotImplemented
    assert strided(f(6, 4).t(), [24], [1]) is NotImplemented


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([torch.tensor([]), self.layer(x)], -1)
        x = x * torch.tensor([0.1, 2.0, -3.0]) + torch.tensor(0.3) + torch.tensor([[1, 1, 1]])
        return x[:, torch.tensor([2, 0])].square().sum()


def test_tensors_of_python_data_are_constants_of_the_program() -> None:
    graph = capture(Constants(), torch.randn(5, 4))
    kept = [node for node in graph.nodes if node.op == "hap.constant.default"]
    assert [(n.args[0], n.args[1], dict(n.kwargs)["dtype"]) for n in kept] == [
        ((0.1, 2.0, -3.0), (3,), Dtype("float32")), ((2.0, 0.0), (2,), Dtype("int64")),
    ]  # fmt: skip
    assert not any(node.op == "aten.cat.default" for node in graph.nodes)
    case = make_case(Constants(), torch.randn(5, 4))
    for world in (2, 3):
        assert verdict(case, random_plan(case, world, seed=1)).ok


@pytest.mark.parametrize(
    "data", [[], [[], []], 3, 2.5, True, [[1, 2], [3, 4]], [1, 2.5], [[True], [False]]]
)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.int64])
def test_a_constant_is_what_torch_makes_of_the_data(
    data: object, dtype: torch.dtype | None
) -> None:
    mine, theirs = tensor_constants.tensor(data, dtype=dtype), torch.tensor(data, dtype=dtype)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_large_constants_are_refused() -> None:
    with pytest.raises(ModelError, match="70000 elements"):
        tensor_constants.tensor(list(range(70_000)))


class Hinted(nn.Module):
    """A model with hints that capture ignores: a causal mask, and gradients of an input."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.conv = weight_norm(nn.Conv1d(5, 5, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        x.requires_grad = True
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return (self.encoder(x, mask) + self.conv(x)).square().sum()


@pytest.mark.slow
def test_hints_are_ignored() -> None:
    case = make_case(Hinted(), torch.randn(4, 5, 8))
    assert verdict(case, random_plan(case, 3, seed=1)).ok


class OneKey(nn.Module):
    """Attention whose heads share one key by broadcasting; every head has its own values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, v = (layer(x).unflatten(-1, (4, 2)).transpose(1, 2) for layer in (self.q, self.v))
        key = self.k(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, key, v).square().sum()


def test_attention_broadcasts_its_heads() -> None:
    case = make_case(OneKey(), torch.randn(4, 5, 8))
    for world in (2, 3):
        assert verdict(case, random_plan(case, world, seed=1)).ok
