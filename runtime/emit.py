"""Emit each rank's forward and backward as ``torch.fx`` graphs with local shapes and collectives.

Collectives are issued in the program's order (:mod:`hap.runtime.lanes`). A wait comes before the
first operator that reads a result.

The forward takes the rank's context, parameters, buffers and batch, and returns the loss, the new
buffers, and saved values. The backward takes the saved values and the loss's gradient, and returns
a gradient per parameter. The program assigns each instruction to one of them, alike on all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hap.capture import gradient_rounding, logical_operators  # noqa: F401  (register operators)
from hap.ir.axes import Shares
from hap.ir.graph import Dtype, Graph, Node, Ref, substitute
from hap.ir.graph_builder import RANDOM
from hap.ir.mesh import Offset
from hap.ir.microbatch import is_sum
from hap.ir.placement import LOCAL, L, P, R, S
from hap.ir.program import BETWEEN, Compute, Convert, Program, Value
from hap.runtime import sharded_lookup
from hap.runtime.aligned_rows import FEWEST, is_odd
from hap.runtime.localize import FACTORIES, LOOKUPS, localize, reads_contiguous
from hap.runtime.native_calls import ALIGNED_OPS, ODD_ROWS
from hap.runtime.sharded_lookup import Span
from hap.runtime.values import Values, named, set_apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A rank's two graphs, and the meaning of their inputs and outputs.

    ``forward``: ``(ctx, *inputs) -> (loss, *buffers, *saved)``;
    ``backward``: ``(ctx, *saved, tangent) -> (*gradients,)``.
    """

    forward: fx.Graph
    backward: fx.Graph
    inputs: tuple[str, ...]
    buffers: tuple[str, ...]
    saved: tuple[Value, ...]
    gradient_of: tuple[int | None, ...]
    """Per input of the forward, the index of its gradient in the backward's results, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
    """Emits the program of one rank.

    Args:
        device: the device of tensors that factory operators create.
        widen: emit all floats as float64, to verify a plan more exactly than float32 allows.
        offsets: by tensor, the start of the machine's shard; on a mesh of two axes.
        alone: the world has one rank, so that collectives are left out.
        over_time: the second mesh axis is time: sums between its places are sums over microbatches.
    """

    graph: Graph
    program: Program
    shares: Shares
    rank: int
    device: torch.device
    widen: bool = False
    offsets: Mapping[str, Offset] = field(default_factory=dict)
    alone: bool = False
    over_time: bool = False

    def emit(self) -> Emitted:
        """Return both graphs of this rank."""
        graph, program = self.graph, self.program
        tangent = next((i.tensor for i in graph.role("tangent")), None)
        inputs = tuple(i.tensor for i in graph.inputs if i.role != "tangent")
        forward = [s for s in program.instructions if not s.backward]
        backward = [s for s in program.instructions if s.backward]
        ends = list(zip(graph.outputs, program.outputs, strict=True))
        results = [Value(o.tensor, p) for o, p in ends if o.role == "loss"]
        results += [Value(o.tensor, p) for o, p in ends if o.role == "buffer"]
        gradients = [Value(o.tensor, p) for o, p in ends if o.role == "gradient"]
        made = {Value(t, program.inputs[t]) for t in inputs}
        made |= {v for s in forward for v in self._made(s)}
        later = [v for s in backward for v in self._used(s)] + gradients
        saved = tuple(v for v in dict.fromkeys(later) if v in made)
        given = [Value(tangent, program.inputs[tangent])] if tangent else []
        sides = [s.backward for s in program.instructions]
        before = [k for k, late in enumerate(sides) if not late]
        after = [k for k, late in enumerate(sides) if late]
        start = [Value(t, program.inputs[t]) for t in inputs]
        return Emitted(
            forward=self.segment(before, start, [*results, *saved]),
            backward=self.segment(after, [*saved, *given], gradients),
            inputs=inputs,
            buffers=tuple(o.target for o, _ in ends if o.role == "buffer"),
            saved=saved,
            gradient_of=self._gradient_of(inputs),
        )  # fmt: skip

    def _gradient_of(self, inputs: tuple[str, ...]) -> tuple[int | None, ...]:
        targets = {i.tensor: i.target for i in self.graph.role("parameter")}
        places = {target: k for k, target in enumerate(self.graph.gradients)}
        return tuple(places.get(targets.get(tensor, "")) for tensor in inputs)

    def _made(self, step: Compute | Convert) -> list[Value]:
        if isinstance(step, Convert):
            return [Value(step.tensor, step.dst)]
        outs = zip(self._node(step).outputs, step.outs, strict=True)
        return [Value(o, p) for o, p in outs if o and p]

    def _used(self, step: Compute | Convert) -> list[Value]:
        if isinstance(step, Convert):
            return [Value(step.tensor, step.src)]
        return [Value(n, p) for n, p in zip(self._node(step).inputs, step.ins, strict=True)]

    def _node(self, step: Compute) -> Node:
        return self.graph.by_name[step.node]

    def segment(
        self, numbers: Collection[int], given: Iterable[Value], results: Collection[Value], *,
        pending: bool = False, most_pending: int | None = None,
    ) -> fx.Graph:  # fmt: skip
        """Return a graph of some of the program's instructions: ``(ctx, *given) -> results``.

        Args:
            numbers: of the instructions, in the program's order.
            pending: results that only collectives make are :class:`hap.runtime.lanes.Pending`.
            most_pending: see :class:`Values`.
        """
        out = fx.Graph()
        ctx = out.placeholder("ctx")
        env = Values(out, ctx, most_pending, leave=results if pending else ())
        for value in given:
            env.take(value)
        chosen = frozenset(numbers)
        for first, end in self.program.bounds(self.graph):
            group = [self.program.instructions[k] for k in range(first, end) if k in chosen]
            if not group:
                continue
            step = group[0]
            if self.alone and isinstance(step, Convert):
                for s in (s for s in group if isinstance(s, Convert)):
                    env[Value(s.tensor, s.dst)] = env[Value(s.tensor, s.src)]
            elif isinstance(step, Compute):
                if self.over_time and is_sum(self._node(step)):
                    for each in (s for s in group if isinstance(s, Compute)):
                        self._sum(out, ctx, env, each)
                elif self._node(step).op.startswith(BETWEEN):
                    self._cross(out, ctx, env, [s for s in group if isinstance(s, Compute)])
                else:
                    self._compute(out, ctx, env, step)
            elif len(group) == 1:
                self._convert(out, ctx, env, step)
            else:
                self._convert_many(out, ctx, env, [s for s in group if isinstance(s, Convert)])
        env.finish()
        out.output(tuple(env.early(value) if pending else env[value] for value in results))
        set_apart(out)
        out.lint()
        return out

    def single(self, step: Compute) -> fx.Graph:
        """Return the graph of one operator: ``(ctx, *inputs) -> outputs``."""
        out = fx.Graph()
        ctx = out.placeholder("ctx")
        env = Values(out, ctx)
        for value in dict.fromkeys(self._used(step)):
            env.take(value)
        self._compute(out, ctx, env, step)
        out.output(tuple(env[value] for value in self._made(step)))
        return out

    def _shape(self, value: Value) -> tuple[int, ...]:
        return self.program.local_shape(self.graph, value, self.shares, self.rank)

    def _compute(self, out: fx.Graph, ctx: fx.Node, env: Values, step: Compute) -> None:
        node = self._node(step)
        if self._without_share(step):
            # A partial argument is a bias, which one rank adds even if it has no share.
            bias = [v for v in self._used(step) if v.placement == P]
            for value in self._made(step):
                empty = self._zeros(out, value)
                made = self._add_bias(out, env, value, empty, bias[0], node) if bias else empty
                env[value] = named(made, value)
            return
        placed = iter(step.ins)
        if node.op == "aten.native_dropout.default":
            call = self._dropout(out, ctx, env, step, node)
        elif node.op in RANDOM:
            call = self._drawn(out, ctx, step, node)
        else:
            outs = zip(node.outputs, step.outs, strict=True)
            args = localize(
                node, tuple(self._shape(Value(o, p)) if o and p else None for o, p in outs)
            )

            def tensor(ref: Ref) -> fx.Node:
                local = env[Value(ref.name, next(placed))]
                dense = reads_contiguous(node.op) or node.op in self.graph.ruled
                return out.call_method("contiguous", (local,)) if dense else local

            args, kwargs = substitute((args, node.kwargs), tensor)
            options = {k: self._plain(v) for k, v in kwargs}
            if _from_nothing(node):
                dtype = self.graph.tensors[next(o for o in node.outputs if o)].dtype
                options |= {"device": self.device, "dtype": self._dtype(dtype)}
            plain = tuple(map(self._plain, args))
            if node.op in BY_CONTEXT:
                call = out.call_method(BY_CONTEXT[node.op], (ctx, *plain))
            elif span := self._span(step, node):
                call = self._look_up(out, node, plain, span)
            else:
                call = out.call_function(resolve(node.op), plain, options)
                if self._odd_rows(step, node):
                    call.meta[ODD_ROWS] = True
        many = len(node.outputs) > 1 or node.op in MANY or _returns_list(node.op)
        for k, (name, p) in enumerate(zip(node.outputs, step.outs, strict=True)):
            if name and p:
                value = Value(name, p)
                part = out.call_function(operator.getitem, (call, k)) if many else call
                env[value] = named(part, value)

    def _odd_rows(self, step: Compute, node: Node) -> bool:
        """Return whether tensor cores would read or write rows that are no multiple of 16 bytes."""
        if self.device.type != "cuda" or node.op not in ALIGNED_OPS:
            return False
        (made,) = self._made(step)
        kind = self.graph.tensors[made.tensor].dtype
        dtype, shapes = self._dtype(kind), [self._shape(made)]
        lowered = dtype.itemsize == 2 or (dtype == torch.float32 and self.graph.products != kind)
        sizes = shapes[0][-1:]
        if node.op != "aten._to_copy.default":  # each dim of a product may be that of rows
            shapes += [self._shape(value) for value in self._used(step)]
            matrices = [shape for shape in shapes if len(shape) > 1]  # a bias is none
            sizes = tuple(n for *rows, size in matrices for n in (math.prod(rows), size))
        large = max(map(math.prod, shapes)) >= FEWEST
        return lowered and large and any(is_odd(size, dtype) for size in sizes)

    def _span(self, step: Compute, node: Node) -> Span | None:
        """Return this rank's range of indices, or None if the looked-up dim is not sharded."""
        entry = LOOKUPS.get(node.op)
        if entry is None:
            return None
        table = self._made(step)[0]
        if entry.table is not None:
            name = node.args[entry.table].name
            table = next(value for value in self._used(step) if value.tensor == name)
        shape = self.graph.tensors[table.tensor].shape
        dim = entry.where(node, len(shape))
        offset = self.offsets.get(table.tensor)
        if offset is None or offset.dim != dim:
            offset = Offset(dim, 0, shape[dim])
            if table.placement != S(dim):
                return None
        start, stop = offset.start, offset.start + shape[dim]
        if table.placement == S(dim):
            sizes = self.program.sizes(self.graph, table, self.shares)
            start += sum(sizes[: self.rank])
            stop = start + sizes[self.rank]
        return start, stop, offset.size

    def _look_up(self, out: fx.Graph, node: Node, args: tuple[Any, ...], span: Span) -> fx.Node:
        """Return the call of an operator of :data:`LOOKUPS` for this rank's range of indices."""
        entry, given = LOOKUPS[node.op], list(args)
        index = args[entry.numbers]
        if entry.skip is not None:
            shifted = (index, span, args[entry.skip])
            given[entry.numbers] = out.call_function(sharded_lookup.own_or_ignored, shifted)
            given[entry.skip] = sharded_lookup.IGNORED_NUMBER
            return out.call_function(resolve(node.op), tuple(given))
        given[entry.numbers] = out.call_function(sharded_lookup.own_or_first, (index, span))
        (result,) = node.outputs
        at = entry.where(node, len(self.graph.tensors[str(result)].shape)) if entry.inside else 0
        if entry.zero is not None:
            zeroed = (args[entry.zero], index, span, at)
            given[entry.zero] = out.call_function(sharded_lookup.zero_for_others, zeroed)
            return out.call_function(resolve(node.op), tuple(given))
        found = out.call_function(resolve(node.op), tuple(given))
        return out.call_function(sharded_lookup.zero_for_others, (found, index, span, at))

    def _without_share(self, step: Compute) -> bool:
        """Return whether this rank has no elements here: its shards are empty, its terms zero.

        Many kernels refuse empty dims, so none is called. A replicated result must be computed
        all the same. A tensor that is empty on one device says nothing of a rank.
        """
        values = [
            v for v in (*self._used(step), *self._made(step))
            if v.placement.sharded and self.graph.tensors[v.tensor].numel
        ]  # fmt: skip
        replicated = any(v.placement == R for v in self._made(step))
        return not replicated and any(0 in self._shape(v) for v in values)

    def _add_bias(
        self, out: fx.Graph, env: Values, result: Value, zeros: fx.Node, bias: Value, node: Node
    ) -> fx.Node:
        shape, rank = self._shape(bias), len(self._shape(result))
        if node.op == "aten.convolution.default":  # the bias is along the channels
            shape = (*shape, *(1 for _ in range(rank - 2)))
        term = out.call_function(torch.ops.aten.reshape.default, (env[bias], list(shape)))
        return out.call_function(torch.add, (zeros, term))

    def _zeros(self, out: fx.Graph, value: Value) -> fx.Node:
        dtype = self._dtype(self.graph.tensors[value.tensor].dtype)
        options: dict[str, Any] = {"dtype": dtype, "device": self.device}
        # The neutral element of the sum, or of the log of the sum of exponentials.
        fill = -math.inf if value.placement == L else 0
        return out.call_function(torch.full, (list(self._shape(value)), fill), options)

    def _plain(self, arg: Any) -> Any:
        if isinstance(arg, Dtype):
            return self._dtype(arg.name)
        if isinstance(arg, str) and arg.endswith("_format"):
            return getattr(torch, arg)
        return [self._plain(a) for a in arg] if isinstance(arg, tuple) else arg

    def _dtype(self, name: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, "float64" if self.widen and "float" in name else name)
        return found

    def _dropout(
        self, out: fx.Graph, ctx: fx.Node, env: Values, step: Compute, node: Node
    ) -> fx.Node:
        value = Value(node.inputs[0], step.ins[0])
        site = (node.name, self._place(value))
        call = out.call_method("dropout", (ctx, env[value], node.args[1], *site))
        call.meta["shape"] = self._shape(value)
        return call

    def _drawn(self, out: fx.Graph, ctx: fx.Node, step: Compute, node: Node) -> fx.Node:
        (value,) = self._made(step)
        kind = node.op.split(".")[1].removesuffix("_like")
        numbers = tuple(a for a in node.args if isinstance(a, int | float))
        dtype = self._dtype(self.graph.tensors[value.tensor].dtype)
        options: dict[str, Any] = {"dtype": dtype, "device": self.device}
        site = (list(self._shape(value)), node.name, self._place(value))
        return out.call_method("draw", (ctx, kind, numbers, *site), options)

    def _place(self, value: Value) -> int | str:
        """Return the seed of a value's place: it differs between shards, not between replicas."""
        place: int | str = 0
        if value.placement.sharded:
            place = sum(self.program.sizes(self.graph, value, self.shares)[: self.rank])
        if value.tensor in self.offsets:
            place = f"{self.offsets[value.tensor].start}/{place}"
        return place

    def _cross(self, out: fx.Graph, ctx: fx.Node, env: Values, steps: list[Compute]) -> None:
        """Emit conversions between machines, which are operators here; several run as one."""
        nodes = [self._node(s) for s in steps]
        kind = nodes[0].op.removeprefix(BETWEEN)
        read = [Value(n.inputs[0], s.ins[0]) for n, s in zip(nodes, steps, strict=True)]
        made = [v for s in steps for v in self._made(s)]
        plain = [n.args[1:] for n in nodes]
        if kind in LOCAL:
            result = out.call_method(f"between_{kind}", (ctx, env[read[0]], *plain[0]))
            env[made[0]] = named(result, made[0])
        elif len(steps) == 1:
            env.issue(made, "between", kind, env.early(read[0]), *plain[0])
        else:  # all arguments but the implementation become lists
            lists = [list(column) for column in zip(*(p[:-1] for p in plain), strict=True)]
            xs = [env.early(value) for value in read]
            env.issue(made, "between", f"{kind}_many", xs, *lists, plain[0][-1])

    def _sum(self, out: fx.Graph, ctx: fx.Node, env: Values, step: Compute) -> None:
        """Emit a sum over the microbatches, at the last of them."""
        (term,), (total,) = self._used(step), self._made(step)
        call = out.call_method("total", (ctx, step.node, env.get(term)))
        env[total] = named(call, total)

    def _convert_many(self, out: fx.Graph, ctx: fx.Node, env: Values, steps: list[Convert]) -> None:
        kind, how = steps[0].kind, steps[0].implementation
        xs = [env.early(Value(s.tensor, s.src)) for s in steps]
        made = [Value(s.tensor, s.dst) for s in steps]
        if kind in ("all_reduce", "all_reduce_lse"):
            env.issue(made, f"{kind}_many", xs, how)
        else:
            cut = [Value(s.tensor, s.src if s.src.sharded else s.dst) for s in steps]
            dims = [value.placement.dim for value in cut]
            sizes = [self.program.sizes(self.graph, value, self.shares) for value in cut]
            env.issue(made, f"{kind}_many", xs, dims, sizes, how)

    def _convert(self, out: fx.Graph, ctx: fx.Node, env: Values, step: Convert) -> None:
        src, dst = Value(step.tensor, step.src), Value(step.tensor, step.dst)
        how = step.implementation

        def sizes(value: Value) -> tuple[int, ...]:
            return self.program.sizes(self.graph, value, self.shares)

        match step.kind:
            case "all_gather":
                env.issue([dst], "all_gather", env.early(src), src.placement.dim, sizes(src), how)
            case "reduce_scatter":
                where = (dst.placement.dim, sizes(dst))
                env.issue([dst], "reduce_scatter", env.early(src), *where, how)
            case "all_reduce" | "all_reduce_lse" as kind:
                env.issue([dst], kind, env.early(src), how)
            case "all_to_all":
                ends = (src.placement.dim, dst.placement.dim, sizes(src), sizes(dst))
                env.issue([dst], "all_to_all", env.early(src), *ends, how)
            case "slice":
                mine = sizes(dst)
                span = (dst.placement.dim, sum(mine[: self.rank]), mine[self.rank])
                env[dst] = named(out.call_function(torch.narrow, (env[src], *span)), dst)
            case "mask" if self.rank == 0:
                env[dst] = env[src]
            case "mask":
                env[dst] = named(out.call_function(torch.zeros_like, (env[src],)), dst)
            case kind:
                raise AssertionError(f"no emission for {kind}")


# Operators that the context runs, because they depend on whether the module trains, or on the
# step before.
BY_CONTEXT = {
    "aten.native_dropout_backward.default": "dropout_backward",
    "hap.by_mode.default": "by_mode",
    "hap.in_training.default": "in_training",
    "hap.rounded_with_feedback.default": "rounded_with_feedback",
}

# Operators that return a tuple even if the graph uses only one result.
MANY = frozenset({"aten.unbind.int", "aten.split.Tensor", "aten.split_with_sizes.default"})


def _from_nothing(node: Node) -> bool:
    """Does the operator make a tensor of numbers alone? Then it is told the device and the dtype."""
    if node.op in FACTORIES or node.inputs:
        return node.op in FACTORIES
    names = {argument.name for argument in resolve(node.op)._schema.arguments}
    return {"device", "dtype"} <= names


def _returns_list(op: str) -> bool:
    (first, *_) = resolve(op)._schema.returns
    return str(first.type) == "List[Tensor]"


def resolve(op: str) -> Any:
    """Return the operator ``aten.mm.default``. Views become reshapes: local strides may differ."""
    if op == "aten.view.default":
        return torch.ops.aten.reshape.default
    namespace, name, overload = op.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
