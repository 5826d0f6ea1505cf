"""Draws recipes: straight-line modules that run on one device, for Hypothesis to shrink.

Each drawn line runs on real values and is kept if PyTorch accepts it, so shapes need no
inference. Modules use sizes as real code does: broadcasting, views of views, slices, in-place
changes, tied parameters.
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
"""Sizes of dims: ones, primes, more and fewer than there are ranks."""

LARGEST = 4096
"""Largest number of elements of a tensor."""


class Scope:
    """The module so far: lines, parameters, inputs, and the values of its names."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.params: dict[str, Shape] = {}
        self.inputs: dict[str, tuple[Shape, Kind]] = {}
        self.lines: list[str] = []
        self.module = SimpleNamespace()
        self.env: dict[str, Any] = {"torch": torch, "F": F, "self": self.module}
        self.names: list[str] = []
        """Names of floating-point values, latest first."""
        self._random = torch.Generator().manual_seed(0)

    # --- choices ---

    def one(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def chance(self) -> bool:
        return bool(self.draw(st.booleans()))

    def size(self) -> int:
        return int(self.one(SIZES))

    def value(self, wanted: Callable[[Tensor], bool] = lambda t: True) -> str:
        """Return the name of a value that satisfies ``wanted``."""
        found = [name for name in self.names if wanted(self.env[name])]
        return str(self.one(found)) if found else self._none()

    def _none(self) -> str:
        raise NotApplicable

    def shape(self, name: str) -> Shape:
        return tuple(self.env[name].shape)

    def dim(self, name: str, wanted: Callable[[int], bool] = lambda size: True) -> int:
        """Return a dim of a value, sometimes counted from the end."""
        shape = self.shape(name)
        dims = [d for d in reversed(range(len(shape))) if wanted(shape[d])]
        d = int(self.one(dims)) if dims else len(self._none())
        return d - len(shape) if self.chance() else d

    def shape_like(self, shape: Shape) -> Shape:
        """Return a shape that broadcasts with ``shape``, with dims of 1 or without leading dims."""
        cut = self.draw(st.integers(0, len(shape)))
        return tuple(self.one((s, 1)) for s in shape[cut:])

    # --- parameters, inputs and lines ---

    def param(self, *shape: int) -> str:
        """Return a parameter of this shape, sometimes an earlier one."""
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
        """Return a value, a parameter or an input that broadcasts with ``shape``."""
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
        """Add the line ``v3 = expression``."""
        name = f"v{len(self.lines)}"
        self.run(f"{name} = {expression}", [name])

    def run(self, line: str, made: list[str]) -> None:
        """Add a line that defines the names ``made``.

        Raises:
            NotApplicable: PyTorch rejects the line, or a result is empty, too large or not finite.
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
    """The drawn operator has no suitable operand; its line is left out."""


def module_lines(
    scope: Scope, ops: dict[str, Callable[[Scope], None]], shortest: int, longest: int
) -> None:
    """Draw inputs and operators. Each operator comes at most twice, so that modules vary."""
    for _ in range(scope.draw(st.integers(1, 2))):
        rank = scope.draw(st.integers(1, 4))
        scope.input(tuple(scope.one(SIZES[:7] if rank == 4 else SIZES) for _ in range(rank)))
    twice = st.sampled_from([(name, k) for k in range(2) for name in ops])
    for name, _ in scope.draw(st.lists(twice, min_size=shortest, max_size=longest, unique=True)):
        with contextlib.suppress(NotApplicable):
            ops[name](scope)


@st.composite
def recipes(draw: Callable[[Any], Any], longest: int = 10) -> Recipe:
    """Draw modules of up to ``longest`` operators, for two to five devices."""
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
    """Return whether the loss depends on a parameter and has finite gradients."""
    value = scope.env["loss"]
    parameters = list(vars(scope.module).values())
    if not parameters or not value.requires_grad:
        return False
    try:
        value.backward()
    except RuntimeError:  # an in-place change of a value that the backward needs
        return False
    return all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in parameters)


@st.composite
def devices(draw: Callable[[Any], Any]) -> tuple[Machine, ...]:
    """Draw two to five unlike devices on one to three machines."""
    count = draw(st.integers(2, 5))
    nodes = draw(st.sampled_from(["aaaaa", "aabbb", "abcab", "aaabb", "ababa"]))[:count]
    rates = [draw(st.sampled_from([1e9, 1e10, 3e9, 1e11])) for _ in range(count)]
    small = draw(st.sampled_from([2**40, 2**40, 2**12, 2**14, 2**16]))
    memory = [draw(st.sampled_from([2**40, small])) for _ in range(count)]
    return tuple(
        Machine(node, rate, m)
        for node, rate, m in sorted(zip(nodes, rates, memory, strict=True), key=lambda d: d[0])
    )
