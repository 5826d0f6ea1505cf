"""Trace an ``nn.Module`` into the graph of one training step, on fake tensors.

Everything runs under fake tensors: no weight is allocated, no kernel runs, and the graph does not
depend on the capturing machine's device.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch import fx, nn

from hap.capture import ctc, dynamo_private, tensor_constants, torch_private
from hap.capture.autocast_policy import casts_of_cuda
from hap.capture.captured_step import CapturedStep
from hap.capture.checks import (
    changed_number,
    check_backward,
    check_batch,
    check_gradient_hooks,
    check_hooks,
    check_layouts,
    check_loss,
    check_loss_parameters,
    check_mode,
    check_module,
    check_names,
    check_parameters,
    check_shared_memory,
    check_state,
    not_copied,
    numbers_of,
    state_of,
)
from hap.capture.complex_pairs import real_pairs
from hap.capture.computed_weights import compute_when_read
from hap.capture.constant_masks import simplify_masks
from hap.capture.deepstack import features_scattered
from hap.capture.experts import experts_by_row
from hap.capture.fixed_entries import tensor_of
from hap.capture.function_caches import no_fakes_in_caches
from hap.capture.generation_caches import leave_out_caches
from hap.capture.graph_break import GraphBreak
from hap.capture.hidden_tensors import hidden_tensors
from hap.capture.joint import joint_of, programs_inside
from hap.capture.kept_constants import forget
from hap.capture.layer_calls import watched
from hap.capture.module_moves import modules_stay
from hap.capture.operator_log import (
    Attributes,
    OperatorLog,
    check_same,
    computes_something_else,
    first_difference,
)
from hap.capture.packed_attention import packed_in_one_call
from hap.capture.recompute import WAYS, Region
from hap.capture.recurrence import LAYERS
from hap.capture.remedies import not_one_graph
from hap.capture.repeated_layers import repeated_kinds
from hap.capture.replaced_functions import UNTRACED
from hap.capture.source_lines import line_of, module_of, raised_at, source_of
from hap.cluster.work import PRECISIONS
from hap.errors import InputError, ModelError
from hap.gc_pause import gc_paused
from hap.ir.batch import Batch, call, flatten, form_of, rebuild
from hap.ir.graph import ITEM_BYTES, Arg, Dtype, Graph, Input, Output, Ref, Tensor
from hap.ir.graph_builder import Builder
from hap.ir.linear_layers import VIEW_ENDS

Loss = Callable[[Any, Any], TorchTensor]


class Step(nn.Module):
    """The user's module as a function from flat tensors to the scalar loss."""

    def __init__(
        self, module: nn.Module, batch: Batch, loss: Loss | None, autocast: str = ""
    ) -> None:
        super().__init__()
        self.module = module
        self._names = tuple(flatten(batch))
        self._form = form_of(batch)
        self._loss = (loss,)  # a module in a tuple is no part of this one
        self._autocast = getattr(torch, autocast) if autocast else None

    def forward(self, *tensors: TorchTensor) -> TorchTensor:
        if self._autocast is None:
            return self._run(*tensors)
        with torch.autocast(tensors[0].device.type, self._autocast):
            return self._run(*tensors)

    def _run(self, *tensors: TorchTensor) -> TorchTensor:
        batch = rebuild(self._form, dict(zip(self._names, tensors, strict=True)), tensor_of)
        output = call(self.module, batch)
        (loss,) = self._loss
        if loss is not None:
            output = loss(output, batch)
        if isinstance(output, tuple | list) and not hasattr(output, "loss"):
            output = output[0]
        if not isinstance(output, TorchTensor):
            output = output["loss"] if isinstance(output, dict) else output.loss
        return output  # type: ignore[no-any-return]


def capture(
    module: nn.Module, batch: Batch, loss: Loss | None = None, *, autocast: str = "",
    recompute: str = "",
) -> Graph:  # fmt: skip
    """Return the graph of :func:`captured`, with further recomputation in the backward.

    Args:
        recompute: one of :data:`hap.capture.recompute.WAYS`, or nothing.

    Raises:
        Those of :func:`captured`.
        InputError: an unknown ``recompute``.
    """
    check_recipe("", recompute)
    return captured(module, batch, loss, autocast=autocast).recomputing(recompute)


def captured(
    module: nn.Module, batch: Batch, loss: Loss | None = None, *, autocast: str = ""
) -> CapturedStep:
    """Return the joint forward and backward graph of one step on the *global* batch.

    The backward recomputes the module's parts under ``torch.utils.checkpoint``.

    Args:
        module: the user's module, real, on the meta device, or built under fake tensors.
        batch: the global batch, likewise; only shapes and dtypes are read.
        loss: ``loss(output, batch)``, if the module's output is not a loss itself.
        autocast: ``bfloat16`` or ``float16``: run it in automatic mixed precision.

    Raises:
        ModelError: the forward is no scalar loss, or depends on data; the error has the line.
        InputError: an unknown ``autocast``.
    """
    check_recipe(autocast, "")
    check_module(module)
    check_parameters(module)
    check_layouts(module)
    check_names(module)
    check_hooks(module)
    check_loss_parameters(loss)
    check_batch(flatten(batch))
    mode = torch_private.fake_mode()
    whole = Step(module, batch, loss, autocast)
    step, tensors = _fake(whole, flatten(batch), mode)
    leave_out_caches(step.module)
    before, saved = state_of(step.module), module.state_dict(keep_vars=True)
    layers = dynamo_private.in_one_piece(LAYERS, {**ctc.FUNCTIONS, **UNTRACED})
    kinds = repeated_kinds(step.module)
    parts = torch_private.attention_in_parts()
    packed, scattered = packed_in_one_call(step.module), features_scattered(step.module)
    grad = torch.set_grad_enabled(torch.is_grad_enabled())  # a trace that fails may leave it off
    log = OperatorLog()
    with (
        no_fakes_in_caches(log.results_live, log.constants_live), grad, mode, gc_paused(), casts_of_cuda(), parts,
        experts_by_row(), layers, packed, scattered, modules_stay(),
    ):  # fmt: skip
        with dynamo_private.as_if_compiling():
            skip = torch_private.data_dependent_errors()
            given = nn.ModuleList([step.module, module])  # hooks may change the original
            numbers, attributes = numbers_of(given), Attributes(step.module)
            with log, torch_private.known_numbers():
                with watched(kinds, log) as calls:
                    check_loss(lambda: step(*tensors), raised_at, skip)
                check_backward(step)
                seen = log.take()
                counter = changed_number(numbers, numbers_of(given)).partition(".")[2]
                kept = attributes.kept()  # of use to the next forward, or to this one alone
                check_loss(lambda: step(*tensors), raised_at, skip)
                place = first_difference(seen, log.take())
                line = "" if place is None else log.line_of(place, lambda: step(*tensors))
                if place is None and attributes.restore(log, saved):
                    counter = ""
        forget(log.constants_live())
        check_gradient_hooks(step.module)  # those that the forward registers
        after = state_of(step.module)
        check_state(before, after, saved)
        if place is not None:
            raise computes_something_else(kept[0][0] if kept else counter, line)
        try:
            joint = joint_of(step, tensors, kinds, calls)
            if counter:
                with dynamo_private.as_if_compiling(), log, torch_private.known_numbers():
                    check_same(lambda: step(*tensors), log, seen, counter)
        except GraphBreak as error:
            raise not_one_graph(str(error), error.line, error.depends_on_data) from error
        except torch_private.data_dependent_errors() as error:
            text = str(error)
            raise not_one_graph(text.partition("\n")[0], line_of(text)) from error
    joint = _with_buffers(joint, module)
    real_pairs(joint.graph, source_of)
    simplify_masks(joint.graph)
    graph, regions = _convert(joint, step, tuple(flatten(batch)))
    check_state(
        before, after, {i.target for i in graph.role("buffer") if graph.consumers[i.tensor]}
    )
    check_shared_memory(
        module, {o.target for o in graph.outputs}, {i.target for i in graph.inputs} | saved.keys()
    )
    check_mode(graph, module.training)
    return CapturedStep(graph, regions)


AUTOCAST = ("bfloat16", "float16")


def check_recipe(autocast: str, recompute: str, float32_matmul_precision: str = "") -> None:
    """Raise ``InputError`` unless each is empty or known."""
    for name, given, known in (
        ("autocast", autocast, AUTOCAST), ("recompute", recompute, WAYS),
        ("float32_matmul_precision", float32_matmul_precision, PRECISIONS),
    ):  # fmt: skip
        if given and given not in known:
            raise InputError(f"unknown {name} {given!r}", hint=f"use one of {', '.join(known)}")


def _fake(step: Step, batch: Mapping[str, TorchTensor], mode: Any) -> tuple[Step, Any]:
    """Return a copy of ``step`` and its tensors without data, in one fake mode, on the CPU."""
    memo: dict[int, Any] = {}

    def fake(t: TorchTensor) -> TorchTensor:
        with mode:
            bare = torch.empty(t.shape, dtype=t.dtype)
        return nn.Parameter(bare, t.requires_grad) if isinstance(t, nn.Parameter) else bare

    for tensor in [*step.parameters(), *step.buffers()]:
        memo[id(tensor)] = fake(tensor)
    for sub in step.modules():
        for value in vars(sub).values():
            if isinstance(value, TorchTensor):
                memo.setdefault(id(value), fake(value))
    for value in hidden_tensors(step).values():  # they become constants, as in a model with data
        if (known := torch_private.known_value(value)) is not None:
            memo[id(value)] = known
    try:
        with warnings.catch_warnings():  # torch warns of tensors without data in lists
            warnings.simplefilter("ignore")
            twin = copy.deepcopy(step, dict(memo))
    except Exception as error:
        raise not_copied(step.module, memo, error) from error
    compute_when_read(twin)
    for sub in twin.modules():  # a tensor kept as a plain attribute becomes a buffer
        for key, value in list(vars(sub).items()):
            if isinstance(value, TorchTensor):
                delattr(sub, key)
                sub.register_buffer(key, value, persistent=False)
    return twin, tuple(fake(t) for t in batch.values())


# --- fx -> Graph ---

_DROPPED_KWARGS = {"device", "layout", "pin_memory"}


def _convert(
    joint: torch_private.Joint, step: Step, batch_names: tuple[str, ...]
) -> tuple[Graph, dict[str, Region]]:
    """Return the graph, and the checkpoints of its nodes."""
    placeholders = [n for n in joint.graph.nodes if n.op == "placeholder"]
    new = {target for role, target in joint.outputs if role == "buffer"}
    build = Builder(n.name for n, i in zip(placeholders, joint.inputs, strict=True) if i[1] in new)
    names = _first_names(step)
    values: dict[fx.Node, Any] = {}  # Ref, or a tuple of Refs for several results
    regions: dict[str, Region] = {}  # node -> its checkpoint
    inputs = []
    for node, (role, target) in zip(placeholders, joint.inputs, strict=True):
        target = batch_names[int(target)] if role == "input" else names.get(target, target)
        if role == "unused":
            continue
        values[node] = Ref(build.tensor(_tensor(node, node.name, node.meta["val"])))
        inputs.append(Input(tensor=node.name, role=role, target=target))

    def arg(value: Any) -> Arg:
        match value:
            case fx.Node():
                return values[value]
            case list() | tuple():
                return tuple(arg(v) for v in value)
            case torch.dtype():
                return Dtype(str(value).removeprefix("torch."))
            case torch.device() | torch.layout():
                return None
            case torch.memory_format():
                return str(value).removeprefix("torch.")
            case bool() | int() | float() | str() | None:
                return value
        raise ModelError(
            f"a plan can't hold an operator's argument {value!r} ({type(value).__name__})"
        )

    for node in joint.graph.nodes:
        if node.op == "get_attr" and not isinstance(
            getattr(joint.graph.owning_module, str(node.target)), nn.Module
        ):
            held = _held(joint, node)
            (values[node],) = build.node(
                name=node.name,
                op="hap.constant.default",
                args=(tuple(held.flatten().tolist()), tuple(held.shape)),
                kwargs=(("dtype", Dtype(str(held.dtype).removeprefix("torch."))),),
                results=[_tensor(node, node.name, held)],
                source=source_of(node),
                module=module_of(node),
            )
            continue
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
            continue
        if "." not in str(node.target):
            raise programs_inside(node)
        results = node.meta["val"]
        many = isinstance(results, tuple | list)
        tensors = [
            _tensor(node, f"{node.name}.{k}" if many else node.name, r)
            if isinstance(r, TorchTensor) else None
            for k, r in enumerate(results if many else [results])
        ]  # fmt: skip
        refs = build.node(
            name=node.name,
            op=str(node.target).replace("::", "."),
            args=arg(node.args),
            kwargs=tuple((k, arg(v)) for k, v in node.kwargs.items() if k not in _DROPPED_KWARGS),
            results=tensors,
            source=source_of(node),
            module=module_of(node),
        )
        # A number among the results, such as the longest of some lengths, is known here.
        values[node] = refs if many else refs[0]
        if many and any(isinstance(r, int | float) for r in results):
            values[node] = tuple(
                r if ref is None else ref for ref, r in zip(refs, results, strict=True)
            )
        if found := torch_private.checkpointed(node):
            regions.setdefault(node.name, Region(*found))
    ends: Any = joint.graph.output_node().args[0]
    outputs = [
        Output(tensor=values[n].name, role=role, target=names.get(target, target))
        for n, (role, target) in zip(ends, joint.outputs, strict=True)
        if n is not None and role != "unused"
    ]
    # A new view of a linear layer belongs to the checkpoint of its node.
    named = [(f"{name}{end}", region) for name, region in regions.items() for end in VIEW_ENDS]
    regions.update(named)
    return build.graph(inputs=tuple(inputs), outputs=tuple(outputs)), regions


def _with_buffers(joint: torch_private.Joint, module: nn.Module) -> torch_private.Joint:
    """Return the graph with the parameters that the forward changes, as a momentum encoder's, as buffers.

    Raises:
        ModelError: one of them requires grad.
    """
    changed = {target for role, target in joint.outputs if role == "parameter"}
    for name in sorted(target.removeprefix("module.") for target in changed):
        if module.get_parameter(name).requires_grad:
            raise ModelError(
                f"the forward changes the parameter {name!r}, which only the optimizer may do",
                hint="change it outside of the forward, or let it require no grad",
            )

    def named(ends: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple(("buffer" if t in changed else role, t) for role, t in ends)

    return replace(joint, inputs=named(joint.inputs), outputs=named(joint.outputs))


def _held(joint: torch_private.Joint, node: fx.Node) -> TorchTensor:
    """Return a tensor that the trace keeps outside the graph: made in the forward from data."""
    value = getattr(joint.graph.owning_module, str(node.target))
    if value.requires_grad:
        raise ModelError(
            f"the step reads a tensor of shape {tuple(value.shape)} that requires grad, and is no parameter "
            "of the model: it would not be trained",
            where=source_of(node),
            hint="make it a parameter of the model, whose forward may return the loss; for a penalty on "
            "the model's own parameters, compute it in the forward; for a constant, detach it",
        )
    if torch_private.is_fake(value) or value.numel() > tensor_constants.LARGEST:
        raise tensor_constants.too_large(value.numel(), source_of(node))
    return value  # type: ignore[no-any-return]


def _first_names(step: Step) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first name of the same tensor in the module."""
    module = step.module
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {f"module.{name}": first.setdefault(id(t), name) for name, t in named}


def _tensor(node: fx.Node, name: str, value: TorchTensor) -> Tensor:
    """Describe a tensor that ``node`` makes.

    Raises:
        ModelError: programs can't hold such a tensor.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    if value.layout != torch.strided:
        raise ModelError(
            f"the step computes a tensor of layout {str(value.layout).removeprefix('torch.')} "
            f"({node.target})",
            where=source_of(node),
            hint="use dense tensors: sparse=False in an embedding, for example",
        )
    if dtype not in ITEM_BYTES:
        hint = f"supported are {', '.join(ITEM_BYTES)}"
        if value.is_complex():
            hint = "compute with real and imaginary parts as real tensors"
        raise ModelError(
            f"the step computes a tensor of dtype {dtype} ({node.target})",
            where=source_of(node), hint=hint,
        )  # fmt: skip
    return Tensor(name=name, shape=tuple(int(s) for s in value.shape), dtype=dtype)
