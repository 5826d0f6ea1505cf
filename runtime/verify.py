"""Verify a program against one device: losses, gradients, parameters and buffers after training.

The ranks run in one process (:mod:`hap.runtime.emulate`) or as real processes; the reference is
the user's unmodified module. An error is relative to the largest entry of the reference tensor, or
to a thousandth of the largest entry of its kind if that is more: a gradient that is zero in exact
arithmetic (such as that of a key's bias in attention) is pure rounding error. Integers and booleans,
such as the number of batches that a batch norm has tracked, must be equal.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hap.capture import torch_private
from hap.capture.tracing import Loss, Step
from hap.capture.user_optimizer import MakeOptimizer, make_optimizer
from hap.errors import HapError, VerifyError
from hap.ir.batch import Batch, call, each, flatten
from hap.ir.graph_builder import RANDOM
from hap.ir.plan import Plan
from hap.optim import tensor_norms
from hap.runtime.collectives import Comm
from hap.runtime.context import fixed
from hap.runtime.divergence import first_difference
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.shards import join

CPU = torch.device("cpu")
STEPS = 3
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
FLOOR = 1e-3
"""Smallest scale of relative errors, as a fraction of the largest entry of a kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One compared tensor: ``what`` is ``loss``, ``gradient`` or ``parameter after 3 steps``."""

    tensor: str
    what: str
    error: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All comparisons; ``first_bad`` is the first tensor in program order that differs."""

    rows: tuple[ComparisonRow, ...]
    tolerance: float
    first_bad: str | None

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


VANISHES = 500
"""Multiple of the largest gradient's rounding below which a gradient is pure rounding error."""

Observed = dict[str, dict[str, Tensor]]
"""``loss``, ``gradient`` and ``parameter`` -> name -> tensor (a shard, on a rank)."""


def verify(
    plan: Plan, model: nn.Module, batch: Batch, loss: Loss | None, optimizer: MakeOptimizer, *,
    dtype: str = "float64", run: Callable[[int, Callable[[Comm], Any]], list[Any]] = run_ranks,
    backend: str = "eager", device: torch.device = CPU,
) -> Verdict:  # fmt: skip
    """Compare the plan's program on all ranks with the module on one device.

    Args:
        model, batch: real tensors on the CPU; parameters should be random. Not modified.
        run: runs a function of a :class:`Comm` on every rank; default: emulated ranks.
        device: the device of the reference, and of ranks that ``run`` does not place itself.

    Raises:
        VerifyError: a rank failed.
    """
    widen = dtype == "float64"
    observer = Observer.make(plan, model, batch, optimizer, dtype, backend, device)
    model, batch = observer.model, observer.batch
    expected = observe_reference(model, batch, loss, optimizer, device)
    try:
        ranks = run(plan.world_size, observer)
    except HapError:
        raise
    except Exception as error:  # a program that can't run does not compute what one device does
        rank = next(iter(getattr(error, "__notes__", ())), "on a rank")
        text = str(error).partition("\n")[0]
        raise VerifyError(
            f"the program failed {rank}: {type(error).__name__}: {text}",
            hint="plan anew; if the plan file was not edited, please report this with it",
        ) from error
    rows = compare(plan, expected, ranks, TOLERANCE[dtype])
    bad = None
    if not all(row.ok for row in rows):
        bad = first_difference(plan, model, batch, widen=widen, tolerance=TOLERANCE[dtype])
        bad = bad or next(row.tensor for row in rows if not row.ok)
    return Verdict(rows=rows, tolerance=TOLERANCE[dtype], first_bad=bad)


@dataclass(frozen=True, slots=True)
class Observer:
    """Trains one rank and returns its tensors. Dropout is off: the reference's masks differ."""

    plan: Plan
    model: nn.Module
    batch: Batch
    optimizer: MakeOptimizer
    widen: bool
    backend: str = "eager"
    device: torch.device = CPU

    @staticmethod
    def make(
        plan: Plan, model: nn.Module, batch: Batch, optimizer: MakeOptimizer, dtype: str,
        backend: str = "eager", device: torch.device = CPU,
    ) -> Observer:  # fmt: skip
        """Return an observer of copies in ``dtype``, with noise on all parameters."""
        widen = dtype == "float64"
        return Observer(
            plan, prepared(model, widen), _cast(batch, widen), optimizer, widen, backend, device
        )

    def __call__(self, comm: Comm) -> Observed:
        """Train one rank; results are on the CPU."""
        module = HapModule(
            self.plan, self.model, comm, self.device, widen=self.widen, backend=self.backend
        )
        module.without_dropout()
        batch = self.plan.local_batch(self.batch, comm.rank)
        return _observe(module, lambda: call(module, batch), self.optimizer)


def observe_reference(
    model: nn.Module, batch: Batch, loss: Loss | None, optimizer: MakeOptimizer,
    device: torch.device = CPU,
) -> Observed:  # fmt: skip
    """Train the user's module in plain PyTorch on one device; results are on the CPU."""
    twin = copy.deepcopy(model).to(device)
    batch = each(batch, lambda name, entry: entry.to(device))
    step = Step(twin, batch, loss)
    tensors = tuple(flatten(batch).values())
    with reference_mode(next(twin.parameters()).dtype == torch.float64):
        # Clone the batch: the forward may write into it, and every step needs the same values.
        return _observe(twin, lambda: step(*(t.clone() for t in tensors)), optimizer)


@contextlib.contextmanager
def reference_mode(widen: bool) -> Iterator[None]:
    """Disable dropout and, if ``widen``, replace every float dtype that code names by float64.

    Models cast to half precision for speed, and back to float32 for accuracy. In a float64 run
    those casts would dominate the error, and the reference would be less exact than the plan.
    """
    aten = torch.ops.aten

    class Reference(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            def wide(x: Any) -> Any:
                narrow = widen and isinstance(x, torch.dtype) and x.is_floating_point
                return torch.float64 if narrow else x

            if widen and func is aten.lift_fresh.default and args[0].is_floating_point():
                return args[0].double()  # a dispatch mode does not see the dtype of torch.tensor
            if func is aten.native_dropout.default:
                return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
            if func is aten.bernoulli_.float:  # a mask that keeps p: scaled by 1/p, it is 1
                return args[0].fill_(args[1] if len(args) > 1 else 0.5)
            if str(func) in RANDOM:
                kind = func._schema.name.removeprefix("aten::").removesuffix("_like")
                made = func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})
                return made.fill_(fixed(kind, [a for a in args if isinstance(a, int | float)]))
            return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if widen else before)
    try:
        with Reference():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def _observe(module: nn.Module, call: Callable[[], Tensor], optimizer: MakeOptimizer) -> Observed:
    updates = make_optimizer(optimizer, module)
    losses: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        updates.zero_grad()
        loss = call()
        loss.backward()
        losses[f"loss of step {step + 1}"] = _held(loss)
        if step == 0:
            gradients = {
                n: _held(p.grad) for n, p in module.named_parameters() if p.grad is not None
            }
        settle(module)
        updates.step()
    state = {n: _held(t) for n, t in module.named_parameters()}
    state |= {n: _held(t) for n, t in module.named_buffers()}
    return {"loss": losses, "gradient": gradients, "parameter": state}


def _held(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def settle(module: nn.Module) -> None:
    """Set gradients that are pure rounding error to zero.

    A bias before a batch norm has one. Adam divides a gradient by its own magnitude, and would
    turn rounding error into a full step.
    """
    params = [p for p in module.parameters() if p.grad is not None]
    if not params:
        return
    norms = tensor_norms(params, [p.grad for p in params if p.grad is not None])
    limit = _rounding(params[0], float(norms.max()))
    for p, norm in zip(params, norms, strict=True):
        if norm <= limit and p.grad is not None:
            p.grad.zero_()


def compare(
    plan: Plan, expected: Observed, ranks: list[Observed], tolerance: float
) -> tuple[ComparisonRow, ...]:
    """Return one row per loss, gradient and trained tensor, in program order."""
    tensors = {i.target: i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")}
    rows = []
    for what, label in (
        ("loss", "loss"), ("gradient", "gradient"), ("parameter", f"after {STEPS} steps"),
    ):  # fmt: skip
        largest = max(map(_largest, expected[what].values()), default=0.0)
        for name, reference in expected[what].items():
            parts = [seen[what].get(name) for seen in ranks]
            given = [p for p in parts if p is not None]
            wholes = None
            if len(given) == len(parts):
                wholes = join(plan, tensors[name], given) if name in tensors else given
            floor = largest * FLOOR
            if what == "gradient" and _largest(reference) <= _rounding(reference, largest):
                floor = largest
            error = _error(wholes, reference, floor)
            rows.append(ComparisonRow(tensor=name, what=label, error=error, ok=error <= tolerance))
    return tuple(rows)


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude; 0 for integers, which are compared exactly."""
    return float(tensor.abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0


def _rounding(gradient: Tensor, largest: float) -> float:
    """Return the magnitude below which a gradient is pure rounding error of the largest one."""
    return VANISHES * torch.finfo(gradient.dtype).eps * largest


def _error(wholes: list[Tensor] | None, reference: Tensor, floor: float) -> float:
    """Return the largest relative error of the replicas; infinite if there are none."""
    if wholes is None:
        return float("inf")
    scale = max(_largest(reference), floor, 1e-300)
    worst = 0.0
    for whole in wholes:
        if whole.shape != reference.shape or whole.dtype != reference.dtype:
            return float("inf")
        if not reference.is_floating_point():
            if not torch.equal(whole, reference):
                return float("inf")
            continue
        difference = (whole.double() - reference.double()).abs()
        error = float(difference.max()) / scale if difference.numel() else 0.0
        worst = max(worst, error if error == error else float("inf"))
    return worst


def prepared(model: nn.Module, widen: bool) -> nn.Module:
    """Return a copy with noise on every parameter, since a bias of zeros hides a wrong sum."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.02 * noise.to(parameter.dtype))
    return twin.double() if widen else twin


def _cast(batch: Batch, widen: bool) -> Batch:
    def cast(name: str, entry: Tensor) -> Tensor:
        return entry.double() if widen and entry.is_floating_point() else entry

    return each(batch, cast)
