"""An entry of the table of architectures, and its construction from transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.zoo.optional import package

Built = tuple[nn.Module, Any]
"""A module in training mode, and one global batch for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An architecture.

    Attributes:
        name: of the entry, unique.
        family: the group that it is listed in.
        brings: what it has that others in the table lack.
        tiny, full: build it small enough to run, and as it was published.
        loss: ``loss(output, batch)``, if the forward returns none.
        requires: the optional package that it is of; empty: torch alone.
        fixed: entries of the batch that are the same in every batch.
    """

    name: str
    family: str
    brings: str
    tiny: Callable[[], Built]
    full: Callable[[], Built]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    requires: str = ""
    fixed: tuple[str, ...] = ()


def pretrained(
    name: str,
    family: str,
    brings: str,
    model: str,
    config: str,
    batch: Callable[[Any, int], Any],
    *,
    tiny: Mapping[str, Any],
    full: Mapping[str, Any] | None = None,
    both: Mapping[str, Any] | None = None,
    rows: tuple[int, int] = (6, 64),
    fixed: tuple[str, ...] = (),
) -> Entry:
    """An entry for the class ``model`` of transformers, with a ``config`` of its own class.

    Args:
        batch: makes a batch from the configuration and the number of rows.
        tiny, full, both: what the configuration sets; the published model's values are mostly
            the defaults.
        rows: of the tiny and of the full batch.
        fixed: entries of the batch that are the same in every batch.
    """

    def build(options: Mapping[str, Any], count: int) -> Built:
        transformers = package("transformers")
        made = getattr(transformers, config)(**(both or {}), **options)
        return getattr(transformers, model)(made).train(), batch(made, count)

    return Entry(
        name=name,
        family=family,
        brings=brings,
        tiny=partial(build, tiny, rows[0]),
        full=partial(build, full or {}, rows[1]),
        requires="transformers",
        fixed=fixed,
    )
