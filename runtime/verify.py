"""Does a program compute what one device would? Losses, gradients, and steps of training.

The ranks run in one process (:mod:`hap.runtime.emulate`) or as real ones; the reference is
the user's own module, untouched. Errors are relative to the largest entry of the reference
tensor, or to a thousandth of the largest of its kind where that is more: a gradient that
should vanish (of a key's bias in attention, say) is all rounding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hap import torch_private
from hap.capture import Batch, Loss, Step, flatten
from hap.optimizer import MakeOptimizer
from hap.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.module import HapModule
from hap.runtime.shard import join
from hap.runtime.trace import first_difference

STEPS = 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
FLOOR = 1e-3
"""Part of the largest tensor of a kind under which errors are no longer relative to a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One compared tensor: ``what`` is ``loss``, ``gradient`` or ``parameter after 3 steps``."""

    tensor: str
    what: str
    error: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All comparisons; ``first_bad`` is the first tensor in program order that differs."""

    rows: tuple[Row, ...]
    tolerance: float
    first_bad: str | None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


Observed = dict[str, dict[str, Tensor]]
"""``loss``, ``gradient`` and ``parameter`` -> name -> tensor (a shard, on a rank)."""


def verify(
    plan: Plan, model: nn.Module, batch: Batch, loss: Loss | None, optimizer: MakeOptimizer, *,
    dtype: str = "float64", run: Callable[[int, Callable[[Comm], Any]], list[Any]] = run_ranks,
) -> Verdict:  # fmt: skip
    """Compare the plan's program on all ranks with the module on one device.

    Args:
        model, batch: real, on the CPU; parameters should be random. Not modified.
        run: runs a function of a :class:`Comm` on every rank; emulated by default.
    """
    widen = dtype == "float64"
    observer = Observer.make(plan, model, batch, optimizer, dtype)
    model, batch = observer.model, observer.batch
    expected = observe_reference(model, batch, loss, optimizer)
    ranks = run(plan.world_size, observer)
    rows = compare(plan, expected, ranks, TOLERANCE[dtype])
    bad = None
    if not all(row.ok for row in rows):
        bad = first_difference(plan, model, batch, widen=widen, tolerance=TOLERANCE[dtype])
        bad = bad or next(row.tensor for row in rows if not row.ok)
    return Verdict(rows=rows, tolerance=TOLERANCE[dtype], first_bad=bad)


@dataclass(frozen=True, slots=True)
class Observer:
    """Runs one rank and reports what it saw. Dropout is off: no two masks could agree."""

    plan: Plan
    model: nn.Module
    batch: Batch
    optimizer: MakeOptimizer
    widen: bool

    @staticmethod
    def make(
        plan: Plan, model: nn.Module, batch: Batch, optimizer: MakeOptimizer, dtype: str
    ) -> Observer:
        """An observer of copies in ``dtype`` with noise on all parameters."""
        widen = dtype == "float64"
        return Observer(plan, prepared(model, widen), _cast(batch, widen), optimizer, widen)

    def __call__(self, comm: Comm) -> Observed:
        module = HapModule(self.plan, self.model, comm, torch.device("cpu"), widen=self.widen)
        module.eval()
        entries = flatten(self.plan.local_batch(self.batch, comm.rank))
        if "*" in entries:
            return _observe(module, lambda: module(entries["*"]), self.optimizer)
        names = all(name.isdigit() for name in entries)
        call = (lambda: module(*entries.values())) if names else (lambda: module(**entries))
        return _observe(module, call, self.optimizer)


def observe_reference(
    model: nn.Module, batch: Batch, loss: Loss | None, optimizer: MakeOptimizer
) -> Observed:
    """What one device computes: the user's module in plain PyTorch."""
    twin = copy.deepcopy(model)
    step = Step(twin, batch, loss)
    tensors = tuple(flatten(batch).values())
    with reference_mode(next(twin.parameters()).dtype == torch.float64):
        return _observe(twin, lambda: step(*tensors), optimizer)


@contextlib.contextmanager
def reference_mode(widen: bool) -> Iterator[None]:
    """Plain PyTorch with dropout off and, if ``widen``, float64 wherever code names float32.

    Models cast to float32 where half precision would hurt; at double precision those casts
    would be the only rounding left, and the reference the less exact of the two.
    """
    aten = torch.ops.aten

    class Reference(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            def wide(x: Any) -> Any:
                return torch.float64 if widen and x is torch.float32 else x

            if func is aten.native_dropout.default:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            if func is aten.bernoulli_.float:  # noise that keeps p: scaled by 1/p, it is 1
                return args[0].fill_(args[1] if len(args) > 1 else 0.5)
            return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if widen else before)
    try:
        with Reference():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def _observe(module: nn.Module, call: Callable[[], Tensor], optimizer: MakeOptimizer) -> Observed:
    updates = optimizer([p for p in module.parameters() if p.requires_grad])
    losses: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        updates.zero_grad()
        loss = call()
        loss.backward()
        losses[f"loss of step {step + 1}"] = loss.detach().clone()
        if step == 0:
            gradients = {
                n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None
            }
        updates.step()
    state = {n: t.detach().clone() for n, t in module.named_parameters()}
    state |= {n: t.detach().clone() for n, t in module.named_buffers() if t.is_floating_point()}
    return {"loss": losses, "gradient": gradients, "parameter": state}


def compare(
    plan: Plan, expected: Observed, ranks: list[Observed], tolerance: float
) -> tuple[Row, ...]:
    """One row per loss, gradient and trained tensor, in program order."""
    tensors = {i.target: i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")}
    rows = []
    for what, label in (
        ("loss", "loss"), ("gradient", "gradient"), ("parameter", f"after {STEPS} steps"),
    ):  # fmt: skip
        largest = max(
            (float(t.abs().max()) for t in expected[what].values() if t.numel()), default=0
        )
        for name, reference in expected[what].items():
            parts = [seen[what].get(name) for seen in ranks]
            given = [p for p in parts if p is not None]
            wholes = None
            if len(given) == len(parts):
                wholes = join(plan, tensors[name], given) if name in tensors else given
            error = _error(wholes, reference, largest * FLOOR)
            rows.append(Row(tensor=name, what=label, error=error, ok=error <= tolerance))
    return tuple(rows)


def _error(wholes: list[Tensor] | None, reference: Tensor, floor: float) -> float:
    """Largest difference of the replicas, relative; infinite if there are none."""
    if wholes is None:
        return float("inf")
    scale = max(float(reference.abs().max()) if reference.numel() else 0.0, floor, 1e-300)
    worst = 0.0
    for whole in wholes:
        if whole.shape != reference.shape:
            return float("inf")
        difference = (whole.double() - reference.double()).abs()
        error = float(difference.max()) / scale if difference.numel() else 0.0
        worst = max(worst, error if error == error else float("inf"))
    return worst


def prepared(model: nn.Module, widen: bool) -> nn.Module:
    """A copy with noise on every parameter: a bias of zeros would hide a wrong sum."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.02 * noise.to(parameter.dtype))
    return twin.double() if widen else twin


def _cast(batch: Batch, widen: bool) -> Batch:
    def cast(entry: Any) -> Any:
        return entry.double() if widen and entry.is_floating_point() else entry

    if isinstance(batch, Mapping):
        return {k: cast(v) for k, v in batch.items()}
    return type(batch)(map(cast, batch)) if isinstance(batch, tuple | list) else cast(batch)
