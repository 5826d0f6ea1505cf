"""Facts of an operator's schema: whether rows can describe it, and examples of its arguments."""

from __future__ import annotations

from typing import Any, Final

import torch

_UNSPLITTABLE: Final = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.dynamic_output_shape: "the shapes of its results depend on the data",
    torch.Tag.data_dependent_output: "its result is a number that depends on the data",
}


def unsplittable(op: Any) -> str:
    """Return the reason why no row can describe an operator, if its schema has one."""
    if op._schema.is_mutable:
        return "it writes into its inputs"
    if not any("Tensor" in str(r.type) for r in op._schema.returns):
        return "it returns no tensor, so all it does is a side effect"
    return next((why for tag, why in _UNSPLITTABLE.items() if tag in op.tags), "")


def takes_tensor(argument: Any) -> bool:
    """Return whether an argument of a schema is one required tensor."""
    return str(argument.type) == "Tensor"


def plain_example(argument: Any) -> Any:
    """Return a value for an argument of a schema that is no tensor: a dim, a factor, a flag."""
    text = str(argument.type)
    if text.startswith("Optional"):
        return None
    simple = {"int": 1, "SymInt": 1, "float": 0.5, "number": 0.5, "bool": False}
    return simple.get(text, [1])
