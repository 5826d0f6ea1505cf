"""Build a graph node by node, without duplicate computations.

Autograd's traces contain views of views, transposes undone at once, and values made
again in the backward. Removing them changes no result and speeds up planning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hap.ir.graph import FREE, Arg, Graph, Input, Node, Output, Ref, Tensor
from hap.ir.linear_layers import linear_layers

# The graph mutates nothing and makes its views by reshape, so a copy equals its original. Only the
# buffers that a step writes get their new values before the backward reads copies of the old ones.
ALIASES = {
    "aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default", "aten.clone.default",
}  # fmt: skip
# All of these return the same elements in the same order, in another shape.
VIEWS = {
    "aten.view.default", "aten._unsafe_view.default", "aten.reshape.default",
    "aten.unsqueeze.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
}  # fmt: skip
SUM = "aten.sum.dim_IntList"
LOOKUPS = frozenset(
    {
        "aten.embedding.default",
        "aten.gather.default",
        "aten.index.Tensor",
        "aten.index_select.default",
    }
)
"""Operators that read as much of their first tensor as they write."""

RANDOM = {
    "aten.native_dropout.default", "aten.bernoulli.p", "aten.rand.default",
    "aten.rand_like.default", "aten.randn.default", "aten.randn_like.default",
    "aten.randint.default", "aten.randint.low",
}  # fmt: skip
UNDEFINED = {"aten.empty.memory_format", "aten.new_empty.default", "aten.empty_like.default"}
"""Operators with uninitialised results."""

# Never merged: random values, and position numbers, which would tie the axes of all layers.
DISTINCT = RANDOM | {"aten.arange.default", "aten.arange.start", "aten.arange.start_step"}


class Builder:
    """Collects nodes; ``node`` may return references to an earlier, equal value.

    Args:
        written: the tensors of buffers that the step writes.
    """

    def __init__(self, written: Iterable[str] = ()) -> None:
        self._written = frozenset(written)
        self._tensors: dict[str, Tensor] = {}
        self._nodes: list[Node] = []
        self._made: dict[str, Node] = {}  # tensor -> the node that makes it
        self._seen: dict[object, tuple[Ref | None, ...]] = {}

    def tensor(self, tensor: Tensor) -> str:
        self._tensors[tensor.name] = tensor
        return tensor.name

    def node(
        self, *, name: str, op: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...],
        results: Sequence[Tensor | None], source: str, module: str,
    ) -> tuple[Ref | None, ...]:  # fmt: skip
        """Add ``results = op(*args)`` unless an equal value exists; return the results."""
        if op == "aten.clone.default" and self._through(args[0], FREE).name in self._written:
            op, args, kwargs = "aten._to_copy.default", args[:1], ()
        if op in ALIASES:
            return (args[0],)
        if op in VIEWS:
            op, args = "aten.view.default", (self._through(args[0], VIEWS), results[0].shape)  # type: ignore[union-attr]
        if op == "aten.cat.default":
            args = (self._nonempty(args[0], results[0]), *args[1:])
            if len(args[0]) == 1 and self._same(args[0][0], results[0]):
                return (args[0][0],)
        if op in ("aten.t.default", "aten.transpose.int") and (base := self._undone(op, args)):
            return (base,)
        whole = {"aten.view.default", "aten.slice.Tensor", "aten.expand.default"}
        if op in whole and self._tensors[args[0].name].shape == results[0].shape:  # type: ignore[union-attr]
            return (args[0],)
        # repr tells 1 from True and 1.0, which compare equal.
        key = (op, repr(args), repr(kwargs))
        if op not in DISTINCT and key in self._seen:
            return self._seen[key]
        for result in results:
            if result is not None:
                self.tensor(result)
        node = Node(
            name=name, op=op, args=args, kwargs=kwargs, source=source, module=module,
            outputs=tuple(None if r is None else r.name for r in results),
        )  # fmt: skip
        self._nodes.append(node)
        self._made.update({r.name: node for r in results if r is not None})
        refs = tuple(None if r is None else Ref(r.name) for r in results)
        self._seen[key] = refs
        return refs

    def _nonempty(self, refs: tuple[Ref, ...], result: Tensor | None) -> tuple[Ref, ...]:
        """Return the arguments of a concatenation without empty ones, which may have any rank."""
        kept = tuple(ref for ref in refs if self._tensors[ref.name].numel)
        dtypes = {self._tensors[ref.name].dtype for ref in kept}
        return kept if result is not None and result.dtype in dtypes else refs

    def _same(self, ref: Ref, result: Tensor | None) -> bool:
        """Return whether ``ref`` has the shape and dtype of ``result``."""
        own = self._tensors[ref.name]
        return result is not None and (own.shape, own.dtype) == (result.shape, result.dtype)

    def _through(self, ref: Ref, ops: Collection[str]) -> Ref:
        node = self._made.get(ref.name)
        return self._through(node.args[0], ops) if node and node.op in ops else ref

    def _undone(self, op: str, args: tuple[Arg, ...]) -> Ref | None:
        node = self._made.get(args[0].name)
        same = node is not None and node.op == op and set(node.args[1:]) == set(args[1:])
        return node.args[0] if same and node is not None else None

    def graph(self, *, inputs: tuple[Input, ...], outputs: tuple[Output, ...]) -> Graph:
        """Return the finished graph without unused nodes and inputs."""
        ends, tensors = {o.tensor for o in outputs}, self._tensors
        nodes = _without_kept_dims(_needed(self._nodes, ends), tensors, ends)
        nodes = _needed(linear_layers(nodes, tensors), ends)
        needed = ends.union(*(node.inputs for node in nodes))
        # A tied parameter's second name and inputs that the forward ignores are no inputs.
        inputs = tuple(i for i in inputs if i.tensor in needed or i.role in ("input", "tangent"))
        used = needed | {i.tensor for i in inputs}
        kept = tuple(
            replace(n, outputs=tuple(o if o in used else None for o in n.outputs)) for n in nodes
        )
        made = (o for node in kept for o in node.outputs if o)
        ordered = {name: tensors[name] for name in (*(i.tensor for i in inputs), *made)}
        return Graph(inputs=inputs, nodes=kept, outputs=outputs, tensors=ordered)


def _needed(nodes: Sequence[Node], ends: Collection[str]) -> list[Node]:
    """Return the nodes that the step's results depend on."""
    needed, kept = set(ends), []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            needed.update(node.inputs)
            kept.append(node)
    return kept[::-1]


def _without_kept_dims(
    nodes: Sequence[Node], tensors: Mapping[str, Tensor], ends: Collection[str]
) -> list[Node]:
    """Merge a view that drops the kept dims of a sum into that sum, as in the gradient of a bias."""
    readers = Counter(name for node in nodes for name in node.inputs)
    made = {name: node for node in nodes for name in node.outputs}
    dropped: dict[str, Node] = {}  # the sum's name -> the view of it
    for view in nodes:
        of = made.get(view.inputs[0]) if view.op == "aten.view.default" else None
        if (
            of is None
            or of.op != SUM
            or of.kwargs
            or len(of.args) != 3
            or readers[view.inputs[0]] > 1
        ):
            continue
        shape, dims = tensors[of.inputs[0]].shape, of.args[1]
        without = tuple(n for d, n in enumerate(shape) if d not in {k % len(shape) for k in dims})
        if view.inputs[0] not in ends and view.args[1] == without:
            dropped[of.name] = view
    views = {view.name for view in dropped.values()}
    return [
        replace(n, args=n.args[:2], outputs=dropped[n.name].outputs) if n.name in dropped else n
        for n in nodes if n.name not in views
    ]  # fmt: skip
