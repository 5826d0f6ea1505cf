"""Submodules of a planned module: they hold tensors under the model's names, and none of its code."""

from __future__ import annotations

from typing import Any

from torch import nn

from hap.errors import PlanError


class ModulePart(nn.Module):
    """A module without the attributes of the model's, whose numbers are constants of the plan."""

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
        if name in vars(self).get("_numbers", ()):
            what = f"{name!r} is a number of the planned model, and a constant of the plan"
            raise PlanError(what, hint="keep what changes in a buffer, or in the batch")
        super().__setattr__(name, value)


def numbers_by_module(model: nn.Module) -> dict[str, frozenset[str]]:
    """Return the names of the numbers that are attributes of each module, by its dotted name."""
    return {
        path: frozenset(key for key, value in vars(sub).items() if type(value) in (int, float))
        for path, sub in model.named_modules(remove_duplicate=False)
    }
