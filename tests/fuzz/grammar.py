"""Draws recipes: straight-line modules that run on one device, for Hypothesis to shrink.

A line is drawn, run on real values, and kept if PyTorch accepts it; so shapes need no
inference of their own. A module does with its sizes what people do: broadcasting, views
of views, slices, in-place changes, tied parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.fuzz.recipe import Kind, Machine, Recipe, Shape, values

SIZES = (2, 1, 3, 4, 5, 6, 7, 8, 11, 12, 13)
"""Of dims: ones, primes, more and less than ranks."""

LARGEST = 4096
"""Elements of a tensor."""


class Scope:
    """The module so far: lines, parameters, inputs, and the values that the names stand for."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.params: dict[str, Shape] = {}
        self.inputs: dict[str, tuple[Shape, Kind]] = {}
        self.lines: list[str] = []
        self.module = SimpleNamespace()
        self.env: dict[str, Any] = {"torch": torch, "F": F, "self": self.module}
        self.names: list[str] = []
        """Of floating-point values, those made last first."""
        self._random = torch.Generator().manual_seed(0)

    # --- choices ---

    def one(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def chance(self) -> bool:
        return bool(self.draw(st.booleans()))

    def size(self) -> int:
        return int(self.one(SIZES))

    def value(self, wanted: Callable[[Tensor], bool] = lambda t: True) -> str:
        """The name of a value that satisfies ``wanted``."""
        found = [name for name in self.names if wanted(self.env[name])]
        return str(self.one(found)) if found else self._none()

    def _none(self) -> str:
        raise NotApplicable

    def shape(self, name: str) -> Shape:
        return tuple(self.env[name].shape)

    def dim(self, name: str, wanted: Callable[[int], bool] = lambda size: True) -> int:
        """A dim of a value, perhaps counted from the end."""
        shape = self.shape(name)
        dims = [d for d in reversed(range(len(shape))) if wanted(shape[d])]
        d = int(self.one(dims)) if dims else len(self._none())
        return d - len(shape) if self.chance() else d

    def shape_like(self, shape: Shape) -> Shape:
        """A shape that broadcasts with ``shape``: dims of one, leading dims left out."""
        cut = self.draw(st.integers(0, len(shape)))
        return tuple(self.one((s, 1)) for s in shape[cut:])

    # --- what is made ---

    def param(self, *shape: int) -> str:
        """A parameter: an earlier one of this shape now and then."""
        if math.prod(shape) > LARGEST:
            raise NotApplicable
        tied = [name for name, other in self.params.items() if other == shape]
        if tied and self.chance():
            return f"self.{self.one(tied)}"
        name = f"p{len(self.params)}"
        self.params[name] = shape
        value = torch.randn(shape, generator=self._random, dtype=torch.float64) * 0.5
        setattr(self.module, name, nn.Parameter(value))
        return f"self.{name}"

    def input(self, shape: Shape, kind: Kind = "float") -> str:
        if math.prod(shape) > LARGEST:
            raise NotApplicable
        name = f"x{len(self.inputs)}"
        self.inputs[name] = shape, kind
        value = values(shape, kind, self._random)
        self.env[name] = value.double() if kind == "float" else value
        if kind == "float":
            self.names.insert(0, name)
        return name

    def other(self, shape: Shape) -> str:
        """Something that broadcasts with ``shape``: a value, a parameter, an input."""
        same = [
            n for n in self.names
            if len(self.shape(n)) <= len(shape) and _broadcasts(self.shape(n), shape)
        ]  # fmt: skip
        match self.one(("value", "param", "input")):
            case "value" if same:
                return str(self.one(same))
            case "input":
                return self.input(self.shape_like(shape))
        return self.param(*self.shape_like(shape))

    def add(self, expression: str) -> None:
        """``v3 = expression``."""
        name = f"v{len(self.lines)}"
        self.run(f"{name} = {expression}", [name])

    def run(self, line: str, made: list[str]) -> None:
        """Add a line that makes these names, if PyTorch takes it.

        Raises:
            NotApplicable: it does not, or what it makes is empty, too large or not finite.
        """
        before = dict(self.env)
        try:
            exec(line, self.env)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            self.env.clear()
            self.env.update(before)
            raise NotApplicable from error
        fine = all(_fine(self.env[name]) for name in [*made, *self.names])
        if not fine:
            raise reject() if not made else NotApplicable
        self.lines.append(line)
        for name in made:
            if self.env[name].is_floating_point():
                self.names.insert(0, name)


def _fine(t: Tensor) -> bool:
    with torch.no_grad():
        small = 0 < t.numel() <= LARGEST and t.dim() <= 5
        return small and bool(torch.isfinite(t).all()) and float(t.abs().max()) < 1e3


def _broadcasts(a: Shape, b: Shape) -> bool:
    return all(x in (1, y) for x, y in zip(reversed(a), reversed(b), strict=False))


class NotApplicable(Exception):
    """The drawn operator has nothing to work on; the line is left out."""


def module_lines(
    scope: Scope, ops: dict[str, Callable[[Scope], None]], shortest: int, longest: int
) -> None:
    """Inputs, and operators: each comes at most twice, so that modules are not all alike."""
    for _ in range(scope.draw(st.integers(1, 2))):
        rank = scope.draw(st.integers(1, 4))
        scope.input(tuple(scope.one(SIZES[:7] if rank == 4 else SIZES) for _ in range(rank)))
    twice = st.sampled_from([(name, k) for k in range(2) for name in ops])
    for name, _ in scope.draw(st.lists(twice, min_size=shortest, max_size=longest, unique=True)):
        with contextlib.suppress(NotApplicable):
            ops[name](scope)


@st.composite
def recipes(draw: Callable[[Any], Any], longest: int = 10) -> Recipe:
    """Modules of up to ``longest`` operators, for two to five devices."""
    from tests.fuzz.losses import loss
    from tests.fuzz.operators import OPERATORS

    scope = Scope(draw)
    module_lines(scope, OPERATORS, draw(st.integers(1, longest // 2)), longest)
    try:
        loss(scope)
    except NotApplicable:
        reject()
    if not _trains(scope):
        reject()
    return Recipe(
        params=scope.params, inputs=scope.inputs, lines=tuple(scope.lines),
        devices=draw(devices()), links=draw(st.sampled_from([(1e10, 1e9), (1e9, 1e7), (1e12, 1e12)])),
        launch_s=draw(st.sampled_from([1e-6, 0.0, 1e-9, 1e-5])),
        latency_s=draw(st.sampled_from([1e-6, 0.0, 1e-9, 1e-4])),
        seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


def _trains(scope: Scope) -> bool:
    """Does the loss reach a parameter, and PyTorch differentiate it?"""
    value = scope.env["loss"]
    parameters = list(vars(scope.module).values())
    if not parameters or not value.requires_grad:
        return False
    try:
        value.backward()
    except RuntimeError:  # a value that the backward needs was changed in place
        return False
    return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters)


@st.composite
def devices(draw: Callable[[Any], Any]) -> tuple[Machine, ...]:
    """Two to five unlike devices on one to three machines."""
    count = draw(st.integers(2, 5))
    nodes = draw(st.sampled_from(["aaaaa", "aabbb", "abcab", "aaabb", "ababa"]))[:count]
    rates = [draw(st.sampled_from([1e9, 1e10, 3e9, 1e11])) for _ in range(count)]
    small = draw(st.sampled_from([2**40, 2**40, 2**12, 2**14, 2**16]))
    memory = [draw(st.sampled_from([2**40, small])) for _ in range(count)]
    return tuple(
        Machine(node, rate, m)
        for node, rate, m in sorted(zip(nodes, rates, memory, strict=True), key=lambda d: d[0])
    )
