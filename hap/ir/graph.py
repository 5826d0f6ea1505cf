"""The single-device training program as plain data.

A :class:`Graph` is the joint forward and backward of one training step in single-assignment
form: named tensors, nodes that make them, and the roles of its inputs and outputs. It does not
depend on torch, devices or sharding, so that planning is pure and a plan has the same meaning on
every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from hap.ir.plain_data import read_count, read_list, read_map, read_text

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "uint64": 8, "uint32": 4, "uint16": 2,
}  # fmt: skip

LATE = ("gradient", "returned")
"""Roles of outputs that the backward makes."""

FREE = frozenset(
    f"aten.{op}"
    for op in (
        "alias.default", "view.default", "t.default", "transpose.int", "permute.default",
        "unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "expand.default",
        "slice.Tensor", "select.int", "unbind.int", "split.Tensor", "split_with_sizes.default",
    )
) | {"mesh.slice"}  # fmt: skip
"""Operators that run no kernel."""


class Ref(NamedTuple):
    """An argument of a node that is a tensor of the graph."""

    name: str


class Dtype(NamedTuple):
    """An argument of a node that is a dtype, such as ``Dtype("float32")``."""

    name: str


# An argument: a tensor, a dtype, a plain value, or a nested tuple of arguments.
Arg = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """Name, global shape (in elements) and dtype of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name}: unknown dtype {self.dtype!r}")
        object.__setattr__(self, "numel", math.prod(self.shape))
        object.__setattr__(self, "nbytes", self.numel * ITEM_BYTES[self.dtype])

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call: ``outputs = op(*args, **kwargs)``.

    ``outputs`` holds one tensor name per result, ``None`` for unused results.
    ``source`` is the user's line and ``module`` the path of the calling submodule; in the
    backward, those of the forward's operator. Both serve only messages and are not part of the
    graph's digest.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[str | None, ...]
    source: str = ""
    module: str = ""
    inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The tensor arguments in order of appearance, repeated if used twice."""

    def __post_init__(self) -> None:
        refs = _refs((self.args, tuple(v for _, v in self.kwargs)))
        object.__setattr__(self, "inputs", tuple(ref.name for ref in refs))

    def __str__(self) -> str:
        given = [_show(a) for a in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs]
        return f"{', '.join(o or '_' for o in self.outputs)} = {self.op}({', '.join(given)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor that enters the step. ``target`` is the name of the parameter or batch entry.

    Roles: ``parameter``, ``buffer``, ``input`` (of the batch), ``constant``, ``tangent`` (the
    gradient that arrives at the loss), ``received`` (from another pipeline stage).
    """

    tensor: str
    role: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor that leaves the step.

    Roles: ``loss``, ``gradient`` (of ``target``), ``buffer``; to the pipeline stage ``target``,
    ``sent`` by the forward or ``returned`` by the backward.
    """

    tensor: str
    role: str
    target: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A checked single-assignment program; see the module's docstring.

    ``rules`` describes operators that the rule table lacks: see
    :mod:`hap.synthesizer.rules.textual_rules`. It is not part of the program, nor of its digest.
    ``products``: the precision at which float32 matrices are multiplied, ``float32`` or ``tfloat32``.
    It changes prices alone, and a plan file has it in its recipe. ``whole_parameters``: every rank
    stores trained parameters whole, for an optimizer that reads across them; ``fused_update``: the
    optimizer's step holds no copy of a state. A plan file has both in its optimizer.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    tensors: Mapping[str, Tensor] = field(repr=False)
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    products: str = "float32"
    whole_parameters: bool = False
    fused_update: bool = False

    def __post_init__(self) -> None:
        self.check()

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that are no part of the program, as arguments of a graph made of this one."""
        return {n: getattr(self, n) for n in ("products", "whole_parameters", "fused_update")}

    def check(self) -> None:
        """Raise ``ValueError`` unless every tensor is defined once, and before its uses."""
        defined = {i.tensor for i in self.inputs}
        for node in self.nodes:
            for name in node.inputs:
                if name not in defined:
                    raise ValueError(f"{node.name} uses {name!r} before it is defined")
            for out in node.outputs:
                if out in defined:
                    raise ValueError(f"{node.name} defines {out!r} a second time")
                if out is not None:
                    defined.add(out)
        for output in self.outputs:
            if output.tensor not in defined:
                raise ValueError(f"output {output.target!r} is never computed")
        if missing := defined - self.tensors.keys():
            raise ValueError(f"no shape is known for {sorted(missing)}")

    @cached_property
    def memo(self) -> dict[str, Any]:
        """Cache of values derived from this graph, which never changes."""
        return {}

    @cached_property
    def ruled(self) -> frozenset[str]:
        """The operators that :attr:`rules` describes."""
        return frozenset(key.partition("(")[0] for key in self.rules)

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def alike(self) -> Mapping[str, int]:
        """Node name -> number of its kind: same operator, flags, shapes and dtypes.

        Layers repeat, so there are few kinds. A function that does not read names has the same
        value for all nodes of a kind.
        """
        kinds: dict[object, int] = {}
        found = {}
        for node in self.nodes:
            looks = tuple(
                None if name is None else (self.tensors[name].shape, self.tensors[name].dtype)
                for name in (*node.inputs, *node.outputs)
            )
            flags = tuple(a for a in node.args if isinstance(a, bool))
            repeats = tuple(node.inputs.index(name) for name in node.inputs)
            key = node.op, flags, repeats, looks
            found[node.name] = kinds.setdefault(key, len(kinds))
        return found

    @cached_property
    def defined(self) -> tuple[str, ...]:
        """Names of all tensors in order of definition; that of :attr:`tensors` may be another one."""
        made = (out for node in self.nodes for out in node.outputs if out is not None)
        return (*(i.tensor for i in self.inputs), *made)

    @cached_property
    def producer(self) -> Mapping[str, Node]:
        return {out: node for node in self.nodes for out in node.outputs if out is not None}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        found: dict[str, list[Node]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return {name: tuple(nodes) for name, nodes in found.items()}

    @cached_property
    def backward(self) -> frozenset[str]:
        """Names of the nodes that run in the backward: all nodes that the loss does not need.

        The graph decides this for all ranks: a partition by a rank's own sizes could
        order its collectives unlike the others'.
        """
        needed: set[str] = {o.tensor for o in self.outputs if o.role not in LATE}
        forward = set()
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                forward.add(node.name)
                needed.update(node.inputs)
        return frozenset(n.name for n in self.nodes if n.name not in forward)

    @cached_property
    def saved(self) -> frozenset[str]:
        """Tensors that the forward makes and the backward reads: kept in memory until then."""
        made = {o for n in self.nodes if n.name not in self.backward for o in n.outputs if o}
        read = {i for n in self.nodes if n.name in self.backward for i in n.inputs}
        return frozenset(made & read)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that all ranks together keep for the backward under any program, at least.

        Saved views of one storage count once, and no more than the storage.
        """
        least: dict[str, int] = {}
        for name in self.saved:
            root = name
            while (node := self.producer.get(root)) and node.op in FREE and node.inputs:
                root = node.inputs[0]
            if node:  # else a view of an input
                least[root] = max(least.get(root, 0), self.tensors[name].nbytes)
        return sum(min(nbytes, self.tensors[root].nbytes) for root, nbytes in least.items())

    def least_bytes(self, states: int) -> int:
        """Bytes that all ranks hold, at least; ``states``: of a parameter's size in the optimizer."""
        trained = sum(self.tensors[name].nbytes for name in self.gradients.values())
        held = sum(self.tensors[i.tensor].nbytes for i in self.role("parameter"))
        return held + states * trained + max(self.saved_bytes, trained)

    def role(self, role: str) -> tuple[Input, ...]:
        return tuple(i for i in self.inputs if i.role == role)

    @cached_property
    def gradients(self) -> Mapping[str, str]:
        """Parameter name -> tensor that holds its gradient."""
        return {o.target: o.tensor for o in self.outputs if o.role == "gradient"}

    @property
    def loss(self) -> str:
        return next(o.tensor for o in self.outputs if o.role == "loss")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the program without source lines, which binds a plan to its model."""
        text = json.dumps(self.to_json(sources=False), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def lines(self) -> Iterator[str]:
        """The program as text, a line each; the differences of two models are those of lines."""
        for i in self.inputs:
            yield f"{i.role} {i.target} -> {self.tensors[i.tensor]}"
        for node in self.nodes:
            shapes = ", ".join(str(self.tensors[o].shape) for o in node.outputs if o)
            yield f"{node}  # {shapes}"
        for o in self.outputs:
            yield f"return {o.role} {o.target} = {o.tensor}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self, *, sources: bool = True) -> dict[str, Any]:
        def node(n: Node) -> list[Any]:
            plain = [n.name, n.op, _pack(n.args), _pack(n.kwargs), list(n.outputs)]
            return [*plain, n.source, n.module] if sources else plain

        rules = {key: list(lines) for key, lines in self.rules.items()} if sources else {}
        return ({"rules": rules} if rules else {}) | {
            "inputs": [[i.tensor, i.role, i.target] for i in self.inputs],
            "nodes": [node(n) for n in self.nodes],
            "outputs": [[o.tensor, o.role, o.target] for o in self.outputs],
            "tensors": {t.name: [list(t.shape), t.dtype] for t in self.tensors.values()},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Graph:
        """The inverse of :meth:`to_json`.

        Raises:
            ValueError: a field has another type than :meth:`to_json` writes.
        """
        fields = read_map(data, "the graph")
        nodes = []
        for k, entry in enumerate(read_list(fields["nodes"], "nodes")):
            where = f"node {k} of the graph"
            name, op, args, kwargs, outs, source, module = read_list(entry, where, 7)
            named = [read_list(pair, f"keyword of {where}", 2) for pair in read_list(kwargs, where)]
            nodes.append(
                Node(
                    name=read_text(name, where), op=read_text(op, where),
                    args=tuple(_unpack(a) for a in read_list(args, where)),
                    kwargs=tuple((read_text(key, where), _unpack(value)) for key, value in named),
                    outputs=tuple(
                        None if o is None else read_text(o, where) for o in read_list(outs, where)
                    ),
                    source=read_text(source, where), module=read_text(module, where),
                )
            )  # fmt: skip
        tensors = {}
        for name, entry in read_map(fields["tensors"], "the graph's tensors").items():
            shape, dtype = read_list(entry, f"tensor {name}", 2)
            sizes = tuple(
                read_count(s, f"tensor {name}") for s in read_list(shape, f"tensor {name}")
            )
            tensors[name] = Tensor(name=name, shape=sizes, dtype=read_text(dtype, f"tensor {name}"))
        rules = read_map(fields.get("rules", {}), "the graph's rules")
        return Graph(
            inputs=tuple(
                Input(tensor=t, role=r, target=g) for t, r, g in _ends(fields["inputs"], "inputs")
            ),
            nodes=tuple(nodes),
            outputs=tuple(
                Output(tensor=t, role=r, target=g)
                for t, r, g in _ends(fields["outputs"], "outputs")
            ),
            tensors=tensors,
            rules={
                key: tuple(
                    read_text(line, f"rule {key}") for line in read_list(lines, f"rule {key}")
                )
                for key, lines in rules.items()
            },
        )


def _ends(data: Any, where: str) -> Iterator[tuple[str, str, str]]:
    """Triples of text: tensor, role, target."""
    for entry in read_list(data, where):
        tensor, role, target = read_list(entry, where, 3)
        yield read_text(tensor, where), read_text(role, where), read_text(target, where)


def substitute(arg: Arg, tensor: Any) -> Arg:
    """Return ``arg`` with ``tensor(ref)`` in place of every :class:`Ref`, tuples kept as tuples."""
    if isinstance(arg, Ref):
        return tensor(arg)
    if isinstance(arg, tuple) and not isinstance(arg, Dtype):
        return tuple(substitute(a, tensor) for a in arg)
    return arg


def renamed_in_backward(
    graph: Graph, other: Callable[[str, list[Node]], str], tensors: Mapping[str, Tensor]
) -> Graph:
    """Return a graph with a backward that reads other tensors.

    Args:
        other: returns the name that a tensor has in the backward, and may append nodes that make it.
        tensors: all tensors of the new graph; read after all calls of ``other``.
    """
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name in graph.backward:
            node = reading(node, {name: other(name, nodes) for name in node.inputs})
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), tensors=tensors, rules={})


def reading(
    node: Node, names: Mapping[str, str], copy: str = "", outputs: tuple[str | None, ...] = ()
) -> Node:
    """Return the node with other inputs, old name -> new; ``copy`` renames a second node."""
    if not copy and all(old == new for old, new in names.items()):
        return node

    def rename(ref: Ref) -> Ref:
        return Ref(names.get(ref.name, ref.name))

    return Node(
        name=copy or node.name, op=node.op, args=substitute(node.args, rename),
        kwargs=tuple((k, substitute(v, rename)) for k, v in node.kwargs),
        outputs=outputs or node.outputs, source=node.source, module=node.module,
    )  # fmt: skip


def _refs(arg: Arg) -> Iterator[Ref]:
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple) and not isinstance(arg, Dtype):
        for a in arg:
            yield from _refs(a)


def _show(arg: Arg) -> str:
    if isinstance(arg, Ref | Dtype):
        return arg.name
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_show, arg))}]"
    return repr(arg)


def _pack(arg: Arg) -> Any:
    if isinstance(arg, Ref):
        return {"t": arg.name}
    if isinstance(arg, Dtype):
        return {"dtype": arg.name}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    return [_pack(a) for a in arg] if isinstance(arg, tuple) else arg


def _unpack(data: Any) -> Arg:
    if isinstance(data, dict):
        ((kind, value),) = data.items()
        return {"t": Ref, "dtype": Dtype, "float": float}[kind](read_text(value, "an argument"))
    return tuple(_unpack(a) for a in data) if isinstance(data, list) else data
