"""Pipelines: 1F1B of ``torch.distributed.pipelining``, and one written by hand.

Each stage is one device. The hand-written one keeps more microbatches in flight than 1F1B, so that
transfers over slow links overlap computing.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.contenders.base import Contender, Setting, built, even, optimizer, size_of
from benchmarks.contenders.chains import chain, cut, shapes
from hap.ir.batch import flatten

MICROBATCHES = 8
"""Parts of a batch, at most."""


class _Pipelined(Contender):
    """A stage of a chain on each rank."""

    by_speed = False
    """Stages get work in proportion to their devices' speeds."""

    def __init__(self, setting: Setting) -> None:
        file, world = setting.file, setting.world
        whole, batch = chain(built(file)), file.batch()
        rows = size_of(batch)
        self._parts = math.gcd(rows, MICROBATCHES)
        if self._parts == 1:
            raise ValueError(f"{rows} rows cannot be split into 2 to {MICROBATCHES} equal parts")
        found, work = shapes(whole.layers, batch)
        speeds = setting.speeds if self.by_speed else (1.0,) * world
        edges = (0, *cut(work, speeds), len(work))
        stages = [whole.layers[a:b] for a, b in itertools.pairwise(edges)]
        self._group = setting.group
        self._ranks = dist.get_process_group_ranks(setting.group)
        self._place, self._last = setting.rank, world - 1
        self._tied = [
            (p, [self._ranks[k] for k in at if k != self._place])
            for p, at in _shared(stages) if self._place in at
        ]  # fmt: skip
        self._loss, self._module = whole.loss, nn.Sequential(*stages[self._place])
        self._optimizer = optimizer(file, list(self._module.parameters()))
        example = next(iter(flatten(batch).values()))
        first, last = edges[self._place], edges[self._place + 1]
        part = rows // self._parts
        self._takes = (part, *found[first - 1][1:]) if first else (part, *example.shape[1:])
        self._gives = (part, *found[last - 1][1:])
        self._dtype = example.dtype if not first else next(self._module.parameters()).dtype
        self._build()

    def _build(self) -> None:
        """Make what a step needs."""

    def _pass(self, x: Tensor, labels: Tensor) -> float:
        """Compute all gradients of a batch; return its loss, or 0 if another stage has it."""
        raise NotImplementedError

    def step(self, batch: Any) -> float:
        self._optimizer.zero_grad()
        x, *_, labels = flatten(batch).values()
        loss = torch.tensor(self._pass(x, labels))
        for parameter, others in self._tied:
            self._sum(parameter, others)
        self._optimizer.step()
        dist.broadcast(loss, self._ranks[-1], group=self._group)
        return loss.item()

    def _sum(self, parameter: nn.Parameter, others: list[int]) -> None:
        """Add the gradients that other stages have of a tied parameter."""
        own = parameter.grad
        assert own is not None
        theirs = [torch.empty_like(own) for _ in others]
        moves = [dist.isend(own, rank, group=self._group) for rank in others]
        moves += [dist.irecv(t, r, group=self._group) for t, r in zip(theirs, others, strict=True)]
        for move in moves:
            assert move is not None
            move.wait()
        parameter.grad = own + sum(theirs)


def _shared(stages: list[tuple[nn.Module, ...]]) -> list[tuple[nn.Parameter, list[int]]]:
    """Return the parameters of several stages, with these stages; the same list on all ranks."""
    at: dict[nn.Parameter, list[int]] = {}
    for number, layers in enumerate(stages):
        for parameter in nn.Sequential(*layers).parameters():
            at.setdefault(parameter, []).append(number)
    return [(p, numbers) for p, numbers in at.items() if len(numbers) > 1]


class _Torch(_Pipelined):
    """``Schedule1F1B`` of ``torch.distributed.pipelining``."""

    def _build(self) -> None:
        takes = torch.zeros(self._takes, dtype=self._dtype)
        gives = torch.zeros(self._gives)
        if takes.is_floating_point() and self._place:
            takes.requires_grad_()
        stage = PipelineStage(
            self._module, self._place, self._last + 1, torch.device("cpu"),
            input_args=(takes,), output_args=(gives.requires_grad_(),), group=self._group,
        )  # fmt: skip
        self._schedule = Schedule1F1B(stage, self._parts, loss_fn=self._loss)

    def _pass(self, x: Tensor, labels: Tensor) -> float:
        losses: list[Tensor] = []
        given = () if self._place else (x,)
        if self._place == self._last:
            self._schedule.step(*given, target=labels, losses=losses)
            return float(torch.stack(losses).mean().detach())
        self._schedule.step(*given)
        return 0.0


class EvenPipeline(_Torch):
    """The layers split evenly."""


class SpeedPipeline(_Torch):
    """The layers split in proportion to speed."""

    by_speed = True


class HandPipeline(_Pipelined):
    """The layers split evenly, two microbatches in flight per stage that follows."""

    def _pass(self, x: Tensor, labels: Tensor) -> float:
        before, after = (
            self._ranks[k] if 0 <= k <= self._last else None
            for k in (self._place - 1, self._place + 1)
        )
        rows, tags = even(size_of(x), self._parts), range(self._parts)
        inputs, targets = x.split(list(rows)), labels.split(list(rows))
        arriving: list[tuple[Tensor, Any]] = []
        returning: list[tuple[Tensor, Any]] = []
        if before is not None:
            arriving = [_receive(self._takes, before, t, self._group) for t in tags]
        if after is not None:
            returning = [_receive(self._gives, after, self._parts + t, self._group) for t in tags]
        sent, live, total = [], dict[int, tuple[Tensor, Tensor]](), 0.0

        def forward(number: int) -> None:
            nonlocal total
            taken = inputs[number]
            if arriving:
                taken, work = arriving[number]
                work.wait()
                taken.requires_grad_()
            out = self._module(taken)
            if after is None:
                out = self._loss(out, targets[number]) / self._parts
                total += float(out.detach())
            else:
                held = out.detach().contiguous()
                sent.append((held, dist.isend(held, after, self._group, number)))
            live[number] = taken, out

        def backward(number: int) -> None:
            taken, out = live.pop(number)
            gradient = None
            if returning:
                gradient, work = returning[number]
                work.wait()
            torch.autograd.backward(out, gradient)
            if before is not None:
                assert taken.grad is not None
                held = taken.grad.contiguous()
                sent.append((held, dist.isend(held, before, self._group, self._parts + number)))

        ahead = min(self._parts, 2 * (self._last - self._place) + 1)
        for number in range(ahead):
            forward(number)
        for number in range(self._parts):
            backward(number)
            if number + ahead < self._parts:
                forward(number + ahead)
        for _, work in sent:
            work.wait()
        return total


def _receive(shape: tuple[int, ...], source: int, tag: int, group: Any) -> tuple[Tensor, Any]:
    into = torch.empty(shape)
    return into, dist.irecv(into, source, group, tag)
