"""Checks of a model, its batch and its loss before they are captured. (torch)"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from hap.capture import torch_private
from hap.capture.computed_weights import computed_weights
from hap.capture.remedies import NESTED, SPARSE, remedy_of_failure
from hap.errors import ModelError
from hap.ir.graph import Graph

RESERVED = frozenset({
    "_check_call", "_code", "_comm", "_comms", "_compares", "_complex", "_constants", "_copies", "_ctx", "_cut", "_device", "_digest",
    "_eval_keeps_buffers", "_frozen", "_graphs", "_held", "_inputs", "_order", "_parts", "_persistent", "_plan", "_planned_in_training", "_put", "_same",
    "_state", "full_state_dict", "grad_norm", "in_turn", "load_full_state_dict", "record_draws",
    "without_dropout",
})  # fmt: skip
"""Attributes of :class:`hap.runtime.hap_module.HapModule`, whose tensors are named as the model's."""

BY_MODE = {"aten.native_dropout.default", "hap.by_mode.default", "hap.in_training.default"}
"""Operators whose result depends on whether the planned module trains."""


def check_module(module: nn.Module) -> None:
    """Raise ``ModelError`` for a module whose Python code can't be traced."""
    for path, sub in module.named_modules():
        where = f"the module {path!r}" if path else "the model"
        if isinstance(sub, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is compiled by torch.jit, so that its Python code is not known",
                hint="use the nn.Module that it was made of",
            )
        if torch_private.is_compiled(sub):
            raise ModelError(
                f"{where} is wrapped by torch.compile",
                hint="use the module inside; --backend inductor compiles what each rank runs",
            )


def check_parameters(module: nn.Module) -> None:
    """Raise ``ModelError`` if there is nothing to train."""
    parameters = dict(module.named_parameters())
    lazy = next(
        (n for n, p in parameters.items() if isinstance(p, nn.UninitializedParameter)), None
    )
    if lazy is not None:
        raise ModelError(
            f"the parameter {lazy!r} has no shape before the first forward",
            hint="give the sizes (nn.Linear for nn.LazyLinear), or call the model once in model()",
        )
    if not parameters:
        raise ModelError(
            "the model has no parameters, so that there is nothing to train",
            hint="return a module with parameters from model()",
        )
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError(
            f"none of the model's {len(parameters)} parameters requires grad",
            hint="leave requires_grad true on the parameters to train",
        )


def check_layouts(module: nn.Module) -> None:
    """Raise ``ModelError`` for a sparse or nested tensor of the model, which no program can hold."""
    for name, tensor in _tensors(module):
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ModelError(
                f"the model holds the {kind} tensor {name!r}, but only dense tensors are supported",
                hint=NESTED if tensor.is_nested else SPARSE,
            )


def check_loss_parameters(loss: object) -> None:
    """Raise ``ModelError`` for a loss that is a module with parameters to train."""
    trained = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    for name in (n for n, p in trained if p.requires_grad):
        raise ModelError(
            f"the loss has the parameter {name!r}, but only the model's parameters are trained",
            hint="move it into the model, whose forward may return the loss; if it is a constant, "
            "set its requires_grad to False",
        )


def check_names(module: nn.Module) -> None:
    """Raise ``ModelError`` for a tensor whose name the planned module uses itself."""
    for name in state_of(module) | dict(module.named_parameters()):
        if (first := name.partition(".")[0]) in RESERVED:
            raise ModelError(
                f"the model holds the tensor {name!r}, but {first!r} is an attribute of the module "
                "that hap.compile returns",
                hint=f"rename {first!r} in the model",
            )


def check_shared_memory(module: nn.Module, changed: Container[str], used: Container[str]) -> None:
    """Raise ``ModelError`` for two tensors in the same memory, of which a step changes one.

    One tensor under two names is a tied one, which is no fault.

    Args:
        changed: the parameters and buffers that a step changes.
        used: the tensors that a step reads, or that a state dict holds.
    """
    found: dict[int, tuple[object, list[tuple[str, Tensor]]]] = {}  # storage -> its tensors
    first: dict[int, str] = {}
    for name, tensor in _tensors(module):
        if first.setdefault(id(tensor), name) != name or not tensor.numel():
            continue
        if name not in used or tensor.layout != torch.strided:
            continue
        storage = tensor.untyped_storage()  # is one object for all its tensors, also without data
        _, others = found.setdefault(id(storage), (storage, []))
        for other, held in others:
            if (name in changed or other in changed) and _overlap(tensor, held):
                raise ModelError(
                    f"{other!r} and {name!r} are two tensors in the same memory: a plan keeps them "
                    "apart, so that a step that changes one would not change the other",
                    hint="tie them as one tensor (self.b.weight = self.a.weight, without .data), "
                    "or give each its own memory by clone()",
                )
        others.append((name, tensor))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters, buffers, and tensors that are plain attributes, by dotted name."""
    return [
        (f"{path}.{key}" if path else key, value)
        for path, sub in module.named_modules(remove_duplicate=False)
        for key, value in (*sub._parameters.items(), *sub._buffers.items(), *vars(sub).items())
        if isinstance(value, Tensor)
    ]


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    ends = [_end(one), _end(other)]
    if ends[0] <= other.storage_offset() or ends[1] <= one.storage_offset():
        return False
    if one.dtype != other.dtype:
        return True
    marked = torch.zeros(max(ends), dtype=torch.bool)
    marked.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marked.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _end(tensor: Tensor) -> int:
    """Return the place behind a tensor's last element in its storage, in elements."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def check_mode(graph: Graph, training: bool) -> None:
    """Raise ``ModelError`` if a part of a model in ``eval()`` trains.

    The planned module has one mode, and these operators ask for it. A part in ``eval()`` of a
    model that trains is captured without them.
    """
    for node in () if training else graph.nodes:
        if node.op in BY_MODE and node.args[1:2] != (0.0,):
            where = f"its module {node.module!r}" if node.module else "its forward"
            what = "dropout" if "dropout" in node.op else "batch norm"
            raise ModelError(
                f"the model is in eval(), but {where} runs {what} as in training",
                where=node.source,
                hint="call train() on the model, and eval() on the parts that must not train",
            )


def warn_of_eval(module: nn.Module) -> None:
    """Warn of a model in ``eval()`` with a part that would compute something else in ``train()``."""
    if module.training:
        return
    name = next(
        (p for p, sub in module.named_modules() if not sub.training and _by_mode(sub)), None
    )
    if name is not None:
        warnings.warn(
            f"the model is in eval(), so that the plan has no dropout and does not update running statistics, as of "
            f"{name or type(module).__name__!r}. Models of from_pretrained are in eval(): call model.train() "
            "before planning, to train as usual",
            stacklevel=4,  # the caller of hap.plan
        )


def _by_mode(sub: nn.Module) -> bool:
    """Return whether a module drops elements in training, or keeps running statistics."""
    if getattr(sub, "running_mean", None) is not None:
        return True
    rates = {key: value for key, value in vars(sub).items() if isinstance(value, float) and value}
    return ("Drop" in type(sub).__name__ and "p" in rates) or any("drop" in key for key in rates)


def check_hooks(module: nn.Module) -> None:
    """Raise ``ModelError`` for hooks that the captured graph can't hold.

    Forward hooks, forward pre-hooks, parametrizations, and hooks on tensors inside the forward are
    traced with the forward.
    """
    check_gradient_hooks(module)
    for path, sub in module.named_modules():
        where = f"the module {path!r} ({type(sub).__name__})" if path else "the model itself"
        known = computed_weights(sub)
        made = [k for k, v in vars(sub).items() if isinstance(v, Tensor) and v.grad_fn is not None]
        if made := [name for name in made if name not in known]:
            raise ModelError(
                f"{where} can't be captured: it holds the tensor {made[0]!r}, which was computed before the forward",
                hint="compute it in the forward, or by a parametrization",
            )
    if kind := torch_private.global_hook():
        raise ModelError(
            f"a hook on all modules is registered ({kind}), which the captured step would not run",
            hint="remove it before planning",
        )


def check_gradient_hooks(module: nn.Module) -> None:
    """Raise ``ModelError`` for hooks of the backward on a parameter or a module."""
    for name, parameter in module.named_parameters():
        if kind := torch_private.parameter_hook(parameter):
            raise ModelError(
                f"the parameter {name!r} has a hook ({kind}), which the captured step would not run",
                hint="remove it, and register it on the parameters of the module that hap.compile "
                "returns; or change the gradient in the forward, by a parametrization, or by a hook "
                "on a tensor that is computed from the parameter",
            )
    for path, sub in module.named_modules():
        where = f"the module {path!r} ({type(sub).__name__})" if path else "the model itself"
        if kind := torch_private.backward_hook(sub):
            raise ModelError(
                f"{where} has a backward hook ({kind}), which the captured step would not run",
                hint="register a forward hook that calls register_hook on the module's output",
            )


def state_of(module: nn.Module) -> dict[str, int]:
    """The identities of all buffers, and of tensors that are plain attributes, by dotted name."""
    return {
        f"{path}.{key}" if path else key: id(value)
        for path, sub in module.named_modules()
        for key, value in (*sub._buffers.items(), *vars(sub).items())
        if isinstance(value, Tensor)
    }


def not_copied(module: nn.Module, memo: Mapping[int, object], error: Exception) -> ModelError:
    """Return the error that names the attribute of a module that can't be copied."""
    name = ""
    for path, sub in module.named_modules():
        for key, value in vars(sub).items():
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                name = f"{path}.{key}" if path else key  # of the innermost module: it comes last
    what = f"the attribute {name!r} of the model" if name else "the model or its loss"
    text = str(error).partition("\n")[0]
    return ModelError(
        f"{what} can't be copied: {type(error).__name__}: {text}",
        hint="keep it outside of the module, in a global; if it is a tensor computed from parameters, "
        "compute it in the forward, or detach() it",
    )


def numbers_of(module: nn.Module) -> dict[str, object]:
    """The numbers and texts that are plain attributes of modules, by dotted name."""
    return {
        f"{path}.{key}" if path else key: value
        for path, sub in module.named_modules()
        for key, value in vars(sub).items()
        if isinstance(value, bool | int | float | str)
    }


def changed_number(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Return the first attribute of :func:`numbers_of` that a forward changed, or nothing."""
    missing = object()  # an attribute of the class becomes the module's own when it is changed
    return next((n for n, value in after.items() if before.get(n, missing) != value), "")


def check_state(before: Mapping[str, int], after: Mapping[str, int], kept: Container[str]) -> None:
    """Raise ``ModelError`` if the forward replaces a buffer whose value the next step needs.

    Args:
        before, after: :func:`state_of` the module, before and after a forward.
        kept: the buffers that a step reads, or that a state dict holds.
    """
    for name in before:
        if name in kept and after.get(name) != before[name]:
            leaf = name.rpartition(".")[2]
            raise ModelError(
                f"the forward replaces the buffer {name!r}, so that its new value would be lost",
                hint=f"write into the buffer: self.{leaf}.copy_(...), or self.{leaf} += ...; if only "
                "the first forward makes it, call the model once in model()",
            )


def check_batch(entries: Mapping[str, Tensor]) -> None:
    """Raise ``ModelError`` for tensors of a batch that a step can't take."""
    for name, tensor in entries.items():
        where = f"batch entry {name!r}"
        if tensor.requires_grad:
            raise ModelError(
                f"{where} requires grad, but a step computes gradients of parameters only",
                hint="detach it; to train it, make it a parameter of the model",
            )
        if tensor.layout != torch.strided:
            kind = f"of layout {tensor.layout}"
            raise ModelError(f"{where} is {kind}", hint="return a dense tensor from batch()")


_ASKS_FOR_DATA = ("data is not allocated", "ignore_fresh_unbacked_symbols")
"""Parts of messages by which torch asks a tensor without data for a number, the second in ``while_loop``."""


def check_backward(step: nn.Module) -> None:
    """Raise ``ModelError`` if the forward has called ``backward``: parameters have gradients after it."""
    if any(parameter.grad is not None for parameter in step.parameters()):
        raise ModelError(
            "the forward calls backward()",
            hint="return the loss alone: the plan computes its gradients. If the loss reads a gradient, compute it by "
            "torch.autograd.grad(..., create_graph=True)",
        )


def check_loss(
    run: Callable[[], object], where: Callable[[Exception], str], skip: tuple[type[Exception], ...]
) -> None:
    """Run the forward once on fake tensors, so that a mistake of the user's reads as one.

    Args:
        run: returns the loss.
        where: the user's line at which an error was raised.
        skip: errors for which the capture that follows names the line.
    """
    fix = (
        "return the scalar loss, a tuple that begins with it, an object with .loss, a dict "
        'with "loss", or define loss(output, batch)'
    )
    try:
        value = run()
    except skip:
        return
    except Exception as error:
        if any(part in str(error) for part in _ASKS_FOR_DATA):
            return
        if isinstance(error, AttributeError | KeyError) and "loss" in str(error):
            raise ModelError(f"the forward returns no loss: {error}", hint=fix) from error
        raise ModelError(
            f"the forward fails: {type(error).__name__}: {error}",
            where=where(error),
            hint=remedy_of_failure(error),
        ) from error
    if not isinstance(value, Tensor):
        raise ModelError(f"the loss is a {type(value).__name__}, not a tensor", hint=fix)
    if value.dim() != 0:
        raise ModelError(f"the loss has shape {tuple(value.shape)}, not a scalar", hint=fix)
    if not value.requires_grad:
        raise ModelError(
            f"the loss ({value.dtype}) has no gradient: it depends on no parameter that requires grad",
            hint="compute it from the model's output, without detach(), no_grad() or integers",
        )
