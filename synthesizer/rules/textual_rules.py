"""Rules as text: a user's own, and derived or discovered ones.

Every line of a rule that fits a call adds rows to it:

* ``bmk, kn -> bmn``: an equation, with a letter per dim. A dropped letter is summed over,
  ``_`` is a dim that can't be split, and an empty side a scalar;
* ``P, R -> P``: one row, with a placement per tensor. Its dims are cut alike;
* ``pointwise``: elementwise, with broadcasting; ``pointwise linear 0``: also linear in input 0;
* ``reduces 1 2``: reduces the dims that argument 1 lists (all without it) and keeps them with size
  1 if argument 2 is true; ``-`` replaces an argument that the operator lacks;
* ``flops 2 b m k n``: a product of numbers and of the first fitting equation's sizes;
* ``origin derived``: the origin of the rule, one of :data:`ORIGINS`;
* ``# ...``: a remark.

:attr:`hap.ir.graph.Graph.rules` keeps them, by operator or by :func:`kind` of call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hap.ir.graph import Arg, Dtype, Graph, Node, Ref
from hap.ir.placement import Placement
from hap.synthesizer.rules.pointwise import pointwise
from hap.synthesizer.rules.reductions import reduced_rows
from hap.synthesizer.rules.rule_table import RULES, Call, Letters, Row, equation, possible

ORIGINS = ("derived", "discovered", "replicated")
"""Origins of rules that neither the table nor the user gives: the operator's tags and schema, runs
of it, or neither: every rank runs the whole call."""

_PLACEMENT = re.compile(r"R|P|L|S\d+|-")
_LETTERS = re.compile(r"[a-z_]*")
_POINTWISE = re.compile(r"pointwise( linear \d+)?")
_REDUCES = re.compile(r"reduces (\d+|-) (\d+|-)")


class Line(NamedTuple):
    """One parsed line of a rule: the parts left and right of its arrow."""

    text: str
    ins: tuple[str, ...]
    outs: tuple[str, ...]

    @property
    def is_row(self) -> bool:
        words = (*self.ins, *self.outs)
        return bool(words) and all(_PLACEMENT.fullmatch(word) for word in words)


def read(lines: Sequence[str]) -> tuple[list[Line], list[str]]:
    """Return the rows and equations of a rule, and the factors of its ``flops``.

    Raises:
        ValueError: a line has none of the forms above.
    """
    found: list[Line] = []
    factors: list[str] = []
    for text in lines:
        said = text.partition("#")[0].strip()
        if said.startswith("flops "):
            factors = said.split()[1:]
            if not all(re.fullmatch(r"[a-z]|\d+(\.\d+)?", word) for word in factors):
                raise ValueError(f"{text!r}: flops are numbers and single letters, as in 2 m k n")
            continue
        if said.startswith("origin ") and rule_origin([said]) not in ORIGINS:
            raise ValueError(f"{text!r}: the origin is one of {', '.join(ORIGINS)}")
        if not said or said.startswith("origin "):
            continue
        if _POINTWISE.fullmatch(said) or _REDUCES.fullmatch(said):
            found.append(Line(said, (), ()))
            continue
        left, arrow, right = said.partition("->")
        ins, outs = (tuple(w.strip() for w in side.split(",")) for side in (left, right))
        line = Line(said, ins if left.strip() or len(ins) > 1 else (), outs)
        words = (*line.ins, *line.outs)
        if not arrow or not (line.is_row or all(_LETTERS.fullmatch(word) for word in words)):
            raise ValueError(f"{text!r} is neither an equation, mk, kn -> mn, nor a row, P, R -> P")
        found.append(line)
    return found, factors


def written_rows(call: Call, lines: Sequence[str]) -> list[Row]:
    """Return the rows of a call by the lines of a rule, and the replicated one."""
    read_lines, _ = read(lines)
    rows = equation(call, [[None] * len(t.shape) for t in call.ins], _whole(call))
    fits = 0
    for line in read_lines:
        if line.is_row:
            row = _row(call, line)
            made = possible(call, [row]) if row else []
            fits += _counts_fit(call, line)
        elif not line.outs:
            made = _named(call, line)
            fits += 1
        else:
            made = _equation(call, line)
            fits += bool(made)
        rows += [row for row in made if row not in rows]
    if read_lines and not fits:
        shapes = ", ".join(str(t.shape) for t in call.ins)
        raise ValueError(f"no line of its rule fits {call.node.op} of {shapes}")
    return rows


def written_flops(call: Call, lines: Sequence[str]) -> float | None:
    """Return a call's floating-point operations by its rule; None if it does not state them."""
    read_lines, factors = read(lines)
    for line in read_lines if factors else ():
        sizes = None if line.is_row else _sizes(call, line)
        if sizes is not None:
            known = [float(sizes[w][0]) if w in sizes else w for w in factors]
            return math.prod(map(float, known))
    return None


def _whole(call: Call) -> list[Letters]:
    return [[None] * len(t.shape) if t else [] for t in call.outs]


def rule_origin(lines: Sequence[str]) -> str:
    """Return one of :data:`ORIGINS`, or an empty text for a user's own rule."""
    said = next((line for line in lines if line.startswith("origin ")), "")
    return said.partition("#")[0].removeprefix("origin ").strip()


def _named(call: Call, line: Line) -> list[Row]:
    """Return the rows of a named class of operators."""
    word, *places = line.text.replace("linear", "").split()
    if word == "pointwise":
        return pointwise(call, [{int(place)} for place in places])
    dims, keepdim = (None if place == "-" else int(place) for place in places)
    return reduced_rows(call, dims, keepdim)


def _counts_fit(call: Call, line: Line) -> bool:
    return len(line.ins) == len(call.ins) and len(line.outs) == len(call.outs)


def _row(call: Call, line: Line) -> Row | None:
    """Return the row, if the dims that it cuts exist and have blocks in common."""
    if not _counts_fit(call, line):
        return None
    sizes = []
    for tensor, word in zip((*call.ins, *call.outs), (*line.ins, *line.outs), strict=True):
        if tensor is None or not word.startswith("S"):
            continue
        dim = int(word[1:])
        if dim >= len(tensor.shape) or tensor.shape[dim] < 2:
            return None
        sizes.append(tensor.shape[dim])
    units = math.gcd(*sizes)
    if sizes and units < 2:
        return None
    outs = tuple(
        None if t is None or word == "-" else Placement.parse(word)
        for t, word in zip(call.outs, line.outs, strict=True)
    )
    return Row(outs, tuple(map(Placement.parse, line.ins)), units if sizes else 0)


def _sizes(call: Call, line: Line) -> dict[str, list[int]] | None:
    """Return letter -> the sizes of its dims; None if the numbers of dims differ."""
    if not line.outs or not _counts_fit(call, line):
        return None
    found: dict[str, list[int]] = {}
    for tensor, word in zip((*call.ins, *call.outs), (*line.ins, *line.outs), strict=True):
        if tensor is None:
            continue
        if len(word) != len(tensor.shape):
            return None
        for letter, size in zip(word, tensor.shape, strict=True):
            found.setdefault(letter, []).append(size)
    return found


def _equation(call: Call, line: Line) -> list[Row]:
    sizes = _sizes(call, line)
    if sizes is None:
        return []
    units = {letter: math.gcd(*found) for letter, found in sizes.items()}
    ins, outs = (
        [
            [None if x == "_" or units[x] < 2 or s < 2 else x for x, s in zip(word, t.shape, strict=True)]
            if t else []
            for t, word in zip(tensors, words, strict=True)
        ]
        for tensors, words in ((call.ins, line.ins), (call.outs, line.outs))
    )  # fmt: skip
    return equation(call, ins, outs, units=units)


def kind(call: Call) -> str:
    """Return the call without its sizes: equal dims, dims of 1, and the plain arguments."""
    letters: dict[int, str] = {}
    repeated: dict[str, int] = {}

    def show(arg: Arg) -> str:
        match arg:
            case Ref():
                t = call.tensors[arg.name]
                dims = [
                    "1" if s == 1 else letters.setdefault(s, chr(97 + len(letters)))
                    for s in t.shape
                ]
                again = repeated.setdefault(arg.name, len(repeated))
                return f"{t.dtype}#{again}[{' '.join(dims)}]"
            case Dtype():
                return arg.name
            case tuple():
                return f"[{', '.join(map(show, arg))}]"
        return repr(arg)

    named = [f"{name}={show(arg)}" for name, arg in call.node.kwargs]
    return f"{call.node.op}({', '.join([*map(show, call.node.args), *named])})"


def lines_of(call: Call, rules: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
    """Return the lines for a call's kind, or for its operator; None without any.

    Discovered rows hold for one kind of call; other kinds of the operator are replicated.
    """
    if not rules:
        return None
    found = rules.get(kind(call), rules.get(call.node.op))
    if found is None and any(key.startswith(f"{call.node.op}(") for key in rules):
        return ()
    return found


def rows_of(node: Node, graph: Graph) -> list[Row]:
    """Return the rows of one node; raise ``KeyError`` if ``node.op`` has no rule."""
    call = Call(node=node, tensors=graph.tensors)
    lines = lines_of(call, graph.rules)
    return RULES[node.op](call) if lines is None else written_rows(call, lines)
