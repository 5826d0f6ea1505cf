"""Verify a program against one device: losses, gradients, parameters and buffers after training.

The ranks run in one process (:mod:`hap.runtime.emulate`) or as real processes; the reference is
the user's unmodified module, run eagerly (:mod:`hap.runtime.one_device`) with the random numbers that
the ranks drew. Every tensor is compared by itself:

- In float64 an error is relative to the largest entry of the reference tensor. A gradient whose largest
  entry is below :data:`FLOOR` of the largest gradient is compared relative to that floor, which leaves
  room for the rounding of large terms that cancel. Some models amplify rounding from step to step, such as
  those that normalize few values: if a tensor is further off than the tolerance, it may be off by
  :data:`ROOM` times what it moves on one device if each weight changes by one unit in the last place.
- In float32, or with automatic mixed precision, the yardstick is the module in float64. The program may
  be off by :data:`ROOM` times the error of the module itself in the same precision, or by the tolerance
  of the lowest precision in which its operators run, whichever is more.
- Integers and booleans, such as the number of batches that a batch norm has tracked, must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hap.capture.source_lines import raised_at
from hap.capture.tracing import Loss
from hap.capture.user_optimizer import MakeOptimizer
from hap.errors import HapError, ModelError, VerifyError
from hap.ir.batch import Batch, call, each
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm
from hap.runtime.divergence import first_difference
from hap.runtime.drawn_numbers import Draw, Replay, UnlikeDrawsError, draws, joined
from hap.runtime.emulate import run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.one_device import (
    CPU,
    STEPS,
    VANISHES,
    Observed,
    copied,
    double_by_default,
    observe,
    observe_reference,
    rounding,
    widened,
    widest,
)
from hap.runtime.shards import join

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
"""Largest relative error of float64 programs, and what float32 programs may always be off by."""

HALF_ROUNDINGS = 2
"""What programs in half precision may always be off by, in units of the dtype's epsilon."""

ROOM = 4.0
"""Factor between the error of the program and that of the module itself, by its precision or by other roundings."""

ROUNDINGS = 3
"""Largest number of ways in which one device's weights are rounded to see how much a model amplifies rounding."""

INFINITE = float("inf")

REPEATED = 1e-6
"""Largest error of one device's results when it trains again."""

FLOOR = 1e-3
"""Largest floor of the scale of relative errors, as a fraction of the largest entry of a kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRow:
    """One compared tensor: ``what`` is ``loss``, ``gradient``, ``after 3 steps`` or ``drawn``."""

    tensor: str
    what: str
    error: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All comparisons; ``first_bad`` is the first tensor in program order that differs.

    ``random``: how random numbers took part; empty if the model draws none.
    """

    rows: tuple[ComparisonRow, ...]
    tolerance: float
    first_bad: str | None
    random: str = ""

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    @property
    def amplified(self) -> float:
        """The largest error above the tolerance that the module's own errors from rounding allow, else 0."""
        return max((r.error for r in self.rows if r.ok and r.error > self.tolerance), default=0.0)


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
        ModelError: one device trains to other results the second time.
    """
    # Rounding products to TF32 is not an error of the plan: compare at torch's highest precision.
    exact_products = replace(plan.recipe, float32_matmul_precision="highest")
    plan = replace(plan, recipe=exact_products)
    observer = Observer.make(plan, model, batch, optimizer, dtype, backend, device)
    observer = replace(observer, draws=bool(draws(plan.graph)))
    random = "the random numbers are those that the ranks drew" if observer.draws else ""
    ranks = _trained(plan, observer, run)
    drawn = None
    try:
        if observer.draws:
            drawn = joined(plan, [seen["drawn"] for seen in ranks], STEPS)
        exact, alike = _references(observer, loss, drawn)
    except UnlikeDrawsError as error:
        random, drawn = f"dropout is off and other random numbers are constants: {error}", None
        observer = replace(observer, draws=False)
        ranks = _trained(plan, observer, run)
        exact, alike = _references(observer, loss, None)
    tolerance = tolerance_of(plan, dtype)
    kept = _without_unread(plan, observer.model, exact)
    rows = compare(plan, kept, ranks, tolerance, [alike] if alike else [])
    if observer.widen and observer.device.type == "cpu" and _within_reach(rows):
        _check_repeats(exact, _references(observer, loss, drawn)[0])
    others: list[Observed] = []
    while observer.widen and len(others) < ROUNDINGS and _within_reach(rows):
        others.append(_references(_rounded(observer, len(others)), loss, drawn)[0])
        rows = compare(plan, kept, ranks, tolerance, others)
    rows = _agreement(drawn or []) + rows
    bad = None
    if not all(row.ok for row in rows):
        bad = first_difference(
            plan, observer.model, observer.batch, widen=observer.widen, tolerance=tolerance
        )
        bad = bad or next(row.tensor for row in rows if not row.ok)
    return Verdict(rows=rows, tolerance=tolerance, first_bad=bad, random=random)


def _check_repeats(once: Observed, again: Observed) -> None:
    """Raise ``ModelError`` if one device trains to other results the second time."""
    for what, found in once.items():
        for name, tensor in found.items():
            if _error([again[what][name]], tensor, 0.0, tensor.dtype) > REPEATED:
                raise ModelError(
                    f"the module computes something else each time that it is trained on one device: {what} of {name}",
                    hint="keep what changes from step to step in a buffer, or in the batch: numbers that the "
                    "forward or the loss reads elsewhere are constants of the plan",
                )


def _within_reach(rows: Sequence[ComparisonRow]) -> bool:
    """Return whether some tensors are off, and all of those by finite errors."""
    bad = [row for row in rows if not row.ok]
    return bool(bad) and all(row.error < INFINITE for row in bad)


def tolerance_of(plan: Plan, dtype: str) -> float:
    """Return the relative error that is allowed whatever the module's own error is."""
    halves = {t.dtype for t in plan.graph.tensors.values()} & {"bfloat16", "float16"}
    if dtype == "float64" or not halves:
        return TOLERANCE[dtype]
    return HALF_ROUNDINGS * max(torch.finfo(getattr(torch, half)).eps for half in halves)


def _trained(
    plan: Plan, observer: Observer, run: Callable[[int, Callable[[Comm], Any]], list[Any]]
) -> list[Observed]:
    """Return the results of all ranks."""
    try:
        with double_by_default(observer.widen):
            return run(plan.world_size, observer)
    except HapError:
        raise
    except Exception as error:  # a program that can't run does not compute what one device does
        rank = next(iter(getattr(error, "__notes__", ())), "on a rank")
        text = str(error).partition("\n")[0]
        raise VerifyError(
            f"the program failed {rank}: {type(error).__name__}: {text}",
            hint="plan anew; if the plan file was not edited, please report this with it",
        ) from error


def _references(
    observer: Observer, loss: Loss | None, drawn: list[list[Draw]] | None
) -> tuple[Observed, Observed | None]:
    """Return the module's results in float64 and, if the ranks' precision is lower, in theirs."""
    graph = observer.plan.graph
    given = {graph.tensors[i.tensor].dtype for i in graph.role("parameter")}
    limits = torch.float64 if "float64" in given else torch.float32

    def run(model: nn.Module, batch: Batch) -> Observed:
        replay = None if drawn is None else Replay(drawn)
        try:
            return observe_reference(
                model, batch, loss, observer.optimizer, observer.device,
                autocast=observer.plan.recipe.autocast, replay=replay, limits=limits,
            )  # fmt: skip
        except (HapError, UnlikeDrawsError):
            raise
        except Exception as error:
            dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
            text = str(error).partition("\n")[0]
            raise ModelError(
                f"the model fails on one device in {dtype}: {type(error).__name__}: {text}",
                where=raised_at(error),
                hint="the parameters, the buffers and the batch are converted to this dtype: keep "
                "other tensors of the model and of the loss in buffers",
            ) from error

    if observer.widen:
        return run(observer.model, observer.batch), None
    exact = run(widened(copied(observer.model)), _cast(observer.batch, widen=True))
    return exact, run(observer.model, observer.batch)


def _without_unread(plan: Plan, model: nn.Module, seen: Observed) -> Observed:
    """Return results without the buffers that neither a step reads nor a state dict holds.

    A forward may replace such a buffer: it remembers a tensor that the step computes anew.
    """
    parameters = dict(model.named_parameters())
    known = {i.target for i in plan.graph.inputs} | parameters.keys() | model.state_dict().keys()
    return seen | {"parameter": {n: t for n, t in seen["parameter"].items() if n in known}}


def _agreement(drawn: list[list[Draw]]) -> tuple[ComparisonRow, ...]:
    """Return a row per random operator: replicas must draw the same numbers in all steps."""
    agree: dict[str, bool] = {}
    for draw in (draw for step in drawn for draw in step):
        agree[draw.node.name] = agree.get(draw.node.name, True) and draw.agree
    return tuple(
        ComparisonRow(tensor=name, what="drawn", error=0.0 if ok else INFINITE, ok=ok)
        for name, ok in agree.items()
    )


@dataclass(frozen=True, slots=True)
class Observer:
    """Trains one rank and returns its tensors.

    ``draws``: also return the random numbers that it drew. Otherwise dropout is off, and other random
    numbers are constants.
    """

    plan: Plan
    model: nn.Module
    batch: Batch
    optimizer: MakeOptimizer
    widen: bool
    backend: str = "eager"
    device: torch.device = CPU
    draws: bool = False

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
        if self.widen:  # this may be a process of its own
            torch.set_default_dtype(torch.float64)
        module = HapModule(
            self.plan, self.model, comm, self.device, widen=self.widen, backend=self.backend
        )
        drawn = module.record_draws()
        if not self.draws:
            module.without_dropout()
        batch = self.plan.local_batch(self.batch, comm.rank)
        seen = observe(module, lambda: call(module, batch), self.optimizer)
        return seen | {"drawn": drawn}


def compare(
    plan: Plan, exact: Observed, ranks: list[Observed], tolerance: float,
    alike: Sequence[Observed] = (),
) -> tuple[ComparisonRow, ...]:  # fmt: skip
    """Return one row per loss, gradient and trained tensor, in program order.

    Args:
        exact: of the module on one device.
        alike: of the module on one device, with other roundings: in the precision of the ranks, if ``exact`` is
            in a higher one, or with weights that are rounded differently.
    """
    tensors = {i.target: i.tensor for i in plan.graph.inputs if i.role in ("parameter", "buffer")}
    rows = []
    for what, label in (
        ("loss", "loss"), ("gradient", "gradient"), ("parameter", f"after {STEPS} steps"),
    ):  # fmt: skip
        largest = max(map(_largest, exact[what].values()), default=0.0)
        for name, reference in exact[what].items():
            parts = [seen[what].get(name) for seen in ranks]
            given = [p for p in parts if p is not None]
            wholes = None
            if len(given) == len(parts):
                wholes = join(plan, tensors[name], given) if name in tensors else given
            own = [other[what][name] for other in alike]
            like = own[0] if own else reference
            floor = largest * _floor(like.dtype, tolerance)
            if what == "gradient" and _largest(reference) <= rounding(reference, largest):
                floor = largest * FLOOR
            error = _error(wholes, reference, floor, like.dtype)
            allowed = ROOM * _error(own, reference, floor, like.dtype)
            if allowed == INFINITE:  # the module itself overflows in its precision: or as that does
                scale = max(map(_largest, alike[0][what].values())) * _floor(like.dtype, tolerance)
                error, allowed = min(error, _error(wholes, like, scale, like.dtype)), 0.0
            ok = error <= max(tolerance, allowed)
            rows.append(ComparisonRow(tensor=name, what=label, error=error, ok=ok))
    return tuple(rows)


def _floor(dtype: torch.dtype, tolerance: float) -> float:
    """Return the floor of a tensor's scale, as a fraction of the largest entry of its kind."""
    if not dtype.is_floating_point:
        return 0.0
    return min(FLOOR, VANISHES * torch.finfo(dtype).eps / tolerance)


def _largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude; 0 for integers, which are compared exactly."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0).max())


def _error(
    wholes: list[Tensor] | None, reference: Tensor, floor: float, dtype: torch.dtype
) -> float:
    """Return the largest relative error of the replicas; infinite if there are none."""
    if wholes is None:
        return INFINITE
    scale = max(_largest(reference), floor, 1e-300)
    worst = 0.0
    for whole in wholes:
        if whole.shape != reference.shape or whole.dtype != dtype:
            return INFINITE
        if not reference.is_floating_point():
            if not torch.equal(whole, reference):
                return INFINITE
            continue
        difference = (whole.double() - reference.double()).abs()
        difference[whole == reference] = 0.0  # also infinities, as in a mask of attention
        error = float(difference.max()) / scale if difference.numel() else 0.0
        worst = max(worst, error if error == error else INFINITE)
    return worst


def prepared(model: nn.Module, widen: bool) -> nn.Module:
    """Return a copy with noise on every parameter, since a bias of zeros hides a wrong sum."""
    twin = copied(model)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                dtype = torch.complex128 if parameter.is_complex() else torch.float64
                noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
                parameter.add_(0.02 * noise.to(parameter.dtype))
    return widened(twin) if widen else twin


def _rounded(observer: Observer, seed: int) -> Observer:
    """Return an observer of a model in float64 whose weights differ in the last place."""
    twin = copied(observer.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                shape = parameter.shape
                signs = torch.randint(0, 2, shape, generator=generator, dtype=torch.float64)
                parameter.mul_(1 + (2 * signs - 1) * torch.finfo(torch.float64).eps)
    return replace(observer, model=twin)


def _cast(batch: Batch, widen: bool) -> Batch:
    def cast(name: str, entry: Tensor) -> Tensor:
        return entry.to(widest(entry.dtype)) if widen else entry

    return each(batch, cast)
