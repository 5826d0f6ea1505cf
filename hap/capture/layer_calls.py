"""The calls of a model's layers in one forward: what each runs, and where its results come from.

The tracer keeps a layer that repeats as a region, a program that is called by name. Its results have to be new
tensors. Layers return other things, too: ``None`` in place of attention weights, or a mask that all of them read.
These are put beside the region's results.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hap.capture.operator_log import OperatorLog

Forward = Callable[..., Any]
"""The forward of a class of layers."""

Origins = tuple[str, ...]
"""For each result: the name of the argument that it is, ``"None"``, or ``""`` for a new tensor."""

_NOTHING = "None"  # no argument has a keyword's name
_ATTRIBUTE = "_origins_of_results"


@dataclass(frozen=True, slots=True, eq=False)
class LayerCall:
    """A call of a layer's forward.

    Attributes:
        ran: its operators, and the modes in which they ran; equal for calls that compute the same.
        origins: those of its results; ``None`` unless these are a tuple of tensors and ``None``.
    """

    layer: nn.Module
    ran: object = None
    origins: Origins | None = None

    def alike(self) -> object:
        """Return what calls of one region have in common."""
        return self.ran, self.origins


@contextlib.contextmanager
def watched(kinds: Iterable[type[nn.Module]], log: OperatorLog) -> Iterator[list[LayerCall]]:
    """Yield a list that gets the calls of the forwards of these classes, in order."""
    calls: list[LayerCall] = []

    def watch(forward: Forward) -> Forward:
        names = _positional(forward)

        @functools.wraps(forward)
        def run(layer: nn.Module, *args: Any, **named: Any) -> Any:
            number, begun = len(calls), len(log.seen)
            modes = (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
            )
            calls.append(LayerCall(layer))
            results = forward(layer, *args, **named)
            given = dict(zip(names, args, strict=False)) | named
            calls[number] = LayerCall(layer, (modes, log.seen[begun:]), _origins(results, given))
            return results

        return run

    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(_replaced(kind, watch))
        yield calls


@contextlib.contextmanager
def _replaced(kind: type[nn.Module], by: Callable[[Forward], Forward]) -> Iterator[None]:
    """Replace the forward of a class by a function of it.

    The layers of transformers 5.23 have a forward that checkpoints the one which it wraps, only if the class still
    has it. There the wrapped one is replaced.
    """
    forward = kind.forward
    wrapped = getattr(forward, "__wrapped__", None)
    cells = getattr(forward, "__closure__", None) or ()
    inner = next((cell for cell in cells if _content(cell) is wrapped), None)
    if wrapped is None or inner is None or all(_content(cell) is not forward for cell in cells):
        with mock.patch.object(kind, "forward", by(forward)):
            yield
        return
    inner.cell_contents = by(wrapped)
    try:
        yield
    finally:
        inner.cell_contents = wrapped


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that was never set
        return None


def _positional(forward: Forward) -> list[str]:
    """Return the names of the arguments that may be given by position, without ``self``."""
    parameters = inspect.signature(forward).parameters.values()
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in parameters if p.kind in kinds][1:]


def _origins(results: Any, given: Mapping[str, Any]) -> Origins | None:
    if type(results) is not tuple or not all(r is None or isinstance(r, Tensor) for r in results):
        return None
    names = {id(value): name for name, value in given.items()} | {id(None): _NOTHING}
    return tuple([names.get(id(result), "") for result in results])


@contextlib.contextmanager
def as_regions(
    kinds: Iterable[type[nn.Module]], calls: Sequence[LayerCall], mark: Callable[[Forward], Forward]
) -> Iterator[None]:
    """Let the forwards of these classes be regions, which ``mark`` makes of functions."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            mine = {(c.layer, c.origins) for c in calls if isinstance(c.layer, kind)}
            known = len(dict(mine)) == len(mine) and None not in dict(mine).values()
            by = mark
            if known and any(origin for _, origins in mine for origin in origins or ()):
                for layer, origins in mine:
                    stack.enter_context(mock.patch.dict(layer.__dict__, {_ATTRIBUTE: origins}))
                by = functools.partial(_with_other_results, kind, mark)
            stack.enter_context(_replaced(kind, by))
        yield


def _with_other_results(
    kind: type[nn.Module], mark: Callable[[Forward], Forward], forward: Forward
) -> Forward:
    """Return a forward of which the part that makes new tensors is a region."""
    names = _positional(forward)

    def new(layer: nn.Module, *args: Any, **named: Any) -> Any:
        results = forward(layer, *args, **named)
        origins = getattr(layer, _ATTRIBUTE)
        return tuple([results[k] for k in range(len(results)) if not origins[k]])

    # The tracer tells functions by their code.
    new.__code__ = new.__code__.replace(co_name=f"{kind.__module__}.{kind.__qualname__}")
    region = mark(new)

    def run(layer: nn.Module, *args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        made = iter(region(layer, *args, **named))
        origins = getattr(layer, _ATTRIBUTE)
        return tuple([given.get(origin) if origin else next(made) for origin in origins])

    return run
