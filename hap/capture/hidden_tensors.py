"""Tensors that modules hold outside of parameters and buffers: in lists, dicts and plain objects. (torch)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

from torch import Tensor, nn

from hap.capture import torch_private
from hap.errors import ModelError

T = TypeVar("T")


class HiddenTensorsError(ModelError):
    """The forward reads tensors that a plain object holds, which were built without data."""


def real_if_needed(
    use: Callable[[nn.Module], T], model: nn.Module, make: Callable[[], nn.Module],
    progress: Callable[[str], None],
) -> T:  # fmt: skip
    """Return ``use(model)``, or of a model made anew if plain objects of it hold tensors without data."""
    try:
        return use(model)
    except HiddenTensorsError:
        progress("a plain object of the model holds tensors: building the model with data")
        return use(make())


def not_differentiated(module: nn.Module, error: Exception) -> ModelError:
    """Return the error for a step that torch's tracer does not differentiate."""
    hidden = hidden_tensors(module)
    bare = [name for name, t in hidden.items() if torch_private.is_fake(t)]
    if "Unexpected fake buffer" in str(error) and bare:
        return HiddenTensorsError(
            f"the model holds tensors without data in {', '.join(map(repr, bare[:4]))}",
            hint="build the model with data, or register these tensors by register_buffer",
        )
    text = str(error).partition("\n")[0]
    held = ", ".join(map(repr, [*hidden][:4])) or "that the forward writes into"
    return ModelError(
        f"torch can't differentiate the step: {type(error).__name__}: {text}",
        hint=f"register the tensors {held} by register_buffer, each under its own name; "
        "hap plan -v shows the traceback",
    )


def hidden_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of lists and plain objects that modules hold, by dotted name.

    Parameters, buffers and tensors that are attributes of a module are none of them.
    """
    found: dict[str, Tensor] = {}
    seen = {id(t) for t in (*module.parameters(), *module.buffers())}

    def look(value: object, name: str, depth: int) -> None:
        if id(value) in seen or isinstance(value, nn.Module | type | ModuleType):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[name] = value
            return
        held = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        if isinstance(value, list | tuple | set):
            held = dict(enumerate(value))
        for key, entry in held.items() if depth else ():
            look(entry, f"{name}.{key}", depth - 1)

    for path, sub in module.named_modules():
        own = {
            key: value for key, value in vars(sub).items() if key not in ("_parameters", "_buffers")
        }
        seen.update(id(value) for value in own.values() if isinstance(value, Tensor))
        for key, value in own.items():
            look(value, f"{path}.{key}" if path else key, _DEPTH)
    return found


_DEPTH = 4
"""Levels of objects in which tensors are looked for."""
