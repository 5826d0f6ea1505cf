"""Entries for the models of torchvision and timm, which are optional packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Built, Entry

CLASSES = 7
"""Of a tiny model."""


class Trained(nn.Module):
    """A model with the loss of its logits: of one class per image or video, or per pixel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.model(x)
        if isinstance(out, Mapping):
            out = out["out"]
        elif isinstance(out, tuple):  # with auxiliary heads, as GoogLeNet has
            return torch.stack([F.cross_entropy(logits, labels) for logits in out]).sum()
        return F.cross_entropy(out, labels)


def packaged(
    origin: str, name: str, brings: str, make: Callable[..., nn.Module], tiny: Mapping[str, Any],
    shapes: tuple[tuple[int, ...], tuple[int, ...]], rows: tuple[int, int], *,
    pixels: bool = False, both: Mapping[str, Any] | None = None,
    published: Mapping[str, Any] | None = None, classes: int = 1000, called: bool = False,
) -> Entry:  # fmt: skip
    """An entry for a model of a package.

    Args:
        origin: the package.
        make: builds the model from options.
        tiny, published, both: options of the tiny model, of the full one, and of both.
        shapes: of one input of the tiny and of the full model.
        rows: of their batches.
        pixels: is there a label per pixel?
        called: call the model once, which makes its buffers.
    """

    def build(
        options: Mapping[str, Any], classes: int, shape: tuple[int, ...], count: int
    ) -> Built:
        model = make(num_classes=classes, **(both or {}), **options)
        if called:
            model(torch.zeros(1, *shape))
        labels = torch.randint(classes, (count, *shape[-2:]) if pixels else (count,))
        return Trained(model).train(), (torch.randn(count, *shape), labels)

    return Entry(
        name=name, family=origin, brings=brings,
        tiny=partial(build, tiny, CLASSES, shapes[0], rows[0]),
        full=partial(build, published or {}, classes, shapes[1], rows[1]), requires=origin,
    )  # fmt: skip
