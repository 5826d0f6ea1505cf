"""Rules: rows of placements under which the ranks' local results form the whole result.

A row is a Hoare triple ``{placements of the inputs} op {placements of the outputs}``. Most rows
follow from one *equation* per operator, which gives each dim of each tensor a letter, as einsum does:

* ranks may split a letter's range: tensors with the letter are sharded on that dim, others replicated;
* an output that depends on the letter but lacks it has been summed over it: partial;
* an output that does not depend on the letter is computed whole on every rank: replicated;
* an operator that is linear in an argument (or jointly in several) lets partial through.

A dim of size 1 has no letter: it never counts as sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from hap.ir.graph import Arg, Node, Tensor
from hap.ir.placement import P, Placement, R, S

Letters = Sequence[str | None]
"""One letter per dim of a tensor; ``None`` if the dim can't be split."""


class Row(NamedTuple):
    """Placements of ``node.outputs`` and ``node.inputs``, in their order.

    ``units``: number of equal blocks into which the sharded dims may be cut; 0 if it shards nothing.
    """

    outs: tuple[Placement | None, ...]
    ins: tuple[Placement, ...]
    units: int = 0

    def __str__(self) -> str:
        outs, ins = (", ".join(str(p) for p in side if p) for side in (self.outs, self.ins))
        return f"{{{ins}}} -> {{{outs}}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node with the shapes that its rule reads."""

    node: Node
    tensors: Mapping[str, Tensor]

    @property
    def ins(self) -> tuple[Tensor, ...]:
        return tuple(self.tensors[name] for name in self.node.inputs)

    @property
    def outs(self) -> tuple[Tensor | None, ...]:
        return tuple(None if o is None else self.tensors[o] for o in self.node.outputs)

    @property
    def out(self) -> Tensor:
        """The first used result."""
        return next(o for o in self.outs if o is not None)

    def arg(self, position: int, name: str = "", default: Arg = None) -> Arg:
        """Return a plain argument, given by position or by name."""
        if position < len(self.node.args):
            return self.node.args[position]
        return dict(self.node.kwargs).get(name, default)

    def dim(self, position: int, tensor: Tensor, name: str = "dim", default: int = 0) -> int:
        """Return a dim argument, counted from the front."""
        value = self.arg(position, name, default)
        return int(value) % max(len(tensor.shape), 1)


Rule = Callable[[Call], list[Row]]

RULES: dict[str, Rule] = {}
"""Operator name -> rule. Filled by the modules of this package, one per mathematical reason."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register a rule under the names of its operators."""

    def register(function: Rule) -> Rule:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = function
        return function

    return register


def equation(
    call: Call, ins: Sequence[Letters], outs: Sequence[Letters], *, linear: Iterable[set[int]] = (),
    additive: Set[int] = frozenset(), depends: Sequence[Set[int]] | None = None,
    terms: Mapping[int, Placement] | None = None, units: Mapping[str, int] | None = None,
) -> list[Row]:  # fmt: skip
    """Return the rows of an operator by the letters of its dims; see the module's docstring.

    Args:
        ins, outs: letters of every tensor input and every output (also of unused ones).
        linear: sets of inputs in which the operator is jointly linear.
        additive: inputs that are added to the output, such as a bias: they must be partial where
            the output is, or they would be added once per rank.
        depends: per output, the inputs that it depends on; default: all.
        terms: kind of the outputs' terms if these are no sums: see :data:`hap.ir.placement.L`.
        units: per letter with dims of different sizes, its number of blocks; default: the size.
    """
    term = [(terms or {}).get(k, P) for k in range(len(outs))]
    depends = depends or [set(range(len(ins)))] * len(outs)
    rows = [Row(tuple(R for _ in outs), tuple(R for _ in ins))]
    sizes = _sizes(call, ins, outs, dict(units or {}))
    for letter, size in sizes.items():
        if size < 2:
            continue
        out_p = [
            _on(letter, letters)
            or (term[k] if any(letter in ins[i] for i in depends[k] - additive) else R)
            for k, letters in enumerate(outs)
        ]
        partial = P in out_p
        in_p = [
            _on(letter, letters) or (P if partial and i in additive else R)
            for i, letters in enumerate(ins)
        ]
        rows.append(Row(tuple(out_p), tuple(in_p), size))
    for group in linear:
        rows.append(
            Row(
                tuple(P if group & depends[k] else R for k in range(len(outs))),
                tuple(P if i in group else R for i in range(len(ins))),
            )
        )
    return possible(call, rows)


def _on(letter: str, letters: Letters) -> Placement | None:
    return S(list(letters).index(letter)) if letter in letters else None


def _sizes(
    call: Call, ins: Sequence[Letters], outs: Sequence[Letters], units: dict[str, int]
) -> dict[str, int]:
    """Return letter -> number of blocks that it may be cut into, by first appearance."""
    sizes: dict[str, int] = {}
    for tensor, letters in zip([*call.ins, *call.outs], [*ins, *outs], strict=True):
        if tensor is None:
            continue
        if len(letters) != len(tensor.shape):
            raise AssertionError(f"{call.node}: {tensor} has letters {list(letters)}")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if letter is None:
                continue
            blocks = units.get(letter, size)
            if sizes.setdefault(letter, blocks) != blocks:
                raise AssertionError(f"{call.node}: {letter} is {sizes[letter]} and {blocks}")
    return sizes


def possible(call: Call, rows: list[Row]) -> list[Row]:
    """Drop rows that the operator's types or a repeated argument make impossible."""
    whole = {name for name in call.node.inputs if call.tensors[name].dtype == "bool"}
    kept = []
    for row in rows:
        outs = tuple(
            p if name is not None else None
            for p, name in zip(row.outs, call.node.outputs, strict=True)
        )
        given: dict[str, Placement] = {}
        fits = all(
            given.setdefault(name, p) == p and not (p == P and name in whole)
            for name, p in zip(call.node.inputs, row.ins, strict=True)
        )
        partial_bool = any(
            p == P and o is not None and o.dtype == "bool"
            for p, o in zip(outs, call.outs, strict=True)
        )
        if fits and not partial_bool and Row(outs, row.ins, row.units) not in kept:
            kept.append(Row(outs, row.ins, row.units))
    return kept


def letters(tensor: Tensor, prefix: str = "d", *, fixed: Iterable[int] = ()) -> list[str | None]:
    """Return ``d0 d1 ...`` for the dims of a tensor; ``None`` for size 1 or a fixed dim."""
    return [
        None if size == 1 or d in set(fixed) else f"{prefix}{d}"
        for d, size in enumerate(tensor.shape)
    ]


def broadcast(tensor: Tensor, out: Tensor, prefix: str = "d") -> list[str | None]:
    """Return letters of an input that is broadcast to ``out``, aligned at the last dim."""
    shift = len(out.shape) - len(tensor.shape)
    return [None if size == 1 else f"{prefix}{d + shift}" for d, size in enumerate(tensor.shape)]


def numel(shape: Iterable[int]) -> int:
    return math.prod(shape)
