"""A global batch: tensors in nested tuples, lists and dicts, and their names.

A tensor is named by its path: ``x`` in ``{"x": t}``, ``1`` in ``(a, t)``, ``inputs.pixels.0`` in
``{"inputs": {"pixels": [t]}}``; a batch that is one tensor is ``*``. Other objects are
constants of the program. So are tensors that are the same in every batch: :class:`Fixed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hap.errors import ModelError

Batch = Any
"""A tensor, a tuple or list (positional arguments), or a dict (keywords) of nested entries."""

Form = Any
"""The structure of a batch as JSON: one entry of ``{kind: content}`` per level."""

LONE = "*"
"""The name of the tensor of a batch that is one tensor."""

TENSOR: Final = object()
"""Stands for a tensor."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor of whole numbers or booleans that is the same in every batch.

    Attributes:
        dtype: as torch names it.
        numbers: nested lists, as of ``Tensor.tolist()``.
    """

    dtype: str
    numbers: Any

    def __str__(self) -> str:
        text = str(self.numbers)
        return text if len(text) <= 60 else f"{text[:60]}..."


WHOLE: Final[Mapping[str, tuple[int, int]]] = {
    "bool": (False, True), "uint8": (0, 255),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Dtypes of a fixed tensor, and their least and largest number: a float would be another number in another
precision."""


_DEEPEST = 64
"""Limit of nested levels; a list that contains itself has no end."""


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, without importing torch, so that plans need no torch."""
    found = hasattr(value, "requires_grad") and hasattr(value, "shape")
    return found and not isinstance(value, type)


def flatten(batch: Batch) -> dict[str, Any]:
    """Return the tensors of a batch by name, in order.

    Raises:
        ModelError: the batch is of no known form, or two tensors have one name.
    """
    found: dict[str, Any] = {}
    for name, tensor in _tensors(batch, ""):
        if name in found:
            raise ModelError(f"two tensors of the batch are called {name!r}", hint="rename a key")
        found[name] = tensor
    return found


def _tensors(entry: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise ModelError(f"the batch is nested deeper than {_DEEPEST} levels", hint="flatten it")
    if is_tensor(entry):
        yield name or LONE, entry
    for key, part in _parts(entry, name):
        yield from _tensors(part, f"{name}.{key}" if name else key, depth + 1)


def _parts(entry: Any, name: str) -> list[tuple[str, Any]]:
    """Return the entries of a container by key; constants have none."""
    match entry:
        case Mapping():
            return [(str(key), part) for key, part in entry.items()]
        case tuple() | list() if type(entry) in (tuple, list):
            return [(str(k), part) for k, part in enumerate(entry)]
        case None | bool() | int() | float() | str() | Fixed() if name:
            return []
    if is_tensor(entry):
        return []
    where = f"batch entry {name!r} is" if name else "batch() returned"
    raise ModelError(
        f"{where} {type(entry).__name__}",
        hint="a batch is a tensor, or tuples, lists and dicts of tensors, numbers, strings, None",
    )


def form_of(batch: Batch) -> Form:
    """Return the structure of a batch with names in place of tensors; inverse of :func:`rebuild`.

    Raises:
        ModelError: the batch is of no known form.
    """
    return _form(batch, "")


def _form(entry: Any, name: str) -> Form:
    if is_tensor(entry):
        return {"tensor": name or LONE}
    forms = {
        key: _form(part, f"{name}.{key}" if name else key) for key, part in _parts(entry, name)
    }
    if isinstance(entry, Mapping):
        return {"dict": forms}
    if isinstance(entry, tuple | list):
        return {type(entry).__name__: list(forms.values())}
    if isinstance(entry, Fixed):
        return {"fixed": {"dtype": entry.dtype, "numbers": entry.numbers}}
    return {"value": entry}


def leaves(form: Form, name: str = "") -> dict[str, Any]:
    """Return the entries of a form by name: constants, and :data:`TENSOR` for tensors."""
    ((kind, content),) = form.items()
    if kind == "tensor":
        return {name or LONE: TENSOR}
    if kind == "value":
        return {name: content}
    if kind == "fixed":
        return {name: Fixed(**content)}
    parts = content.items() if kind == "dict" else enumerate(content)
    found: dict[str, Any] = {}
    for key, part in parts:
        found |= leaves(part, f"{name}.{key}" if name else str(key))
    return found


def fixed_entries(form: Form) -> dict[str, Fixed]:
    """Return the fixed tensors of a form by name; none for the form of a plan that has none."""
    found = leaves(form) if form is not None else {}
    return {name: entry for name, entry in found.items() if isinstance(entry, Fixed)}


def other_entries(form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return how a call's arguments differ from a form, but for missing tensors, in words; ``None`` is as good as nothing."""
    known, found = leaves(form), leaves(form_of(args)) | leaves(form_of(kwargs))
    tensors = given(args, kwargs)
    if known.keys() == {LONE} and "0" in found:
        found[LONE] = found.pop("0")
    other = []
    for name, value in found.items():
        if name not in known:
            other += [name] if value is not None else []
        elif isinstance(planned := known[name], Fixed):
            numbers = tensors[name].tolist() if value is TENSOR else value
            if numbers != planned.numbers:
                other.append(f"{name} ({Fixed(planned.dtype, numbers)}, planned: {planned})")
        elif (value is TENSOR) != (known[name] is TENSOR) or value != known[name]:
            shown = ("a tensor" if v is TENSOR else repr(v) for v in (value, known[name]))
            other.append("{} ({}, planned: {})".format(name, *shown))
    for name, value in known.items():
        if name not in found and not (value is TENSOR or value is None or isinstance(value, Fixed)):
            other.append(f"{name} (missing, planned: {value!r})")
    return other


def rebuild(
    form: Form, tensors: Mapping[str, Any], fixed: Callable[[str, Any], Any] = Fixed
) -> Batch:
    """Return a batch of this form with these tensors in it.

    Args:
        fixed: makes a fixed tensor of its dtype and its numbers.
    """
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: rebuild(part, tensors, fixed) for key, part in content.items()}
    if kind == "value":
        return content
    if kind == "fixed":
        return fixed(content["dtype"], content["numbers"])
    parts = [rebuild(part, tensors, fixed) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def each(batch: Batch, change: Callable[[str, Any], Any]) -> Batch:
    """Return the batch with ``change(name, tensor)`` in place of every tensor."""
    return rebuild(form_of(batch), {name: change(name, t) for name, t in flatten(batch).items()})


def call(function: Callable[..., Any], batch: Batch) -> Any:
    """Apply a module to a batch: a dict by keyword, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(*batch) if isinstance(batch, tuple | list) else function(batch)


def given(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a call's arguments by name; a lone positional one is ``*`` and ``0``."""
    found = flatten(args) | flatten(kwargs)
    lone = [x for x in args if x is not None]
    return found | {LONE: args[0]} if len(lone) == 1 and is_tensor(args[0]) else found
