"""The operators of a forward, in order: do two forwards compute the same, and what do they keep?"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hap.capture import torch_private
from hap.capture.source_lines import raised_at
from hap.errors import ModelError


class OperatorLog(torch_private.TorchDispatchMode):
    """The operators that run on fake tensors meanwhile, without those that make constants.

    A constant is made of Python's numbers alone: of no parameter, buffer, batch or random number.
    ``seen`` names the other operators and their arguments; a constant by how it was made.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []
        self._stop: int | None = None
        # Number of a storage -> how its constants were made, and the storage, so that it stays.
        self._made: dict[int, tuple[str, Any]] = {}
        self._results: list[weakref.ref[Tensor]] = []

    def results_live(self) -> bool:
        """Return whether something holds a tensor that one of the operators made."""
        self._results = [result for result in self._results if result() is not None]
        return bool(self._results)

    def constants_live(self) -> list[Tensor]:
        """Return the constants that one of the operators made and that something holds."""
        found = (result() for result in self._results) if self.results_live() else ()
        return [tensor for tensor in found if tensor is not None and self.is_constant(tensor)]

    def is_constant(self, tensor: Tensor) -> bool:
        known = torch_private.storage_number(tensor) in self._made
        return known or not torch_private.is_fake(tensor)

    def take(self) -> list[str]:
        """Return the operators seen since the last call."""
        seen, self.seen = self.seen, []
        return seen

    def line_of(self, place: int, run: Callable[[], object]) -> str:
        """Return the user's line that computes the operator at a place of another forward, if it gets there."""
        self._stop = place
        try:
            run()
        except _StoppedError as stopped:
            return raised_at(stopped)
        except Exception:  # the caller reports the difference between the forwards before it
            return ""
        finally:
            self._stop = None
            self.take()
        return ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore
        named = kwargs or {}
        given = [*_tensors([args, *named.values()])]
        what = f"{func} {self._told(args)} {[(k, self._told(v)) for k, v in sorted(named.items())]}"
        one = isinstance(func, torch_private.OpOverload)  # not several, such as those of torch.cond
        drawn = one and torch.Tag.nondeterministic_seeded in func.tags
        constant = one and not drawn and all(map(self.is_constant, given))
        result = func(*args, **named)
        if not (one and func._schema.is_mutable):
            self._results += map(weakref.ref, _tensors(result))
        if not constant:
            if func is not torch_private.DEVICE_OF:  # asked once for each tensor, no computation
                if len(self.seen) == self._stop:
                    raise _StoppedError
                self.seen.append(what)
            if one and func._schema.is_mutable:
                for tensor in given:
                    self._made.pop(torch_private.storage_number(tensor), None)
            return result
        for tensor in _tensors(result):
            number = torch_private.storage_number(tensor)
            if number not in self._made or func._schema.is_mutable:
                digest = hashlib.sha256(what.encode()).hexdigest()
                self._made[number] = digest, tensor.untyped_storage()
        return result

    def _told(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            data: Any = None
            if not torch_private.is_fake(value):
                data = torch_private.values(value)
            elif made := self._made.get(torch_private.storage_number(value)):
                data = made[0], value.stride(), value.storage_offset()
            return value.dtype, tuple(value.shape), data
        if isinstance(value, torch.Generator | nn.Module) or callable(value):
            return type(value).__name__  # they have no names of their own
        return [self._told(v) for v in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


class Attributes:
    """The attributes of a module's parts at one moment, with the entries of dicts and lists."""

    def __init__(self, module: nn.Module) -> None:
        self._then: list[tuple[str, Any, Any]] = []
        for path, sub in module.named_modules():
            prefix = path and f"{path}."
            self._then.append((prefix, vars(sub), dict(vars(sub))))
            for key, value in vars(sub).items():
                if isinstance(value, dict | list):
                    inside = prefix if key == "_buffers" else f"{prefix}{key}."
                    self._then.append((inside, value, value.copy()))

    def kept(self) -> list[tuple[str, Any, Any, list[Tensor]]]:
        """Return (name, holder, key, tensors) of all that forwards have kept since."""
        return [
            (f"{prefix}{key}", holder, key, tensors)
            for prefix, holder, then in self._then
            for key, value in _entries(holder)
            if _at(then, key) is not value and (tensors := [*_tensors(value)])
        ]

    def restore(self, log: OperatorLog, saved: Container[str]) -> bool:
        """Take back kept constants, which the next forward makes anew, and changed numbers beside them.

        Args:
            log: of those forwards.
            saved: names of a state dict, which stay.

        Returns:
            Whether there were any.
        """
        constants = [
            (holder, key)
            for name, holder, key, tensors in self.kept()
            if name not in saved and all(map(log.is_constant, tensors))
        ]
        numbers = [
            (holder, key)
            for _, holder, then in self._then
            for key, value in _entries(holder)
            if isinstance(value, bool | int | float | str) and _at(then, key) != value
        ]
        before = {id(holder): then for _, holder, then in self._then}
        for holder, key in reversed([*numbers, *constants] if constants else []):
            value = _at(before[id(holder)], key)
            if value is _MISSING:
                del holder[key]
            else:
                holder[key] = value
        return bool(constants)


_MISSING = object()


def _entries(holder: Any) -> list[tuple[Any, Any]]:
    return list(holder.items() if isinstance(holder, dict) else enumerate(holder))


def _at(then: Any, key: Any) -> Any:
    if isinstance(then, dict):
        return then.get(key, _MISSING)
    return then[key] if key < len(then) else _MISSING


class _StoppedError(Exception):
    """The forward has come to an operator whose line is asked for."""


def first_difference(seen: Sequence[str], again: Sequence[str]) -> int | None:
    """Return the place of the first operator in which two forwards differ."""
    pairs = itertools.zip_longest(seen, again)
    return next((k for k, (first, second) in enumerate(pairs) if first != second), None)


def check_same(
    run: Callable[[], object], log: OperatorLog, seen: Sequence[str], changed: str
) -> None:
    """Raise ``ModelError`` if later forwards differ, since the forward changes a plain attribute.

    Args:
        seen: the operators of the first forward.
    """
    log.take()
    for _ in range(2):
        run()
        if log.take() != seen:
            raise computes_something_else(changed)


def computes_something_else(changed: str, line: str = "") -> ModelError:
    """Return the error for a forward that differs from the one before.

    Args:
        changed: the name of an attribute that it changes, if there is one.
        line: the user's line of the first operator that differs, if it is known.
    """
    if changed:
        name = changed.rpartition(".")[2]
        return ModelError(
            f"the forward changes the attribute {changed!r}, and then computes something else",
            where=line,
            hint=f"keep it as a tensor in a buffer, and write into it: self.{name} += 1",
        )
    return ModelError(
        "the forward computes something else when it is called a second time",
        where=line,
        hint="keep counts, and tensors that the forward writes into, in buffers; draw random numbers by "
        "torch.rand; if the first call initializes the module, call it once on a batch in model()",
    )
