"""Placements that the user chooses: a search in which they are forced."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from hap.errors import InputError
from hap.ir.graph import Graph
from hap.ir.placement import Placement
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space


def tensor_named(graph: Graph, name: str) -> str:
    """The tensor of a parameter's or a buffer's name, of an operator, or of that name itself.

    Raises:
        InputError: there is none; the message has the names that are nearest.
    """
    by_target = {i.target: i.tensor for i in graph.inputs if i.role != "input"}
    of_node = {n.name: n.outputs[0] for n in graph.nodes if n.outputs and n.outputs[0]}
    known = {**of_node, **{t: t for t in graph.tensors}, **by_target}
    if name not in known or known[name] is None:
        near = difflib.get_close_matches(name, known, 3, cutoff=0.4)
        raise InputError(
            f"the model has no tensor or operator {name!r}",
            hint=f"nearest: {', '.join(near)}" if near else "hap show lists them",
        )
    return str(known[name])


def options_of(space: Space, tensor: str) -> tuple[Placement, ...]:
    """The placements in which a program may store an input, or hold another tensor."""
    if tensor in space.sources:
        return tuple(dict.fromkeys(space.sources[tensor]))
    return tuple(dict.fromkeys(p for holding in space.holdings[tensor] for p in holding))


def pinned(space: Space, pins: Mapping[str, Placement]) -> Allowed:
    """Restrict the search to programs with these placements.

    Args:
        pins: by tensor: of an input, the placement in which it is stored; else every placement in
            which it is held.

    Raises:
        InputError: a tensor cannot have its placement.
    """
    names = {i.tensor: i.target for i in space.graph.inputs}
    for tensor, placement in pins.items():
        options = options_of(space, tensor)
        if placement not in options:
            raise InputError(
                f"{names.get(tensor, tensor)} cannot be placed as {placement}",
                hint=f"it can be {', '.join(map(str, options))}",
            )

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        if tensor not in pins or (tensor in space.sources and not stored):
            return True
        return p == pins[tensor]

    return allowed


def no_program(pins: Sequence[str]) -> InputError:
    """Return the error of pins that exclude each other."""
    shown = " and ".join(f"--pin {pin}" for pin in pins)
    hint = "leave out one of them" if len(pins) > 1 else "leave it out"
    return InputError(f"no program has {shown}", hint=hint)


def read_pins(graph: Graph, pins: tuple[str, ...]) -> dict[str, Placement]:
    """Tensor -> placement, from texts such as ``layers.3.weight=S0``.

    Raises:
        InputError: a text is no pin, or names no tensor.
    """
    return {tensor_named(graph, name): placement for name, placement in map(read_pin, pins)}


def read_pin(text: str) -> tuple[str, Placement]:
    """Return a name and its placement, from a text such as ``layers.3.weight=S0``.

    Raises:
        InputError: the text is no pin.
    """
    name, equals, placement = text.rpartition("=")
    if not equals or not name:
        raise InputError(f"{text!r} is no pin", hint="write --pin layers.3.weight=S0")
    try:
        return name, Placement.parse(placement)
    except ValueError as error:
        raise InputError(f"--pin {text}: {error}", hint="write --pin NAME=S0") from None
