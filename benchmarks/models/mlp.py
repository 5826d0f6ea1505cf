"""A plain multilayer perceptron that learns to reproduce its input.

The smallest complete model file, and an example of a loss outside of the module:
``forward`` returns an output and ``loss(output, batch)`` turns it into a scalar.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build(features: int = 1024, hidden: int = 4096, layers: int = 6, dropout: float = 0.1):
    """``layers`` linear layers: features -> hidden -> ... -> hidden -> features."""
    widths = [features, *[hidden] * (layers - 1), features]
    stack: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        stack += [nn.Linear(fan_in, fan_out), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*stack[:-2])  # the output is linear


def inputs(size: int = 512, features: int = 1024) -> Tensor:
    return torch.randn(size, features)  # (batch, features)


def loss(output: Tensor, batch: Tensor) -> Tensor:
    return F.mse_loss(output, batch)


def model():
    return build()


def batch():
    return inputs()


def tiny():
    return build(features=21, hidden=48, layers=3, dropout=0.0)


def tiny_batch():
    return inputs(size=12, features=21)


def tiny_dropout():
    return build(features=21, hidden=48, layers=3, dropout=0.2)


tiny_dropout_batch = tiny_batch


def small():
    return build(features=256, hidden=1024, layers=4, dropout=0.0)


def small_double():
    return small().double()


def small_double_batch():
    return inputs(size=192, features=256).double()


def small_batch():
    return inputs(size=192, features=256)


def narrow_double():
    return build(features=32, hidden=64, layers=3, dropout=0.0).double()


def narrow_double_batch():
    return inputs(size=4096, features=32).double()
