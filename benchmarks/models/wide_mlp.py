"""A classifier with most of its weights in the last layer: 32k classes over a narrow trunk.

Its gradient of (classes, hidden) is the product of two factors with one row per sample. With
few samples it is cheaper to exchange the factors than the product, or to split the classes.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WideClassifier(nn.Module):
    def __init__(self, features: int, hidden: int, layers: int, classes: int, dropout: float):
        super().__init__()
        widths = [features, *[hidden] * layers]
        self.trunk = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: (batch, features), y: (batch,) class indices. Returns the mean cross entropy."""
        for layer in self.trunk:
            x = self.dropout(F.gelu(layer(x)))
        return F.cross_entropy(self.head(x), y)


def build(
    features: int = 1024,
    hidden: int = 1024,
    layers: int = 2,
    classes: int = 32768,
    dropout: float = 0.1,
):
    return WideClassifier(features, hidden, layers, classes, dropout)


def inputs(size: int = 256, features: int = 1024, classes: int = 32768):
    return torch.randn(size, features), torch.randint(classes, (size,))


def model():
    return build()


def batch():
    return inputs()


def tiny():
    return build(features=21, hidden=48, layers=2, classes=101, dropout=0.0)


def tiny_batch():
    return inputs(size=12, features=21, classes=101)


def tiny_dropout():
    return build(features=21, hidden=48, layers=2, classes=101, dropout=0.2)


tiny_dropout_batch = tiny_batch


def race():
    return build(features=256, hidden=256, layers=2, classes=16384, dropout=0.0)


def race_batch():
    return inputs(size=1024, features=256, classes=16384)


race_x4 = race


def race_x4_batch():
    return inputs(size=4 * 1024, features=256, classes=16384)


race_tiny, race_tiny_batch = tiny, tiny_batch
