"""The kernels of torch that batch norm's operators call give the numbers of their formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hap.capture import batch_norm as norm

SHAPES = [(9, 5), (4, 5, 7), (4, 5, 3, 6), (2, 5, 3, 4, 6), (0, 5, 3, 6), (4, 0, 3, 6)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
COUNT = 40


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_and_formulas_agree(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    channels, wide = shape[1], torch.float64 if dtype == torch.float64 else torch.float32
    x, grad = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    mean, total, weighted = (torch.randn(channels, dtype=wide, device=device) for _ in range(3))
    invstd = torch.rand(channels, dtype=wide, device=device) + 0.5
    weight, bias = (torch.rand(channels, device=device).to(dtype) for _ in range(2))

    others = [d for d in range(len(shape)) if d != 1]
    m, i, w, b, t, p = (
        v.double().view(-1, *(1 for _ in shape[2:]))
        for v in (mean, invstd, weight, bias, total, weighted)
    )
    centred, slope = x.double() - m, grad.double()
    expected = [
        x.double().sum(others) / COUNT, centred.square().sum(others) / COUNT,
        centred * i * w + b, slope.sum(others),
        (slope * centred * i).sum(others), i * w * (slope - t / COUNT - centred * i * p / COUNT),
    ]  # fmt: skip
    dtypes = [wide, wide, dtype, wide, wide, dtype]
    for values, gradient in itertools.product(layouts(x), layouts(grad)):
        found = [
            norm.channel_mean(values, COUNT), norm.channel_variance(values, mean, COUNT),
            norm.normalize(values, mean, invstd, weight, bias),
            *norm.normalize_sums(gradient, values, mean, invstd),
            norm.normalize_backward(
                gradient, values, mean, invstd, weight, total, weighted, COUNT
            ),
        ]  # fmt: skip
        for ours, wanted, kind in zip(found, expected, dtypes, strict=True):
            assert ours.dtype == kind
            scale = float(wanted.abs().max()) if wanted.numel() else 1.0
            torch.testing.assert_close(
                ours.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale
            )


def layouts(x: Tensor) -> list[Tensor]:
    """Return ``x``, a view of a larger tensor with its values, and ``x`` with its channels last."""
    larger = torch.cat([x, x], 1)[:, : x.shape[1]]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return [x, larger, *([x.contiguous(memory_format=last)] if last else [])]


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_whole_batch_has_one_term(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    others = [d for d in range(len(shape)) if d != 1]
    count = x.numel() // shape[1]
    mean = norm.channel_mean(x, count)
    torch.testing.assert_close(mean, x.mean(others))
    found = norm.channel_variance(x, mean, count)
    torch.testing.assert_close(found, x.var(others, correction=0))
