"""Check which rows of an operator hold by running them on split inputs. (torch)

A row runs as in training: one instruction, emitted per rank, on shards that are narrowed views and
on random terms that sum to the whole, with a rank that has no share. The ranks' values must
add up to the result of one device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from hap.ir import graph
from hap.ir.graph import Dtype, Graph, Input, Node, Output, Ref
from hap.ir.graph_builder import UNDEFINED
from hap.ir.image_operators import ADAPTIVE_MAX_POOLS, MAX_POOLS, POOLS, image_dims
from hap.ir.placement import L, P, Placement, R, S
from hap.ir.program import Compute, Program, Value
from hap.runtime.context import Context
from hap.runtime.emit import Emitter
from hap.runtime.emulate import EmulatedComm, EmulatedWorld
from hap.runtime.localize import FACTORIES, LOOKUPS, RESULT_SHAPE
from hap.synthesizer.rules import Row, rows_of

PLANES = {f"aten.{op}_backward.default" for op in (*POOLS, *MAX_POOLS, *ADAPTIVE_MAX_POOLS)}
"""Operators that may write out of bounds where an image's dims are cut: such cuts are not tried."""

COUNTING = "aten.embedding_dense_backward.default"
"""With division by the number of uses, this operator counts out of bounds: not cut."""

SMALL = 10_000
"""Number of elements below which the time of a run is nearly constant."""

Shares = tuple[int, ...]
Local = list[dict[str, Tensor]]
"""Per rank, its part of every output."""


def cuts(units: int) -> list[Shares]:
    """Return uneven shares of 2 and 3 ranks, some of them zero; no shares for 0 units."""
    if not units:
        return [(1, 1, 1)]
    half = units // 2
    return [(half, units - half), (units, 0), (1, 0, units - 1), (units - 1, 1, 0)]


class Sample(NamedTuple):
    """``op(*args, **kwargs)`` with real tensors, whose floating-point values are about ``scale``."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    scale: float = 1.0

    def __str__(self) -> str:
        def show(arg: Any) -> str:
            if isinstance(arg, Tensor):
                return "x".join(map(str, arg.shape)) or "scalar"
            inner = arg if isinstance(arg, list | tuple) else []
            return "[" + ",".join(map(show, inner)) + "]" if inner else str(arg)

        name = self.op.removeprefix("aten.")
        return f"{name}({', '.join(map(show, (*self.args, *self.kwargs.values())))})"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensor arguments by name; an argument that is given twice has one name."""
        found: dict[int, Tensor] = {}

        def visit(arg: Any) -> None:
            if isinstance(arg, Tensor):
                found.setdefault(id(arg), arg)
            for inner in arg if isinstance(arg, list | tuple) else ():
                visit(inner)

        visit([*self.args, *self.kwargs.values()])
        return {f"t{k}": tensor for k, tensor in enumerate(found.values())}

    def run(self) -> list[Tensor | None]:
        """Return the results of the captured operator on one device."""
        namespace, name, overload = self.op.split(".")
        call = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        results = call(*self.args, **self.kwargs)
        return list(results) if isinstance(results, list | tuple) else [results]

    def graph(self, source: str = "") -> Graph:
        """Return a program with this call alone: ``t0, t1, ...`` in, ``o0, o1, ...`` out."""
        given = self.tensors
        names = {id(tensor): name for name, tensor in given.items()}

        def arg(value: Any) -> Any:
            match value:
                case Tensor():
                    return Ref(names[id(value)])
                case torch.dtype():
                    return Dtype(str(value).removeprefix("torch."))
                case list() | tuple():
                    return tuple(arg(v) for v in value)
            return value

        results = {f"o{k}": t for k, t in enumerate(self.run())}
        made = {name: t for name, t in results.items() if t is not None}
        return Graph(
            inputs=tuple(Input(tensor=name, role="input", target=name) for name in given),
            nodes=(
                Node(
                    name="call", op=self.op, args=arg(self.args), source=source,
                    kwargs=tuple((k, arg(v)) for k, v in self.kwargs.items()),
                    outputs=tuple(name if name in made else None for name in results),
                ),
            ),
            outputs=tuple(Output(tensor=name, role="buffer", target=name) for name in made),
            tensors={
                name: graph.Tensor(
                    name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")
                )
                for name, t in (given | made).items()
            },
        )  # fmt: skip


class WorkSpentError(Exception):
    """The runs of a case have used up their work."""


class Case:
    """A sample that runs without errors, with its graph and its true values by tensor name.

    ``tolerance``: tolerance of the comparison, relative to each element and to the largest one.
    ``work_left``: remaining work of :meth:`attempt`, in runs of small tensors.
    """

    work_left = math.inf

    def __init__(self, sample: Sample, tolerance: float = 1e-10) -> None:
        self.sample, self.tolerance = sample, tolerance
        self.graph: Graph = sample.graph()
        (self.node,) = self.graph.nodes
        self.given = sample.tensors
        self.whole = {f"o{k}": t for k, t in enumerate(sample.run()) if t is not None}
        floor = min(sample.scale, 1.0)
        self._sizes = {name: max(_largest(t), floor) for name, t in self.whole.items()}

    def rows(self) -> list[Row]:
        return rows_of(self.node, self.graph)

    def run(self, row: Row, shares: Shares) -> Local:
        """Emit the row as one instruction for every rank, and run the emitted code."""
        ins = dict(zip(self.node.inputs, row.ins, strict=True))
        outs = {o: p for o, p in zip(self.node.outputs, row.outs, strict=True) if o and p}
        step = Compute(node=self.node.name, ins=row.ins, outs=row.outs, backward=False)
        placed = [Value(name, p) for name, p in (ins | outs).items()]
        program = Program(
            inputs=ins, instructions=(step,), outputs=tuple(outs.values()),
            axes={f"{v.tensor}:{v.placement.dim}": ("axis", row.units) for v in placed},
        )  # fmt: skip
        parts = {name: self._split(name, p, row.units, shares) for name, p in ins.items()}
        world = EmulatedWorld(len(shares))
        results: Local = []
        for rank in range(world.size):
            emitter = Emitter(
                graph=self.graph, program=program, shares={"axis": shares}, rank=rank,
                device=torch.device("cpu"),
            )  # fmt: skip
            # Run the emitter's step without the modules around it, which take most of the time.
            given = [Context(EmulatedComm(world, rank)), *(parts[name][rank] for name in ins)]
            results.append(dict(zip(outs, evaluate(emitter.single(step), given), strict=True)))
        return results

    def _split(self, name: str, p: Placement, units: int, shares: Shares) -> list[Tensor]:
        """Return an input's values on every rank: views of the whole, not made contiguous."""
        x = self.given[name]
        if p == P:
            return terms(x, len(shares), self.sample.scale)
        if p == R:
            return [x] * len(shares)
        sizes = [s * (x.shape[p.dim] // units) for s in shares]
        starts = itertools.accumulate(sizes, initial=0)
        if len(shares) > 2:
            x = turned(x, x.dim())
        return [x.narrow(p.dim, at, n) for at, n in zip(starts, sizes, strict=False)]

    def holds(self, out: str, p: Placement, local: Local, units: int, shares: Shares) -> bool:
        """Return whether the ranks' parts of ``out`` form the true result in placement ``p``."""
        whole = self.whole[out]
        parts = [result[out] for result in local]
        if p.sharded:
            granule = whole.shape[p.dim] // units
            if any(
                t.dim() != whole.dim() or t.shape[p.dim] != s * granule
                for t, s in zip(parts, shares, strict=True)
            ):
                return False
            shapes = {(*t.shape[: p.dim], *t.shape[p.dim + 1 :]) for t in parts}
            return len(shapes) == 1 and self._same(out, torch.cat(parts, p.dim))
        if p == P:
            same = {t.shape for t in parts} == {whole.shape}
            return same and whole.dtype != torch.bool and self._same(out, sum(parts[1:], parts[0]))
        if p == L:
            same = {t.shape for t in parts} == {whole.shape}
            floats = whole.is_floating_point() and same
            return floats and self._same(out, torch.stack(parts).logsumexp(0))
        return all(self._same(out, part) for part in parts)

    def _same(self, out: str, made: Tensor) -> bool:
        whole = self.whole[out]
        if made.shape != whole.shape or made.dtype != whole.dtype:
            return False
        if self.sample.op in UNDEFINED:
            return True
        atol = self.tolerance * self._sizes[out]
        return torch.allclose(made, whole, rtol=self.tolerance, atol=atol, equal_nan=True)

    def attempt(self, row: Row, shares: Shares) -> Local | None:
        """Return :meth:`run`, or ``None`` if the operator refuses the shapes.

        Raises:
            WorkSpentError: no work is left.
        """
        elements = sum(t.numel() for t in (*self.given.values(), *self.whole.values()))
        self.work_left -= 1 + elements / SMALL
        if self.work_left < 0:
            raise WorkSpentError
        try:
            return self.run(row, shares)
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError):
            return None

    def wrong(self, row: Row) -> str:
        """Return the place where ``row`` fails, or an empty text."""
        for shares in cuts(row.units):
            local = self.attempt(row, shares)
            if local is None:
                return f"{row} with shares {shares} of {row.units}: the operator refuses"
            for out, p in zip(self.node.outputs, row.outs, strict=True):
                if out and p and not self.holds(out, p, local, row.units, shares):
                    return f"{row} with shares {shares} of {row.units}: {out} is not {p}"
        return ""


def _largest(x: Tensor) -> float:
    """Return the magnitude of the largest finite element, 0 if there is none."""
    if not x.is_floating_point():
        return 0.0
    return float(x.abs().where(x.isfinite(), 0.0).max()) if x.numel() else 0.0


def terms(x: Tensor, count: int, scale: float = 1.0) -> list[Tensor]:
    """Return random tensors of the type of ``x`` that sum to it, with values about ``scale``."""
    random = torch.Generator().manual_seed(count)
    if x.is_floating_point():
        found = [
            scale * torch.randn(x.shape, dtype=x.dtype, generator=random) for _ in range(count - 1)
        ]
    else:
        found = [
            torch.randint(-9, 9, x.shape, generator=random).to(x.dtype) for _ in range(count - 1)
        ]
    return [*found, x - sum(found)]


def evaluate(code: fx.Graph, given: Sequence[Any]) -> tuple[Tensor, ...]:
    """Run emitted code without compiling it."""
    values = iter(given)
    env: dict[fx.Node, Any] = {}
    for node in code.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        match node.op:
            case "placeholder":
                env[node] = next(values)
            case "call_function":
                env[node] = node.target(*args, **kwargs)
            case "call_method":
                env[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            case "output":
                results: tuple[Tensor, ...] = args[0]
                return results
    raise AssertionError("emitted code has no output")


def turned(x: Tensor, dims: int) -> Tensor:
    """Return ``x`` with unusual strides: its first ``dims`` dims stored in reverse."""
    order = (*reversed(range(dims)), *range(dims, x.dim()))
    return x.permute(order).contiguous().permute(order)


def true_rows(case: Case, *, every: bool = False) -> Iterator[Row]:
    """Yield the rows that hold on one cut and that cut all input dims of one size, or none.

    Dims of different meaning have different sizes in a sample, so a row that cuts dims of several
    sizes is meaningful only for views, whose blocks divide both sizes. Where dims may be equal by
    chance, ``every`` also tries rows that cut only some of the inputs.
    """
    op = case.node.op
    whole = image_dims(op) if op in PLANES else 0
    shapes = [case.graph.tensors[name].shape for name in case.given]
    made = [o for o in case.node.outputs if o is not None]
    out_sizes = {s for o in made for s in case.graph.tensors[o].shape if s > 1}
    for size in (0, *sorted({s for shape in shapes for s in shape if s > 1} | out_sizes)):
        options = []
        for name, shape in zip(case.given, shapes, strict=True):
            cut = [S(d) for d, s in enumerate(shape[: len(shape) - whole]) if s == size > 0]
            options.append([*cut, *(_whole(case.given[name]) if every or not cut else ())])
        for chosen in itertools.product(*options):
            given = dict(zip(case.given, chosen, strict=True))
            ins = tuple(given[name] for name in case.node.inputs)
            for units in sorted({math.gcd(size, s) for s in out_sizes | {size}}) if size else [0]:
                if units != 1:
                    yield from _completed(case, ins, units, any(p.sharded for p in chosen))


def _whole(x: Tensor) -> list[Placement]:
    return [R, P] if x.is_floating_point() else [R]


def _completed(case: Case, ins: tuple[Placement, ...], units: int, cut: bool) -> Iterator[Row]:
    """Yield the rows with these inputs whose outputs hold on one cut."""
    places: list[list[Placement | None]] = []
    shares = cuts(units)[0]
    results: dict[tuple[Placement | None, ...], Local | None] = {}
    for k, out in enumerate(case.node.outputs):
        if out is None:
            places.append([None])
            continue
        counted = case.node.op == COUNTING and case.node.args[4]
        shape = () if counted else case.graph.tensors[out].shape
        held: list[Placement | None] = []
        for p in (
            R,
            P,
            L,
            *(S(d) for d, s in enumerate(shape) if units and s > 1 and s % units == 0),
        ):
            # Only with sizes as arguments does the placement of the result change the call.
            free = case.node.op not in {*RESULT_SHAPE, *FACTORIES, *LOOKUPS}
            if _out_of_bounds(case, ins, out, p):
                continue
            others = [R if o else None for o in case.node.outputs]
            outs = tuple(others if free else [*others[:k], p, *others[k + 1 :]])
            if outs not in results:
                results[outs] = case.attempt(Row(outs, ins, units), shares)
            local = results[outs]
            if local is not None and case.holds(out, p, local, units, shares):
                held.append(p)
        places.append(held)
    for outs in itertools.product(*places):
        if units == 0 or cut or any(p and p.sharded for p in outs):
            yield Row(outs, ins, units)


def _out_of_bounds(case: Case, ins: tuple[Placement, ...], out: str, p: Placement) -> bool:
    """Return whether the operator may write at indices of a whole dim into a shard."""
    lookup = LOOKUPS.get(case.node.op)
    if lookup is None or lookup.table is not None:
        return False
    shapes = [case.graph.tensors[name].shape for name in case.node.inputs]
    like = [i for i, s in zip(ins, shapes, strict=True) if s == case.graph.tensors[out].shape]
    return any(i.sharded and i != p for i in like)


def gives(row: Row, wanted: Row) -> bool:
    """Return whether ``row``, with free slices and masks of replicas around it, equals ``wanted``."""

    def free(src: Placement | None, dst: Placement | None) -> bool:
        return src == dst or (src == R and dst is not None)

    return (
        (wanted.units == 0 or row.units % wanted.units == 0)
        and all(map(free, wanted.ins, row.ins))
        and all(map(free, row.outs, wanted.outs))
    )


def missing(case: Case) -> list[Row]:
    """Return rows that hold and that neither the table nor another such row gives."""
    known = case.rows()
    found = [row for row in true_rows(case) if not any(gives(r, row) for r in known)]
    found = [row for row in found if not case.wrong(row)]
    return [row for row in found if not any(gives(r, row) for r in found if r != row)]
