"""Submodules of a planned module: they hold tensors under the model's names, and none of its code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from hap.errors import PlanError


class ModulePart(nn.Module):
    """A module without the attributes of the model's, whose values are constants of the plan."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error}. The module of a plan returns the loss, and has the model's parameters and buffers "
                "alone. Other attributes, such as `config`, and methods, such as `generate`, are those of the "
                "model that was given to hap.compile: trained, after "
                "model.load_state_dict(module.full_state_dict())"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_constants", ()):
            what = (
                f"{name!r} is a number or a text of the planned model, and a constant of the plan"
            )
            raise PlanError(what, hint="keep what changes in a buffer, or in the batch")
        if vars(self).get("_modules", {}).get(name, value) is not value:
            raise PlanError(
                f"the submodule {name!r} is a part of the plan, which computes the one that was planned",
                hint="replace it in the model before hap.plan; to set its weights alone, change them in "
                "module.full_state_dict(), and pass that to module.load_full_state_dict()",
            )
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for dtype in {x.dtype for x in (*self.parameters(recurse), *self.buffers(recurse))}:
            now = fn(torch.empty(0, dtype=dtype)).dtype
            if now != dtype:
                before, after = (str(x).removeprefix("torch.") for x in (dtype, now))
                raise PlanError(
                    f"the plan computes with tensors in {before}, and can't go on in {after}",
                    hint="convert the model before hap.plan, or plan with autocast",
                )
        return super()._apply(fn, recurse)  # type: ignore[no-any-return,no-untyped-call]


def _refused(self: Submodule, *args: Any, **kwargs: Any) -> NoReturn:
    raise PlanError(
        "a submodule of a planned module has no forward of its own: the plan runs the model as a whole",
        hint="register hooks in the model, before hap.plan; to compute with a part of it alone, copy the "
        "trained weights: model.load_state_dict(module.full_state_dict())",
    )


class Submodule(ModulePart):
    """A part below the planned module: nothing calls it, so that its hooks would never run."""

    forward = _refused
    register_forward_hook = register_forward_pre_hook = _refused
    register_full_backward_hook = register_full_backward_pre_hook = _refused
    register_backward_hook = _refused


_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module, such as ``training``."""


def constants_by_module(model: nn.Module) -> dict[str, frozenset[str]]:
    """Return the names of the numbers, flags and texts that are attributes of each module, by its dotted name."""
    return {
        path: frozenset(
            key
            for key, value in vars(sub).items()
            if type(value) in (bool, int, float, str) and key not in _OWN
        )
        for path, sub in model.named_modules(remove_duplicate=False)
    }
