"""Run the user's module on one device in plain PyTorch: what a program is compared with.

The module runs eagerly and torch's autograd differentiates it; no captured graph takes part. Its
random numbers are those that the ranks drew, or constants.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hap.capture import torch_private
from hap.capture.autocast_policy import casts_of_cuda
from hap.capture.computed_weights import last_computed
from hap.capture.matmul_precision import exact_convolutions
from hap.capture.random_numbers import DRAWS, IN_PLACE
from hap.capture.tracing import Loss, Step
from hap.capture.user_optimizer import MakeOptimizer, make_optimizer
from hap.complex_tensors import as_real
from hap.ir.batch import Batch, each, flatten
from hap.ir.graph_builder import RANDOM
from hap.optim import tensor_norms
from hap.runtime.context import fixed, kept_scale
from hap.runtime.drawn_numbers import DROPOUT, Replay, kind_of

CPU = torch.device("cpu")
STEPS = 3
VANISHES = 500
"""Multiple of the largest gradient's rounding below which a gradient is pure rounding error."""

Observed = dict[str, dict[str, Tensor]]
"""``loss``, ``gradient``, ``parameter`` and ``drawn`` -> name -> tensor (a shard, on a rank)."""


def observe_reference(
    model: nn.Module, batch: Batch, loss: Loss | None, optimizer: MakeOptimizer,
    device: torch.device = CPU, *, autocast: str = "", replay: Replay | None = None,
    limits: torch.dtype = torch.float32,
) -> Observed:  # fmt: skip
    """Train the user's module in plain PyTorch on one device; results are on the CPU.

    Args:
        autocast: the dtype of automatic mixed precision, unless all floats are float64.
        replay: the random numbers; without it, dropout is off and the other draws are constants.
        limits: the dtype that the model had when it was captured.

    Raises:
        UnlikeDrawsError: the module does not draw the numbers of ``replay``.
    """
    twin = copied(model).to(device)
    batch = each(batch, lambda name, entry: entry.to(device))
    widen = next(twin.parameters()).dtype in (torch.float64, torch.complex128)
    step = Step(twin, batch, loss, "" if widen else autocast)
    tensors = tuple(flatten(batch).values())

    def run() -> Tensor:
        if replay:
            replay.begin()
        # Clone the batch: the forward may write into it, and every step needs the same values.
        return step(*(t.clone() for t in tensors))  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def mode() -> Iterator[None]:
        with reference_mode(widen, replay, limits), casts_of_cuda():
            yield

    with double_by_default(widen):  # an optimizer computes in its own dtypes, as on the ranks
        seen = observe(twin, run, optimizer, mode)
    if replay:
        replay.end()
    return seen


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters have the attributes that the user gave them."""
    twin = copy.deepcopy(model, dict[int, Any](last_computed(model)))
    for mine, given in zip(twin.parameters(), model.parameters(), strict=True):
        vars(mine).update(vars(given))
    return twin


@contextlib.contextmanager
def reference_mode(
    widen: bool, replay: Replay | None = None, limits: torch.dtype = torch.float32
) -> Iterator[None]:
    """Fix all random numbers and, if ``widen``, replace every float dtype that code names by float64.

    Models cast to half precision for speed, and back to float32 for accuracy. In a float64 run
    those casts would dominate the error, and the reference would be less exact than the plan.
    Tensors that the module does not own, such as globals, are converted where they are used.
    ``torch.finfo`` answers for float64 as for ``limits``, as it did when the module was captured; so
    does ``rms_norm``, whose default for ``eps`` is that of the dtype.
    """
    torch_private.import_tracer()  # the first optimizer would, while ``finfo`` is replaced
    aten = torch.ops.aten

    class Numbers(TorchFunctionMode):
        """Widens ``torch.tensor``, whose dtype no dispatch mode sees."""

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore
            if widen and func in (torch.rms_norm, nn.functional.rms_norm):
                args = _with_eps(_finfo(limits).eps, *args, **(kwargs or {}))
                kwargs = {}
            made = func(*args, **(kwargs or {}))
            if widen and func is torch.tensor and made.is_floating_point():
                return func(*args, **{**(kwargs or {}), "dtype": torch.float64})
            return made

    class Reference(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
            aliased = any(argument.alias_info for argument in func._schema.arguments)

            def wide(x: Any) -> Any:
                if widen and isinstance(x, torch.dtype):
                    return widest(x)
                if not widen or aliased:  # a view of a copy, or a write into it, would be lost
                    return x
                if isinstance(x, list | tuple):
                    return [wide(part) for part in x]
                return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

            named = {k: wide(v) for k, v in (kwargs or {}).items()}
            if draw := DRAWS.get(func) or IN_PLACE.get(func):
                with self:  # which sees the uniform and normal numbers that these are made of
                    made = draw(*map(wide, args), **named)
                if made is not NotImplemented:
                    return args[0].copy_(made) if func in IN_PLACE else made
            random = str(func) in RANDOM or func is aten.bernoulli_.float
            if random and replay is None:
                return constant(func, tuple(map(wide, args)), named)
            if random and not (str(func) == DROPOUT and not 0 < args[1] < 1):
                return replayed(func, tuple(map(wide, args)), named)
            if widen and func is aten._grouped_mm.default:
                return _grouped_mm(*map(wide, args), **named)
            return func(*map(wide, args), **named)

    def constant(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if func is aten.bernoulli_.float:  # a mask that keeps p: scaled by 1/p, it is 1
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        kind = func._schema.name.removeprefix("aten::").removesuffix("_like")
        made = func(*args, **named)
        return made.fill_(fixed(kind, [a for a in args if isinstance(a, int | float)]))

    def replayed(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        assert replay is not None
        state = torch_private.generator_state(args[0] if args else None)
        made = func(*args, **named)  # moves the generator on, so that its state names the draw
        mask = made[1] if str(func) == DROPOUT else made
        drawn = replay.take(kind_of(str(func)), mask.shape, state).to(mask.device)
        if str(func) == DROPOUT:
            return args[0] * drawn * kept_scale(args[1]), drawn
        return made.copy_(drawn)

    def limits_of(dtype: torch.dtype | None = None) -> torch.finfo:
        return _finfo(limits if dtype in (None, torch.float64) else dtype)

    # With a replay, dropout of attention is an operator of its own.
    attention = sdpa_kernel(SDPBackend.MATH) if replay else contextlib.nullcontext()
    narrow = mock.patch.object(torch, "finfo", limits_of if widen else _finfo)
    with double_by_default(widen), attention, narrow, Numbers(), Reference():  # type: ignore[no-untyped-call]
        yield


@contextlib.contextmanager
def double_by_default(widen: bool) -> Iterator[None]:
    """Let new floats be float64, if ``widen``, also those of a boolean tensor and a number."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if widen else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_finfo = torch.finfo


def _with_eps(
    default: float, x: Tensor, normalized_shape: Any, weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of ``rms_norm`` with another default."""
    return x, normalized_shape, weight, default if eps is None else eps


def widened(module: nn.Module) -> nn.Module:
    """Convert the floats and complex numbers of a module to double precision.

    So are tensors that are plain attributes of its modules, or in their lists and dicts.
    """
    module.double()
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.to(widest(tensor.dtype))
    for sub in module.modules():
        vars(sub).update({k: _wide(v) for k, v in vars(sub).items() if k not in _REGISTERED})
    return module


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(widest(value.dtype))
    if type(value) is dict:
        return {key: _wide(part) for key, part in value.items()}
    return type(value)(map(_wide, value)) if type(value) in (list, tuple) else value


_REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which ``nn.Module`` keeps what is registered."""


def widest(dtype: torch.dtype) -> torch.dtype:
    """Return the double precision of a dtype; of whole numbers and booleans, itself."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each group of rows of ``a`` with its matrix, or of groups of columns.

    torch has none in float64. Shapes: ``a`` (S, K) and ``b`` (groups, K, N), or ``a`` (K, S) and
    ``b`` (S, N); group ``g`` ends before row, or column, ``ends[g]``.
    """
    starts = [0, *ends.tolist()]
    spans = [slice(start, end) for start, end in pairwise(starts)]
    if b.dim() == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    return torch.cat([a[span] @ matrix for span, matrix in zip(spans, b, strict=True)])


@exact_convolutions()
def observe(
    module: nn.Module, call: Callable[[], Tensor], optimizer: MakeOptimizer,
    mode: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Observed:  # fmt: skip
    """Train for :data:`STEPS` steps.

    Args:
        call: returns the loss.
        mode: a context of each forward and backward.
    """
    updates = make_optimizer(optimizer, module)
    losses: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        updates.zero_grad()
        with mode():
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
    """Return a copy on the CPU; of a complex tensor as a pair of real ones, like a program's."""
    held = torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
    return as_real(held)


def settle(module: nn.Module) -> None:
    """Set gradients that are pure rounding error to zero.

    A bias before a batch norm has one, and so have the entries of attention's keys in a bias of queries, keys and
    values. Adam divides a gradient by its own magnitude, and would turn rounding error into a full step. In
    lower precision than float64, only whole tensors are: too many entries are so small by right.
    """
    found = [(p, p.grad) for p in module.parameters() if p.grad is not None]
    if not found:
        return
    params = [p for p, _ in found]
    gradients = [as_real(g) for _, g in found]
    norms = tensor_norms(params, gradients)
    limit = rounding(gradients[0], float(norms.max()))
    for gradient, norm in zip(gradients, norms, strict=True):
        if gradient.dtype == torch.float64:
            gradient.masked_fill_(gradient.abs() <= limit, 0.0)
        elif norm <= limit:
            gradient.zero_()


def rounding(gradient: Tensor, largest: float) -> float:
    """Return the magnitude below which a gradient is pure rounding error of the largest one."""
    return VANISHES * _finfo(gradient.dtype).eps * largest
