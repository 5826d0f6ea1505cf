"""All uses of private APIs of ``torch.compile``'s tracer: the forward as a graph of torch's functions.

Checked on torch 2.13.0 (2.11 and 2.12 have the same names). Other private APIs are in
:mod:`hap.capture.torch_private`.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from hap.capture.compiling_private import Asked, told
from hap.capture.graph_break import GraphBreak
from hap.capture.layer_calls import LayerCall
from hap.capture.messages_private import message_functions, silent
from hap.capture.packed_sequences import MODULES, forward_of
from hap.capture.regions_private import repeated_once
from hap.capture.replaced_functions import INLINED
from hap.capture.sizes_private import decided_sizes
from hap.capture.torch_private import (
    data_dependent_errors,
    known_numbers,
    known_value,
    no_modes,
    values,
)


def dynamo_graph(
    module: nn.Module, args: tuple[torch.Tensor, ...], kinds: Sequence[type[nn.Module]] = (),
    calls: Sequence[LayerCall] = (), no_rows: bool | None = False,
) -> fx.GraphModule:  # fmt: skip
    """Return the torch-level graph of ``module(*args)``; parameters stay its attributes.

    Args:
        kinds: classes whose forward becomes a region; see :func:`repeated_once`.
        calls: what is known of each call of their forwards, in order; calls of one region are equal.
        no_rows: take the branches for masks that choose no rows, or for those that choose some; None: neither.

    Raises:
        GraphBreak: the Python code depends on tensor data, or can't be traced.
    """
    asked = Asked(compiled=False)
    try:
        with told(compiled=False) as asked:
            return _graph(module, args, kinds, calls, no_rows)
    except GraphBreak as error:
        if kinds or not asked.line:
            raise
        with told(compiled=True), contextlib.suppress(GraphBreak):
            found = _graph(module, args, kinds, calls, no_rows)
            warnings.warn(
                f"{asked.line}: the forward asks whether it is compiled, and its branch for not compiled can't be "
                f"captured ({error}): the plan takes the branch for torch.compile",
                stacklevel=2,
            )
            return found
        raise


def _graph(
    module: nn.Module, args: tuple[torch.Tensor, ...], kinds: Sequence[type[nn.Module]],
    calls: Sequence[LayerCall], no_rows: bool | None,
) -> fx.GraphModule:  # fmt: skip
    import torch._dynamo as dynamo
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._dynamo.variables.builtin import populate_builtin_to_tensor_fn_map
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    dynamo.reset()
    with unset_fake_temporarily():  # it runs operators, at the first operator inside of vmap
        populate_builtin_to_tensor_fn_map()
    try:
        with (
            warnings.catch_warnings(),
            dynamo.config.patch(
                ignore_logging_functions=message_functions(),
                allow_rnn=True,
                trace_autograd_ops=True,
            ),
            _autocast_of_any_device(),
            _without_hints(),
            _names_of_classes(),
            _fields_of_losses(),
            _decided_branches(),
            _known_lists(),
            _inlined(),
            silent(),
            known_numbers(),
            repeated_once(kinds, calls),
            decided_sizes(no_rows) as sizes,
        ):
            warnings.simplefilter("ignore")
            captured: fx.GraphModule = dynamo_graph_capture_for_export(module)(*args)
    except capture_errors() as error:
        on_data = isinstance(error, data_dependent_errors())
        raise GraphBreak(error, on_data, _lines_traced(error)) from error
    captured.meta["sizes"] = sizes
    return captured


@contextlib.contextmanager
def _autocast_of_any_device() -> Iterator[None]:
    """Let ``autocast("cuda")`` cast fake tensors too, which are all on the CPU when traced."""
    from torch._dynamo.variables.ctx_manager import AutocastModeVariable

    original = AutocastModeVariable.__init__

    def on_cpu(self: Any, target_values: Any, *args: Any, **kwargs: Any) -> None:
        device, dtype, *rest = target_values
        dtype = dtype or torch.get_autocast_dtype(device)
        original(self, ["cpu", dtype, *rest], *args, **kwargs)

    AutocastModeVariable.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        yield
    finally:
        AutocastModeVariable.__init__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let ``torch.compiler.is_compiling()`` return true.

    Models check it before they cache tensors globally, as in an ``lru_cache``: a real forward
    must not find tensors that were made under fake tensors. Checks of data are skipped.
    """
    checks: dict[str, Any] = dict.fromkeys(_CHECKS, lambda *args: None)
    flag = mock.patch.object(torch.compiler, "_is_compiling_flag", True)
    with flag, mock.patch.multiple(torch, **checks), _unchecked_distributions():
        yield


_CHECKS = ("_check_tensor_all", "_check_tensor_all_with")
"""Functions of torch that read a whole tensor, and raise if it is not all true."""


_EINOPS = ("rearrange", "repeat", "einsum")
"""Functions of einops that stay calls in the torch-level graph; ``reduce`` may be given a function."""


@contextlib.contextmanager
def _inlined() -> Iterator[None]:
    """Trace the lines of functions of torch that check data, to leave the checks out, and of ``INLINED``."""
    from torch._dynamo.trace_rules import get_torch_obj_rule_map
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    class Inlined(UserFunctionVariable):
        @classmethod
        def create_with_source(cls, value: Any, source: Any) -> UserFunctionVariable:
            function: Any = INLINED[value]
            return UserFunctionVariable(function)

    table: dict[Any, Any] = {torch.nn.functional.gaussian_nll_loss: UserFunctionVariable}
    table |= dict.fromkeys(INLINED, Inlined)
    if einops := sys.modules.get("einops"):  # parsing its patterns took most of a capture
        table |= dict.fromkeys(
            [getattr(einops, name) for name in _EINOPS], TorchInGraphFunctionVariable
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(get_torch_obj_rule_map(), table))
        for kind in MODULES:
            stack.enter_context(mock.patch.object(kind, "forward", forward_of(kind)))
        yield


def _unchecked_distributions() -> Any:
    return mock.patch.object(torch.distributions.Distribution, "_validate_args", False)


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Skip steps that have no effect on the result.

    ``nn.Transformer`` reads its masks to find causal ones, for a faster kernel; the mask has the
    same effect. Audio models ask for the gradient of their input, which reaches no parameter, so
    that reentrant checkpoints run. Checks of data are no part of a program. The tracer refuses a
    result that depends on a tensor of ``requires_grad_()``, whose own gradient would be lost: only
    those of parameters leave a step.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables import builtin
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
    from torch.nn.modules import transformer

    owner: Any = builtin.BuiltinVariable
    name = "call_setattr"  # until torch 2.12
    if hasattr(builtin, "SetAttrBuiltinVariable"):
        owner, name = builtin.SetAttrBuiltinVariable, "_call_setattr"
    assign = getattr(owner, name)

    def given(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    def set_attribute(self: Any, tx: Any, obj: Any, key: Any, value: Any) -> Any:
        if obj.is_tensor() and key.as_python_constant() == "requires_grad":
            asked = value.as_python_constant()
            if asked is True or asked is obj.requires_grad:
                return ConstantVariable.create(None)
        return assign(self, tx, obj, key, value)

    causal = mock.patch.object(transformer, "_detect_is_causal_mask", given)
    handlers = TorchInGraphFunctionVariable._get_handlers()
    nothing = dict.fromkeys(_CHECKS, lambda *args, **named: ConstantVariable.create(None))
    checks = mock.patch.dict(handlers, {getattr(torch, k): f for k, f in nothing.items()})
    intermediate = "_check_requires_grad_intermediate_outputs"
    with contextlib.ExitStack() as stack:
        for patch in (causal, checks, _unchecked_distributions()):
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(owner, name, set_attribute))
        if hasattr(OutputGraph, intermediate):  # since torch 2.12
            stack.enter_context(mock.patch.object(OutputGraph, intermediate, lambda *args: None))
        yield


@contextlib.contextmanager
def _known_lists() -> Iterator[None]:
    """Give Python all numbers of a known tensor at once; the tracer reads them one by one."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    read = TensorVariable.method_tolist

    def tolist(self: Any, tx: Any) -> Any:
        known = known_value(self.as_proxy().node.meta.get("example_value"))
        return read(self, tx) if known is None else VariableTracker.build(tx, values(known))

    with mock.patch.object(TensorVariable, "method_tolist", tolist):
        yield


@contextlib.contextmanager
def _names_of_classes() -> Iterator[None]:
    """Let the forward ask ``type(self.weight).__module__``, as adapters do to find quantized ones."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    call = GetAttrVariable.call_method

    def of_string(self: Any, tx: Any, name: str, *args: Any) -> Any:
        text = getattr(getattr(self.obj, "value", None), self.name, None)
        if isinstance(self.obj, TorchInGraphFunctionVariable) and type(text) is str:
            return ConstantVariable.create(text).call_method(tx, name, *args)
        return call(self, tx, name, *args)

    with mock.patch.object(GetAttrVariable, "call_method", of_string):
        yield


@contextlib.contextmanager
def _fields_of_losses() -> Iterator[None]:
    """Let the forward read ``ignore_index`` of a ``CrossEntropyLoss`` that it makes, which is a function to the tracer."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import LambdaVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable

    make, fields = (
        UserDefinedClassVariable._call_cross_entropy_loss,
        inspect.signature(nn.CrossEntropyLoss),
    )

    class Loss(LambdaVariable):
        given: dict[str, Any]

        def var_getattr(self, tx: Any, name: str) -> Any:
            if name not in fields.parameters:
                return super().var_getattr(tx, name)
            usual = fields.parameters[name].default
            return self.given[name] if name in self.given else VariableTracker.build(tx, usual)

    def made(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function: Any = make(self, tx, args, kwargs)
        loss = Loss(function.fn)
        loss.given = fields.bind(*args, **kwargs).arguments
        return loss

    with mock.patch.object(UserDefinedClassVariable, "_call_cross_entropy_loss", made):
        yield


@contextlib.contextmanager
def _decided_branches() -> Iterator[None]:
    """Decide branches on a tensor that is made of Python's numbers, or where one way only raises.

    The second kind checks data, as in ``if labels.max() >= classes: raise ValueError``.
    """
    from torch._dynamo import symbolic_convert as tracer
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    def decided(jump: Callable[..., Any]) -> Callable[..., Any]:
        def decide(self: Any, instruction: Any) -> Any:
            value, found = self.stack[-1], None
            if value.is_tensor():
                found = _truth(value.as_proxy().node.meta.get("example_value"))
            if found is None and (value.is_tensor() or isinstance(value, SymNodeVariable)):
                found = _truth_unless_raised(self, instruction)
            if found is not None:
                self.stack[-1] = ConstantVariable.create(found)
            return jump(self, instruction)

        return decide

    kinds = ("InstructionTranslator", "InliningInstructionTranslator",
             "InliningGeneratorInstructionTranslator")  # fmt: skip
    tables = [getattr(tracer, kind).dispatch_table for kind in kinds]
    before = [[*table] for table in tables]
    for table in tables:
        for code, name in enumerate(dis.opname):
            if name.startswith("POP_JUMP_") and table[code]:
                table[code] = decided(table[code])
    try:
        yield
    finally:
        for table, handlers in zip(tables, before, strict=True):
            table[:] = handlers


def _truth(example: Any) -> bool | None:
    """Return the truth of a known number, else None."""
    known = known_value(example)
    if known is None or known.numel() != 1:
        return None
    with no_modes():
        return bool(known)


def _truth_unless_raised(translator: Any, jump: Any) -> bool | None:
    """Return the truth with which a jump does not lead to ``raise``, if the other one does."""
    instructions, after = translator.instructions, translator.instruction_pointer
    on_true = "IF_TRUE" in jump.opname
    if (not on_true and "IF_FALSE" not in jump.opname) or _is_caught(translator):
        return None
    if _only_raises(instructions[after:]):
        return on_true
    if _only_raises(instructions[translator.indexof[jump.target] :]):
        return not on_true
    return None


def _only_raises(instructions: Sequence[Any]) -> bool:
    """Whether a block raises before it branches or returns."""
    for instruction in instructions:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in instruction.opname or instruction.opname.startswith(_LEAVES):
            return False
    return False


_LEAVES = ("RETURN", "YIELD", "FOR_ITER", "RERAISE", "SEND")


def _is_caught(translator: Any) -> bool:
    """Whether this function, or one that called it, may catch an exception of here."""
    while translator:
        entry = translator.current_instruction.exn_tab_entry
        while entry:
            handler = translator.instructions[translator.indexof[entry.target] :]
            names = [instruction.opname for instruction in handler]
            ends = names[: names.index("RERAISE")] if "RERAISE" in names else names
            if names[0] != "COPY" and {"CHECK_EXC_MATCH", "POP_EXCEPT"} & {*ends}:
                return True
            entry = handler[0].exn_tab_entry
        translator = translator.parent
    return False


def capture_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a capture if the code can't be one graph.

    The tracer raises NotImplementedError for values that no graph can hold, such as a generator.
    """
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException, AssertionError, NotImplementedError, *data_dependent_errors())


def _lines_traced(error: Exception) -> list[tuple[str, object]]:
    """Return the files and lines that the tracer was at, from the outermost, when an error was raised."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    translators = (
        frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)
    )
    return [
        (t.f_code.co_filename, t.lineno)
        for t in translators
        if isinstance(t, InstructionTranslatorBase)
    ]


@contextlib.contextmanager
def in_one_piece(
    layers: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """Let ``nn.LSTM`` and its like call ``layers``, and all call ``functions`` of torch, untraced.

    torch's own run every step of a layer, also without data, or make shapes of data. So do methods of
    tensors of the same names, and which kernels of cuDNN run is no part of a program.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, tx: Any, *args: Any, **named: Any) -> Any:
            whole = VariableTracker.build(tx, getattr(torch, name))
            return whole.call_function(tx, [self, *args], named)

        return call

    cudnn = torch.backends.cudnn
    with contextlib.ExitStack() as stack:
        for name in functions:
            patch = mock.patch.object(TensorVariable, f"method_{name}", method(name), create=True)
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(cudnn, "flags", lambda **k: contextlib.nullcontext()))
        for owner, table in ((torch._VF, layers), (torch, functions)):
            whole = {name: dynamo.allow_in_graph(function) for name, function in table.items()}
            stack.enter_context(mock.patch.multiple(owner, **whole))
        yield
