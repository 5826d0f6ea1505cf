"""The cells of the race, in the order in which they are raced."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

MODELS = ("vit", "bert", "vgg19", "wide_mlp", "gpt2", "bert_moe")
CLUSTERS = ("4411", "paper", "two_sites", "three_kinds", "even", "little_memory", "straggler")
MORE_ROWS = 4
"""The paper trained 32 rows per GPU; the race's models have 32 rows for all four ranks."""


class Slot(NamedTuple):
    """A cell to race: ``rows`` times the model's rows; ``run`` counts runs of the same cell.

    Each run profiles and plans anew.
    """

    model: str
    cluster: str
    rows: int = 1
    run: int = 1

    @property
    def variant(self) -> str:
        """What distinguishes the cell from others of its model and cluster; may be empty."""
        rows = f" with {self.rows}x the rows" if self.rows > 1 else ""
        return rows + (f", run {self.run}" if self.run > 1 else "")

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}{self.variant}"


REPEATED = (Slot("vit", "4411"), Slot("bert", "two_sites"), Slot("vit", "paper"))
"""Raced :data:`RUNS` times, from profile to step, to show how figures vary."""
RUNS = 3

_MAIN = ("two_sites", "paper", "4411")

_TELLING: tuple[Slot, ...] = (
    *(Slot(m, "two_sites") for m in ("vit", "bert", "vgg19")),
    *(Slot(m, "paper") for m in ("vit", "bert")),
    *(Slot(m, "4411") for m in ("vit", "bert", "vgg19", "wide_mlp")),
    *(Slot("vit", c, rows=MORE_ROWS) for c in _MAIN),
    *(Slot(m, "even") for m in ("vit", "bert")),
    *(s._replace(run=run) for run in range(2, RUNS + 1) for s in REPEATED),
    Slot("vit", "three_kinds"),
)

AGENDA = tuple(dict.fromkeys((
    *_TELLING,
    *(Slot(m, c) for c, m in product((*_MAIN, "even", "three_kinds"), MODELS[:4])),
    *(Slot("wide_mlp", c, rows=MORE_ROWS) for c in _MAIN),
    *(Slot(m, c) for c, m in product(("4411", "two_sites"), MODELS[4:])),
    Slot("vit", "three_kinds", rows=MORE_ROWS),
    *(Slot(m, c) for c, m in product(("little_memory", "straggler"), ("vit", "wide_mlp"))),
)))  # fmt: skip
"""The most telling cells first: a race that may not take longer leaves the last ones out."""


def chosen(models: tuple[str, ...] | None, clusters: tuple[str, ...] | None) -> tuple[Slot, ...]:
    """Return the slots of some models on some clusters; pairs that are in no slot are added."""
    if models is None and clusters is None:
        return AGENDA
    models, clusters = models or MODELS, clusters or CLUSTERS
    found = [slot for slot in AGENDA if slot.model in models and slot.cluster in clusters]
    found += [Slot(m, c) for c, m in product(clusters, models)]
    return tuple(dict.fromkeys(found))
