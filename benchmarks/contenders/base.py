"""The base of all contenders: construction, batches, steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hap.capture.model_file import ModelFile
from hap.capture.tracing import Step
from hap.capture.user_optimizer import default_optimizer
from hap.ir.batch import call, flatten

IGNORED = -100  # labels that torch's cross entropy excludes from its mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The information that a contender may use.

    Attributes:
        file: The model file.
        speeds: Measured speed of each rank, in any unit.
        devices: Names of the devices of all ranks.
        plan: The plan file, for contenders that run one.
        group: The ranks that take part; all if ``None``. ``speeds`` are those of its ranks.
    """

    file: ModelFile
    speeds: tuple[float, ...] = ()
    devices: tuple[str, ...] = ()
    plan: Path | None = None
    group: dist.ProcessGroup | None = None

    @property
    def world(self) -> int:
        """Number of ranks that take part."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return dist.get_rank(self.group)


class Contender(ABC):
    """One rank of a training method. All ranks construct it, and take each step, together."""

    @abstractmethod
    def __init__(self, setting: Setting) -> None:
        """Build the model with the file's seed, and its optimizer."""

    @abstractmethod
    def step(self, batch: Any) -> float | None:
        """Train on a *global* batch; return its loss, or None on a rank that takes no part."""

    def in_one_thread(self) -> AbstractContextManager[None]:
        """Within this context, the thread that takes a step allocates all of its tensors."""
        return nullcontext()


def built(file: ModelFile) -> nn.Module:
    """Return the file's model, with the same weights on all ranks."""
    torch.manual_seed(file.seed)
    return file.model()


def optimizer(file: ModelFile, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the file's optimizer, or the default one, for the trainable parameters."""
    return (file.optimizer or default_optimizer)([p for p in parameters if p.requires_grad])


def as_step(file: ModelFile, module: nn.Module, batch: Any) -> Step:
    """Wrap the module as a function from a flat batch to the loss."""
    return Step(module, batch, file.loss)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, weight: float = 1.0
) -> Tensor:
    """Train one step of a module made by :func:`as_step`; return the loss, scaled by ``weight``."""
    optimizer.zero_grad()
    loss: Tensor = call(module, tuple(flatten(batch).values())) * weight
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


class EqualRows(Contender):
    """Each rank takes the same number of rows; the loss is the mean of the ranks' means."""

    _setting: Setting
    _step: nn.Module
    _optimizer: torch.optim.Optimizer

    def step(self, batch: Any) -> float:
        counts = even(size_of(batch), self._setting.world)
        mine = rows_of(batch, counts, self._setting.rank)
        return mean_over_ranks(train(self._step, self._optimizer, mine), self._setting)


def mean_over_ranks(loss: Tensor, setting: Setting) -> float:
    """Return the mean of a scalar over all ranks that take part."""
    total = loss.clone()
    dist.all_reduce(total, group=setting.group)
    return total.item() / setting.world


def mesh_of(setting: Setting) -> DeviceMesh:
    """Return the mesh of one axis of all ranks that take part."""
    return DeviceMesh.from_group(setting.group or dist.group.WORLD, "cpu")


def rows_of(batch: Any, counts: Sequence[int], rank: int) -> Any:
    """Return this rank's rows of a global batch; dim 0 of every tensor is the batch."""

    def cut(t: Tensor) -> Tensor:
        return t.split(list(counts))[rank]

    return _each(batch, cut)


def even(rows: int, ranks: int) -> tuple[int, ...]:
    """Return the rows of each rank, equal to within one."""
    return tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks))


def proportional(rows: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the rows of each rank in proportion to speed, at least one each: a mean needs a row.

    Rows that remain after rounding down go, one by one, to the rank with the least time
    ``(rows + 1) / speed``.

    Raises:
        ValueError: there are fewer rows than ranks.
    """
    if rows < len(speeds):
        raise ValueError(f"{rows} rows are fewer than the {len(speeds)} ranks")
    counts = [max(1, int(rows * speed / sum(speeds))) for speed in speeds]
    while sum(counts) != rows:
        short = sum(counts) < rows
        change = 1 if short else -1
        movable = [r for r, n in enumerate(counts) if short or n > 1]
        pick = min if short else max
        counts[pick(movable, key=lambda r: (counts[r] + (change > 0)) / speeds[r])] += change
    return tuple(counts)


def size_of(batch: Any) -> int:
    """Return the number of rows of a batch: the first dim of its first tensor."""
    return next(iter(flatten(batch).values())).shape[0]


def terms(batch: Any) -> int:
    """Return the number of terms of a batch's mean loss: counted labels, or else rows."""
    labels = batch.get("labels") if isinstance(batch, dict) else None
    return size_of(batch) if labels is None else int((labels != IGNORED).sum())


def _each(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, dict):
        return {k: function(v) for k, v in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map(function, batch))
    return function(batch)
