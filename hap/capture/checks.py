"""Checks of a model, its batch and its loss before they are captured. (torch)"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor, nn

from hap.capture import torch_private
from hap.errors import ModelError


def check_module(module: nn.Module) -> None:
    """Raise ``ModelError`` for a module whose Python code can't be traced."""
    for path, sub in module.named_modules():
        where = f"the module {path!r}" if path else "the model"
        if isinstance(sub, torch.jit.ScriptModule):
            raise ModelError(
                f"{where} is compiled by torch.jit, so that its Python code is not known",
                hint="use the nn.Module that it was made of",
            )
        if isinstance(sub, torch_private.OptimizedModule):
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
    wrong = next((n for n, p in parameters.items() if p.requires_grad and p.is_complex()), None)
    if wrong is not None:
        raise ModelError(
            f"the parameter {wrong!r} is complex", hint="train its real and imaginary parts"
        )


def check_hooks(module: nn.Module) -> None:
    """Raise ``ModelError`` for hooks that the captured graph can't hold.

    Forward hooks, forward pre-hooks, parametrizations, and hooks on tensors inside the forward are
    traced with the forward.
    """
    for name, parameter in module.named_parameters():
        if kind := torch_private.parameter_hook(parameter):
            raise ModelError(
                f"the parameter {name!r} has a hook ({kind}), which the captured step would not run",
                hint="change the gradient in the forward, by a hook on a tensor computed from the "
                "parameter or a parametrization; or call hap.compile without the hook, and "
                "register it on the parameters of the module that it returns",
            )
    for path, sub in module.named_modules():
        where = f"the module {path!r} ({type(sub).__name__})" if path else "the model itself"
        if kind := torch_private.backward_hook(sub):
            raise ModelError(
                f"{where} has a backward hook ({kind}), which the captured step would not run",
                hint="register a forward hook that calls register_hook on the module's output",
            )
        old = torch_private.old_reparametrization(sub)
        made = [k for k, v in vars(sub).items() if isinstance(v, Tensor) and v.grad_fn is not None]
        if old or made:
            reason = old or f"it keeps the tensor {made[0]!r}, computed before the forward"
            raise ModelError(
                f"{where} can't be captured: {reason}",
                hint="compute it in the forward, by torch.nn.utils.parametrizations.weight_norm, "
                "spectral_norm or a parametrization of your own",
            )
    if kind := torch_private.global_hook():
        raise ModelError(
            f"a hook on all modules is registered ({kind}), which the captured step would not run",
            hint="remove it before planning",
        )


def state_of(module: nn.Module) -> dict[str, int]:
    """The identities of all buffers, and of tensors that are plain attributes, by dotted name."""
    return {
        f"{path}.{key}" if path else key: id(value)
        for path, sub in module.named_modules()
        for key, value in (*sub._buffers.items(), *vars(sub).items())
        if isinstance(value, Tensor)
    }


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
                f"{where} requires grad, but a step has gradients of parameters alone",
                hint="detach it; a tensor to train belongs into the model, as a parameter",
            )
        if tensor.layout != torch.strided:
            kind = f"of layout {tensor.layout}"
            raise ModelError(f"{where} is {kind}", hint="return a dense tensor from batch()")


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
        if isinstance(error, AttributeError | KeyError) and "loss" in str(error):
            raise ModelError(f"the forward returns no loss: {error}", hint=fix) from error
        raise ModelError(
            f"the forward fails: {type(error).__name__}: {error}",
            where=where(error),
            hint="the model must run on the batch that batch() returns",
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
