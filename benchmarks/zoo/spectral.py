"""Models that compute with Fourier transforms."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Built, Entry, pretrained
from benchmarks.zoo.text import masked


class SpectralConvolution(nn.Module):
    """Products of the lowest frequencies with complex weights, which are kept as real pairs."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low, self.high = (
            nn.Parameter(torch.rand(width, width, modes, modes, 2) / width**2) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out, m = torch.zeros_like(spectrum), self.modes
        for rows, weight in ((slice(0, m), self.low), (slice(-m, None), self.high)):
            numbers = torch.view_as_complex(weight)
            out[:, :, rows, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, rows, :m], numbers)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class FourierOperator(nn.Module):
    """A Fourier neural operator in two dimensions (Li et al., ICLR 2021)."""

    def __init__(self, width: int, modes: int, layers: int) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, width, 1)
        self.spectral = nn.ModuleList(SpectralConvolution(width, modes) for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(layers))
        self.project = nn.Sequential(
            nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, 1, 1)
        )

    def forward(self, coefficients: Tensor, solution: Tensor) -> Tensor:
        n = coefficients.shape[-1]
        line = torch.linspace(0, 1, n, device=coefficients.device, dtype=coefficients.dtype)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij"))
        x = torch.cat([coefficients, grid.expand(len(coefficients), 2, n, n)], 1)
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return F.mse_loss(self.project(x), solution)


def darcy_flow(width: int, modes: int, layers: int, rows: int, grid: int) -> Built:
    fields = [torch.rand(rows, 1, grid, grid) for _ in range(2)]
    return FourierOperator(width, modes, layers), {"coefficients": fields[0], "solution": fields[1]}


SPECTRAL = (
    Entry(
        name="fno", family="torch", brings="Fourier transforms, products of complex numbers",
        tiny=partial(darcy_flow, 6, 3, 2, 6, 10), full=partial(darcy_flow, 32, 12, 4, 64, 85),
    ),
    pretrained(
        "fnet", "encoder", "Fourier transforms in place of attention",
        "FNetForMaskedLM", "FNetConfig", masked,
        tiny={"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40,
              "max_position_embeddings": 32},
    ),
)  # fmt: skip
