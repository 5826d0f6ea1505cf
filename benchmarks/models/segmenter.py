"""A residual network with batch norm that labels each pixel: its last features are resized.

The blocks are those of ResNet (He et al., 2015), the head that of FCN (Long et al., 2014).
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _convolution(width_in: int, width: int, stride: int = 1, size: int = 3) -> nn.Sequential:
    convolution = nn.Conv2d(width_in, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int):
        super().__init__()
        self.first = _convolution(width_in, width, stride)
        self.second = _convolution(width, width)
        self.beside = _convolution(width_in, width, stride, size=1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, width_in, height, width) -> (batch, width, height / stride, width / stride)."""
        return F.relu(self.second(F.relu(self.first(x))) + self.beside(x))


class Segmenter(nn.Module):
    def __init__(self, widths: tuple[int, ...], classes: int, dropout: float):
        super().__init__()
        self.stem = _convolution(3, widths[0], stride=2)
        pairs = itertools.pairwise(widths)
        self.blocks = nn.Sequential(*(Block(before, width, 2) for before, width in pairs))
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Conv2d(widths[-1], classes, 1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """images: (batch, 3, h, w), labels: (batch, h, w). Returns the mean cross entropy."""
        scores = self.head(self.blocks(F.relu(self.stem(images))))
        full = F.interpolate(scores, images.shape[-2:], mode="bilinear")
        return F.cross_entropy(full, labels)


def build(
    widths: tuple[int, ...] = (64, 64, 128, 256, 512), classes: int = 21, dropout: float = 0.0
) -> Segmenter:
    return Segmenter(widths, classes, dropout)


def inputs(size: int = 16, image: int = 224, classes: int = 21):
    return torch.randn(size, 3, image, image), torch.randint(classes, (size, image, image))


def model():
    return build()


def batch():
    return inputs()


def tiny():
    return build(widths=(6, 9, 12), classes=5)


def tiny_batch():
    return inputs(size=12, image=16, classes=5)


def tiny_dropout():
    return build(widths=(6, 9, 12), classes=5, dropout=0.2)


tiny_dropout_batch = tiny_batch
