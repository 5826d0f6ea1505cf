"""All uses of private PyTorch APIs.

Checked on torch 2.13.0 (2.11 and 2.12 have the same names).
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._decomp import get_decompositions as get_decompositions
from torch._ops import OpOverload as OpOverload
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

from hap.capture.data_checks import drop_checks
from hap.ir.image_operators import RESIZES


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made a module. Its tracer takes seconds to import, and is not here."""
    tracer = sys.modules.get("torch._dynamo.eval_frame")
    return tracer is not None and isinstance(module, tracer.OptimizedModule)


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Raise ``RuntimeError`` unless ``condition`` is true, without synchronising with a GPU."""
    torch._assert_async(condition, message)


def recurrent_layer(mode: str) -> Callable[..., Any]:
    """Return the function that ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` call, by their ``mode``."""
    found: Callable[..., Any] = getattr(torch._VF, mode.lower())
    return found


STEP_HOOKS = "_optimizer_"
"""The names of an optimizer's attributes that hold hooks begin with this."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks run before or after the steps of this optimizer; those of all optimizers do not count."""
    return any(
        value for name, value in vars(optimizer).items() if name.startswith(f"{STEP_HOOKS}step")
    )


def import_tracer() -> None:
    """Import torch's tracer now: its tables keep classes of torch, such as ``finfo``, as it finds them."""
    import torch._dynamo  # noqa: F401


def fake_mode() -> Any:
    """Return a mode in which tensors have shapes and no data; real tensors may mix in.

    torch logs the traceback of each operator that fails in it; here the caller answers for the error.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def known_numbers() -> Iterator[None]:
    """Let fake modes know small tensors of whole numbers that are made of Python's numbers.

    So ``torch.arange(2, x.ndim).tolist()`` has a value. Tensors of a module or a batch never do, and floats do
    not: in another precision they are other numbers. The class of the modes stays: torch finds the rules of an
    operator such as ``torch.cond`` by it.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as Mode

    aten = torch.ops.aten
    makers = (aten.arange, aten.full, aten.zeros, aten.ones, aten.eye)
    fits, dispatch, read = Mode.may_turn_const, Mode._dispatch_impl, FakeTensor.tolist

    def is_small(self: Any, t: torch.Tensor) -> bool:
        whole = not t.is_floating_point() and _is_small(t.shape)
        return fits(self, t.new_empty(1) if whole else t)

    def known(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        made = dispatch(self, func, types, args, kwargs)
        if getattr(func, "overloadpacket", None) not in makers or "out" in kwargs:
            return made
        if made is None or made.is_floating_point() or not _is_small(made.shape):
            return made
        with _disable_current_modes():
            real = func(*args, **{**kwargs, "device": "cpu"})
        return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)

    def tolist(self: Any) -> Any:  # torch reads the numbers one by one
        return read(self) if self.constant is None else values(self.constant)

    with (
        mock.patch.multiple(Mode, may_turn_const=is_small, _dispatch_impl=known),
        mock.patch.object(FakeTensor, "tolist", tolist),
    ):
        yield


def _is_small(shape: torch.Size) -> bool:
    return all(type(size) is int for size in shape) and math.prod(shape) <= KNOWN


KNOWN = 1 << 16
"""Largest number of elements of a tensor whose numbers a capture knows."""


@contextlib.contextmanager
def building_without_data() -> Iterator[None]:
    """Return a fake mode in which a module can change its dtype or device: ``Net().bfloat16()``.

    A module then swaps its fake tensors for others, and torch refuses to swap tensors with weak
    references. Those to fake tensors are memos of the mode, which also hold for the new tensors.
    ``trunc_normal_`` draws until all numbers are inside of its bounds, which it reads.
    """
    none = types.SimpleNamespace(getweakrefs=lambda tensor: [])
    drawn = mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *a, **k: tensor)
    with mock.patch.object(torch.utils, "weakref", none), drawn, fake_mode():
        yield


@contextlib.contextmanager
def attention_in_parts() -> Iterator[None]:
    """Prevent ``nn.TransformerEncoder`` and attention from running as one fused operator.

    They do so where none of their parameters is trained; that operator has no backward. Boolean
    masks are converted out of place: a mask that is no buffer is a constant of the trace, and
    writes into constants are lost.
    """
    before, canonical = torch.backends.mha.get_fastpath_enabled(), F._canonical_mask

    def converted(mask: Any, *args: Any, **named: Any) -> Any:
        if mask is not None and mask.dtype == torch.bool and "target_type" in named:
            return torch.zeros_like(mask, dtype=named["target_type"]).masked_fill(mask, -math.inf)
        return canonical(mask, *args, **named)

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with mock.patch.object(F, "_canonical_mask", converted):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a shape and no data."""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def known_value(tensor: Any) -> torch.Tensor | None:
    """Return the numbers that :func:`known_numbers` knows of a tensor without data."""
    return tensor.constant if is_fake(tensor) else None


def no_modes() -> Any:
    """Return a context in which tensors are made with data, also under a fake mode."""
    return _disable_current_modes()


def values(tensor: torch.Tensor) -> Any:
    """Return the numbers of a tensor with data, also under a fake mode."""
    with _disable_current_modes():
        return tensor.tolist()


DEVICE_OF = torch.ops.prim.device.default
"""The operator by which a fake tensor is asked for its device."""


def storage_number(tensor: torch.Tensor) -> int:
    """Return a number that tensors share which share their memory, as long as it lasts."""
    number: int = tensor.untyped_storage()._cdata
    return number


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of fake tensors when Python asks for data that they lack."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental import symbolic_shapes as shapes

    return (
        fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
        shapes.GuardOnDataDependentSymNode, shapes.PendingUnbackedSymbolNotFound,
    )  # fmt: skip


@contextlib.contextmanager
def cpu_autocast_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let autocast on the CPU call these kernels, in this process, meanwhile.

    Args:
        kernels: operator of ATen with its overload, such as ``softmax.int`` -> function.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel)
        yield
    finally:
        library._destroy()


def below_autocast() -> Any:
    """Return a context in which operators on the CPU are not cast."""
    return torch._C._ExcludeDispatchKeyGuard(
        torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    )


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint forward and backward at ATen level, with the meaning of its inputs and outputs.

    ``inputs`` and ``outputs`` are (role, target) in the order of placeholders and results;
    an output without a tensor (the gradient of an unused parameter) is ``None`` in the graph.
    """

    graph: fx.Graph
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


def joint_graph(
    module: fx.GraphModule,
    args: tuple[torch.Tensor, ...],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Joint:
    """Return forward and backward of a captured module with the loss as its only output."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    def name(end: Any) -> tuple[str, str]:
        match end:
            case None:
                return "unused", ""
            case d.ParamAOTInput():
                return "parameter", end.target
            case d.BufferAOTInput():
                return "buffer", end.target
            case d.PlainAOTInput():
                return "input", str(end.idx)
            case d.ForwardTokenAOTInput() | d.ForwardTokenAOTOutput():
                return "unused", ""  # of checks, which are dropped
            case d.TangentAOTInput():
                return "tangent", "loss"
            case d.PlainAOTOutput():
                return "loss", "loss"
            case d.GradAOTOutput():
                role, target = name(end.grad_of)
                return ("gradient" if role == "parameter" else "unused"), target
            case d.InputMutationAOTOutput():
                role, target = name(end.mutated_input)
                # Only the rest of the step sees a value written into the batch.
                return {"input": "unused"}.get(role, role), target  # a parameter's is refused
        raise AssertionError(f"unknown end of a joint graph: {end!r}")

    with contextlib.ExitStack() as stack:
        stack.enter_context(_resized_by_kernels())
        joint = aot_export_joint_with_descriptors(
            stack, module, args, decompositions=dict(decompositions)
        )
        graph = joint.graph_module.graph
    drop_checks(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Joint(
        graph=graph,
        inputs=tuple(name(n.meta["desc"]) for n in placeholders),
        outputs=tuple(name(end) for end in graph.output_node().meta["desc"]),
    )


@contextlib.contextmanager
def _resized_by_kernels() -> Iterator[None]:
    """Keep the operators that resize images, which torch's tracer writes out before their derivative.

    Written out, the backward is an ``index_put`` that accumulates, for which CUDA sorts all the indices.
    """
    own = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    packets = [getattr(torch.ops.aten, name) for name in RESIZES]
    found = [getattr(p, overload) for p in packets for overload in p.overloads()]
    with contextlib.ExitStack() as stack:
        for op in found:
            kept = {key: kernel for key, kernel in op.py_kernels.items() if key not in own}
            stack.enter_context(mock.patch.object(op, "py_kernels", kept))
            stack.enter_context(mock.patch.object(op, "_dispatch_cache", {}))
        yield


def inductor_lacks(device: torch.device) -> tuple[str, str] | None:
    """Return (requirement, remedy) if TorchInductor lacks a requirement for a device."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type != "cpu" and not has_triton():
        return "Triton is not installed, or does not know this one", "pip install triton"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler", "install g++ (apt install g++) or set CXX"
    return None


_compiling = threading.Lock()  # emulated ranks are threads, and inductor has global state


def inductor(
    module: fx.GraphModule, args: list[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[[list[Any]], Any]:  # fmt: skip
    """Return a graph of operators compiled for the shapes and strides of ``args``.

    The compiled function takes the inputs as one list, which it empties to free each in time. So does
    the function that ``aot_module_simplified`` wraps in its ``forward``, whose own arguments
    live until it returns (2.13).
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    with _compiling, torch.no_grad():
        twin = copy.deepcopy(module)  # inductor rewrites its argument
        table = {**select_decomp_table(), **decompositions}
        compiled: Any = compile_fx(twin, list(args), decompositions=table)
    while compiled.__code__.co_name != "forward":
        compiled = compiled.__wrapped__
    boxed: Callable[[list[Any]], Any] = compiled.__wrapped__
    return boxed


class BoxedCode(fx.graph.CodeGen):
    """Generates a function that takes all inputs but the first as one list, and empties it.

    The method's signature is not guaranteed; 2.13 passes ``expanded_def`` by keyword.
    """

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        ctx, *names = [v.split(":")[0].split("=")[0].strip() for v in free_vars if v != "self"]
        lines = [f"def forward(self, {ctx}, given){maybe_return_annotation}:"]
        lines += [f"    {name} = given.pop()" for name in reversed(names)]
        return "\n".join(lines)


def process_groups() -> int:
    """Return the number of process groups of this rank, which is part of the next one's name."""
    return len(torch.distributed.distributed_c10d._world.pg_names)


def keeps_graph() -> bool:
    """Return, during a backward, whether it may run a second time."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def in_backward() -> bool:
    """Is autograd running a backward on this thread?"""
    return bool(torch._C._current_graph_task_id() != -1)


def generator_state(like: Any) -> int:
    """The state of the generator that draws for a tensor, or by default on the CPU, as one number."""
    cuda = isinstance(like, torch.Tensor) and like.is_cuda
    state = torch.cuda.get_rng_state(like.device) if cuda else torch.get_rng_state()
    return hash((cuda, state.numpy().tobytes()))


def checkpointed(node: fx.Node) -> tuple[int, bool] | None:
    """Return the number of the ``torch.utils.checkpoint`` of an operator in a joint graph.

    The second result is whether the checkpoint's own policy keeps the operator's results.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    policy = node.meta.get("recompute")
    if policy is None:
        return None
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("ac_graph_id", 0), policy not in again


class AgreeingGradScaler(torch.amp.GradScaler, ABC):
    """A gradient scaler that passes its detection of infinities to :meth:`agreed`."""

    @abstractmethod
    def agreed(self, found: torch.Tensor) -> torch.Tensor:
        """Return a value above zero if any rank's ``found`` is."""

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        return {device: self.agreed(value) for device, value in found.items()}


def parameter_hook(parameter: torch.Tensor) -> str:
    """The method that registered a hook on a parameter, or nothing."""
    if parameter._backward_hooks:
        return "register_hook"
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return "register_post_accumulate_grad_hook" if after else ""


def backward_hook(module: torch.nn.Module) -> str:
    """The method that registered a backward hook on a module, or nothing."""
    if module._backward_pre_hooks:
        return "register_full_backward_pre_hook"
    return "register_full_backward_hook" if module._backward_hooks else ""


def global_hook() -> str:
    """The function that registered a hook on all modules, or nothing."""
    from torch.nn.modules import module

    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    found = next((k for k in kinds if getattr(module, f"_global_{k}_hooks")), "")
    names = {"backward_pre": "full_backward_pre", "backward": "full_backward"}
    return found and f"register_module_{names.get(found, found)}_hook"
