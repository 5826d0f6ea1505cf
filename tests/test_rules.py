"""The rule table against brute force: no row is wrong, and what is missing has a reason.

A row is run as it would be in training: one instruction, emitted per rank, on shards that are
narrowed views, on random terms that sum to the whole, with a rank that has no share. What the
ranks hold must add up to what one device computes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from hap.errors import UnsupportedOpError
from hap.graph import Graph, Node
from hap.placement import Placement, P, R, S
from hap.program import Compute, Program
from hap.runtime.context import Context
from hap.runtime.emit import Emitter
from hap.runtime.emulate import EmulatedComm, World
from hap.runtime.localize import RESULT_SHAPE
from hap.synthesizer.rules import RULES, Row, rows_of
from hap.synthesizer.space import build_space
from hap.synthesizer.work import FREE, node_work
from tests.rule_samples import SAMPLES, Sample

RANDOM = {"aten.native_dropout.default"}
UNDEFINED = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
"""Operators whose elements nobody may read before writing them: only shapes are compared."""

Shares = tuple[int, ...]
Local = list[list[Tensor | None]]
"""Per rank, what it holds of every output."""


def cuts(units: int) -> list[Shares]:
    """Uneven shares of 2 and 3 ranks, some of them nothing; no cut at all for 0 units."""
    if not units:
        return [(1, 1, 1)]
    half = units // 2
    return [(half, units - half), (units, 0), (1, 0, units - 1), (units - 1, 1, 0)]


class Case:
    """A sample with its graph and its true values by tensor name."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.graph: Graph = sample.graph()
        (self.node,) = self.graph.nodes
        self.given = sample.tensors
        self.whole = {f"o{k}": t for k, t in enumerate(sample.run()) if t is not None}

    def rows(self) -> list[Row]:
        return rows_of(self.node, self.graph)

    def run(self, row: Row, shares: Shares) -> Local:
        """Emit the row for every rank and run it."""
        values = [*zip(self.node.inputs, row.ins, strict=True)]
        values += [(o, p) for o, p in zip(self.node.outputs, row.outs, strict=True) if o and p]
        step = Compute(node=self.node.name, ins=row.ins, outs=row.outs, backward=False)
        program = Program(
            inputs=dict(zip(self.node.inputs, row.ins, strict=True)),
            instructions=(step,),
            outputs=tuple(p for p in row.outs if p is not None),
            axes={f"{name}:{p.dim}": ("axis", row.units) for name, p in values if p.sharded},
        )
        world = World(len(shares))
        parts = {name: self._split(name, program.inputs[name], row.units, shares) for name in self.given}
        results: Local = []
        for rank in range(world.size):
            emitted = Emitter(
                graph=self.graph, program=program, shares={"axis": shares}, rank=rank,
                device=torch.device("cpu"),
            ).emit()  # fmt: skip
            ctx = Context(EmulatedComm(world, rank))
            made = iter(emitted.forward(ctx, *(parts[name][rank] for name in emitted.inputs)))
            results.append([next(made) if p else None for p in row.outs])
        return results

    def _split(self, name: str, p: Placement, units: int, shares: Shares) -> list[Tensor]:
        """What every rank holds of an input: views of the whole, not made contiguous."""
        x = self.given[name]
        if p == P:
            return terms(x, len(shares))
        if p == R:
            return [x] * len(shares)
        sizes = [s * (x.shape[p.dim] // units) for s in shares]
        starts = itertools.accumulate(sizes, initial=0)
        return [x.narrow(p.dim, at, n) for at, n in zip(starts, sizes, strict=False)]

    def holds(self, k: int, p: Placement, local: Local, units: int, shares: Shares) -> bool:
        """Do the ranks' parts of output ``k`` make up the true result in placement ``p``?"""
        whole = self.whole[f"o{k}"]
        parts = [result[k] for result in local]
        assert all(isinstance(part, Tensor) for part in parts)
        if p.sharded:
            granule = whole.shape[p.dim] // units
            if any(
                t.dim() != whole.dim() or t.shape[p.dim] != s * granule
                for t, s in zip(parts, shares, strict=True)
            ):
                return False
            shapes = {(*t.shape[: p.dim], *t.shape[p.dim + 1 :]) for t in parts}
            return len(shapes) == 1 and self._same(torch.cat(parts, p.dim), whole)
        if p == P:
            same = {t.shape for t in parts} == {whole.shape}
            return same and whole.dtype != torch.bool and self._same(sum(parts), whole)
        return all(self._same(part, whole) for part in parts)

    def _same(self, a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if self.sample.op in UNDEFINED:
            return True
        return torch.allclose(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)

    def wrong(self, row: Row) -> str:
        """Where ``row`` fails, or nothing."""
        for shares in cuts(row.units):
            local = self.run(row, shares)
            for k, p in enumerate(row.outs):
                if p is not None and not self.holds(k, p, local, row.units, shares):
                    return f"{row} with shares {shares} of {row.units}: result {k} is not {p}"
        return ""


def terms(x: Tensor, count: int) -> list[Tensor]:
    """Random tensors of the type of ``x`` that sum to it."""
    random = torch.Generator().manual_seed(count)
    if x.is_floating_point():
        found = [torch.randn(x.shape, dtype=x.dtype, generator=random) for _ in range(count - 1)]
    else:
        found = [torch.randint(-9, 9, x.shape, generator=random).to(x.dtype) for _ in range(count - 1)]
    return [*found, x - sum(found)]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [Case(sample) for sample in SAMPLES]
