"""The space of programs of a graph: rows of every node, axes, holdings of every tensor.

Three restrictions keep it small; programs are optimal within them:

* only axes on which some product (matmul, convolution, attention, look-up in a trained table) can be
  split are used;
* a tensor is *held* replicated, or partial, or in one sharded placement, or in two if a product and
  another operator read it; slices of a replica are free;
* every rank computes tensors of constants alone (position numbers, causal masks) whole.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hap.cluster.topology import Cluster
from hap.errors import UnsupportedOpError
from hap.ir.axes import Axes, Dim, Ties
from hap.ir.axis_names import axis_names
from hap.ir.graph import FREE, Graph, Node, Output
from hap.ir.placement import P, Placement, R, S
from hap.ir.program import Program
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.operator_work import FLOPS, product_operations
from hap.synthesizer.rules import RULES, Call, Row, rows_of
from hap.synthesizer.rules.textual_rules import lines_of, rule_origin

PRODUCTS = frozenset(FLOPS) | {"aten.embedding_dense_backward.default"}
"""Operators whose axes are used. A look-up is the product of a one-hot matrix and the table."""

Holding = tuple[Placement, ...]
"""The placements in which a tensor exists at once, besides free slices of a replica."""


Kind = tuple[int, tuple[str, ...]]
"""A number and axes. Items with equal numbers differ only in these axes: layers repeat."""


def _kind(kinds: dict[object, int], key: object, lie: list[str | None]) -> Kind:
    axes = tuple(dict.fromkeys(axis for axis in lie if axis is not None))
    pattern = tuple(-1 if axis is None else axes.index(axis) for axis in lie)
    return kinds.setdefault((key, pattern), len(kinds)), axes


@dataclass(frozen=True, kw_only=True)
class Space:
    """The rows, axes and holdings of which programs of ``graph`` are made.

    ``repeated``: how many times a step converts a tensor, where that is not once.
    ``at_once``: the part of a saved tensor that is in memory at once, where the batch comes in microbatches.
    ``summed``: sums over microbatches; their terms are in memory for the whole step.
    """

    graph: Graph
    axes: Axes
    rows: Mapping[str, tuple[Row, ...]]
    holdings: Mapping[str, tuple[Holding, ...]]
    sources: Mapping[str, tuple[Placement, ...]]
    repeated: Mapping[str, int] = field(default_factory=dict)
    at_once: Mapping[str, float] = field(default_factory=dict)
    summed: frozenset[str] = frozenset()

    @cached_property
    def terms(self) -> frozenset[str]:
        """The terms of a microbatch's gradients that nothing but the sums over microbatches reads."""
        graph = self.graph
        sums = [
            n for n in graph.nodes if n.name in graph.backward and self.summed.issuperset(n.outputs)
        ]
        leaving = {o.tensor for o in graph.outputs}
        return frozenset(
            n.inputs[0]
            for n in sums
            if len(graph.consumers[n.inputs[0]]) == 1 and n.inputs[0] not in leaving
        )

    @cached_property
    def _machines(self) -> dict[Cluster, HardwareModel]:
        return {}

    @cached_property
    def _products(self) -> Mapping[str, float]:
        return product_operations(self.graph)

    @cached_property
    def undivided(self) -> dict[bool, Program]:
        """Whether there is one device -> the program that splits nothing, once it is known."""
        return {}

    def hardware(self, cluster: Cluster) -> HardwareModel:
        """Return the model of a cluster: one for all searches, which share its prices."""
        if cluster not in self._machines:
            self._machines[cluster] = HardwareModel(cluster, self._products)
        return self._machines[cluster]

    @cached_property
    def node_kinds(self) -> Mapping[str, Kind]:
        """Node -> its kind: nodes of a kind have equal rows."""
        kinds: dict[object, int] = {}
        found = {}
        for node in self.graph.nodes:
            rows = self.rows[node.name]
            lie = [self.axes.of.get(d) for row in rows for d in _dims(node, row)]
            found[node.name] = _kind(kinds, (self.graph.alike[node.name], rows), lie)
        return found

    @cached_property
    def tensor_kinds(self) -> Mapping[str, Kind]:
        """Tensor -> its kind: tensors of a kind have equal shape and dtype."""
        kinds: dict[object, int] = {}
        found = {}
        for name, t in self.graph.tensors.items():
            lie = [self.axes.of.get((name, d)) for d in range(len(t.shape))]
            parts = self.repeated.get(name), self.at_once.get(name), name in self.summed
            found[name] = _kind(kinds, (t.shape, t.dtype, parts), lie)
        return found


def final_placements(space: Space, output: Output) -> tuple[Placement, ...]:
    """Return the placements in which an output other than a gradient may end.

    Tensors for another stage may end in shards by rows; all others end replicated.
    """
    rows = output.role in ("sent", "returned") and space.axes.axis(output.tensor, 0)
    return (S(0), R) if rows else (R,)


NARROW = (
    "everything free",
    "the weights that many layers share held whole",
    "no axes inside of layers either, such as the width of a head",
    "the axes of the batch alone",
)
"""Degrees of a narrower space in :func:`build_space`."""

SHARED = 4
"""Number of reading layers above which a weight counts as shared by many."""


def build_space(graph: Graph, *, narrow: int = 0) -> Space:
    """Return rows, axes and holdings of a graph.

    Args:
        narrow: a degree of :data:`NARROW`. At 1, a weight that more than :data:`SHARED` layers read
            ties none of them; at 2, an axis must also lie on a parameter or on the batch; at 3,
            on the first dim of the batch.

    Raises:
        UnsupportedOpError: an operator has no rule; the message names it, its line, and the
            nearest operators that have one.
    """
    ties = Ties(graph.tensors)
    constant = _constants(graph)
    rows: dict[str, tuple[Row, ...]] = {}
    for node in graph.nodes:
        known = _rows(node, graph)
        if constant.issuperset(o for o in node.outputs if o):
            known = known[:1]
        rows[node.name] = tuple(
            r for r in known if not r.units or ties.tie(_dims(node, r), r.units)
        )
    unstorable = _tie_gradients(graph, ties)
    axes = _working(graph, rows, ties.build(axis_names(graph)), narrow)
    rows = {
        n.name: tuple(r for r in rows[n.name] if all(d in axes.of for d in _dims(n, r)))
        for n in graph.nodes
    }
    stored: dict[str, tuple[Placement, ...]] = {i.tensor: (R,) for i in graph.inputs}
    for i in graph.role("parameter"):
        shards = _shards(i.tensor, graph, axes)
        if graph.whole_parameters and i.target in graph.gradients:
            shards = ()
        stored[i.tensor] = (R, *(p for p in shards if (i.tensor, p.dim) not in unstorable))
    for i in graph.role("received"):
        stored[i.tensor] = (S(0), R) if axes.axis(i.tensor, 0) else (R,)
    for i in graph.role("input"):  # a rank reads all of the batch, or its rows
        stored[i.tensor] = (R, S(0)) if axes.axis(i.tensor, 0) else (R,)
    holdings = _holdings(graph, axes, rows, constant)
    if narrow:
        whole, terms = _shared(graph)
        holdings |= dict.fromkeys(whole, ((R,),))
        holdings |= {name: ((P,),) for name in terms if (P,) in holdings[name]}
    return Space(graph=graph, axes=axes, rows=rows, holdings=holdings, sources=stored)


def _shared(graph: Graph) -> tuple[set[str], set[str]]:
    """Return weights that many layers share with their views, and their gradients' partial sums."""
    weights: set[str] = set()
    sums: set[str] = set()
    for i in graph.role("parameter"):
        own = _partial_sums(graph.gradients.get(i.target), graph)
        if len(own) + 2 > SHARED:  # one more term than partial sums, which exclude the total
            weights |= _views(i.tensor, graph)
            sums |= own
    return weights, sums


def _views(tensor: str, graph: Graph) -> set[str]:
    """Return a tensor and its views."""
    found, new = {tensor}, [tensor]
    while new:
        for node in graph.consumers[new.pop()]:
            made = {o for o in node.outputs if o} - found
            if node.op in FREE and found.issuperset(node.inputs):
                found |= made
                new += made
    return found


def _partial_sums(total: str | None, graph: Graph) -> set[str]:
    """Return the partial sums in the computation of a sum."""
    found: set[str] = set()
    new = [total] if total else []
    while new:
        node = graph.producer.get(new.pop())
        while node and node.op in FREE and len(node.inputs) == 1:
            node = graph.producer.get(node.inputs[0])
        if node and node.op == "aten.add.Tensor":
            new += node.inputs
            found.update(o for o in node.outputs if o and o != total)
    return found


def is_product(node: Node, graph: Graph) -> bool:
    """Return whether a node's axes deserve splitting; those of an operator without a rule may."""
    lines = lines_of(Call(node=node, tensors=graph.tensors), graph.rules)
    return node.op in PRODUCTS or (lines is not None and rule_origin(lines) != "derived")


def _rows(node: Node, graph: Graph) -> list[Row]:
    try:
        return rows_of(node, graph)
    except KeyError:
        if node.op in RULES:
            raise
        near = difflib.get_close_matches(node.op, RULES, n=3, cutoff=0.5)
        known = node.op.partition(".")[0] in {op.partition(".")[0] for op in RULES}
        nearest = f"; nearest known: {', '.join(near)}" if near and known else ""
        raise UnsupportedOpError(
            f"no rule says how operator {node.op} may be split",
            where=node.source or node.name,
            hint="hap plan without --strict-rules finds out by running it, and "
            f"hap rules discover {node.op} --model FILE shows what it finds{nearest}",
        ) from None


def _dims(node: Node, row: Row) -> list[Dim]:
    placed = zip((*node.inputs, *node.outputs), (*row.ins, *row.outs), strict=True)
    return [(name, p.dim) for name, p in placed if name and p and p.sharded]


def _shards(tensor: str, graph: Graph, axes: Axes) -> tuple[Placement, ...]:
    rank = len(graph.tensors[tensor].shape)
    return tuple(S(d) for d in range(rank) if axes.axis(tensor, d))


def _tie_gradients(graph: Graph, ties: Ties) -> set[Dim]:
    """Tie gradients to their parameters; return dims without a common cut, never stored in shards."""
    refused = set()
    for i in graph.role("parameter"):
        gradient = graph.gradients.get(i.target)
        for dim, size in enumerate(graph.tensors[i.tensor].shape if gradient else ()):
            pair = [(i.tensor, dim), (str(gradient), dim)]
            if size > 1 and not ties.tie(pair, size):
                refused.add((i.tensor, dim))
    return refused


def _working(graph: Graph, rows: Mapping[str, tuple[Row, ...]], axes: Axes, narrow: int) -> Axes:
    """Return the axes that some product can be split on; all axes if there are no products."""
    useful = {
        axes.of[d] for n in graph.nodes if is_product(n, graph) for row in rows[n.name]
        for d in _dims(n, row)
    } or set(axes.axes)  # fmt: skip
    if narrow > 1:
        roles = ("parameter", "input") if narrow == 2 else ("input",)
        given = {i.tensor for i in graph.inputs if i.role in roles}
        useful &= {
            axis for (tensor, dim), axis in axes.of.items()
            if tensor in given and (narrow == 2 or dim == 0)
        }  # fmt: skip
    return Axes(
        axes={name: axis for name, axis in axes.axes.items() if name in useful},
        of={dim: name for dim, name in axes.of.items() if name in useful},
    )


def _constants(graph: Graph) -> frozenset[str]:
    """Return tensors that depend on no parameter, batch or gradient."""
    found = {i.tensor for i in graph.inputs if i.role in ("buffer", "constant")}
    written = {o.target for o in graph.outputs if o.role == "buffer"}
    found -= {i.tensor for i in graph.inputs if i.target in written}
    for node in graph.nodes:
        if found.issuperset(node.inputs) and node.op != "aten.native_dropout.default":
            found.update(o for o in node.outputs if o)
    return frozenset(found)


def _holdings(
    graph: Graph, axes: Axes, rows: Mapping[str, tuple[Row, ...]], constant: frozenset[str]
) -> dict[str, tuple[Holding, ...]]:
    """Return possible holdings of each tensor: R, P, one shard, or two for different readers."""
    partial = {
        o for n in graph.nodes for row in rows[n.name]
        for o, p in zip(n.outputs, row.outs, strict=True) if p == P
    } & {
        i for n in graph.nodes for row in rows[n.name]
        for i, p in zip(n.inputs, row.ins, strict=True) if p == P
    }  # fmt: skip
    found: dict[str, tuple[Holding, ...]] = {}
    for name in graph.tensors:
        if name in constant:
            found[name] = ((R,),)
            continue
        shards = _shards(name, graph, axes)
        readers = graph.consumers[name]
        twice = len(readers) > 1 and any(n.op in FLOPS for n in readers)
        pairs = tuple(itertools.combinations(shards, 2)) if twice else ()
        found[name] = ((R,), *(((P,),) if name in partial else ()), *((s,) for s in shards), *pairs)
    return found
