"""Two mesh axes: the step of one machine, divided from a program between machines.

The program *between* treats every machine as one device. What remains for each machine is
a training step on smaller tensors, in which the collectives between machines are operators:
:func:`divide` returns it as a graph. The program *inside* is planned over that graph like
any other, and so may choose the placement inside the machine in which a tensor crosses the slow
links: the hierarchical all-reduce (reduce-scatter inside, all-reduce between, all-gather
inside) is one of its choices, not a special case.

Rank ``(i, j)`` is device ``j`` of machine ``i``; a collective between machines joins the ranks
of one column ``j``. All machines run the same program inside, on shards of their own sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from hap.cluster.device import Device
from hap.cluster.topology import Cluster
from hap.ir.axes import Shares
from hap.ir.graph import Arg, Graph, Input, Node, Output, Ref, Tensor, substitute
from hap.ir.placement import Placement, R
from hap.ir.program import BETWEEN, Compute, Convert, Program, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The program that every machine runs, over the graph that :func:`divide` returns.

    ``shares`` maps an axis to units per rank of the whole cluster, in rank order; the units of a
    machine's ranks sum to the machine's units of the axis.
    """

    program: Program
    shares: Shares


class Offset(NamedTuple):
    """Start of a machine's shard along ``dim``, and the ``size`` of the whole dim in elements."""

    dim: int
    start: int
    size: int


class Part(NamedTuple):
    """The work of one rank: ``program`` over ``graph``, as rank ``rank`` of its machine.

    ``offsets`` has an entry for each tensor that is cut between machines.
    """

    graph: Graph
    program: Program
    shares: Shares
    rank: int
    offsets: Mapping[str, Offset]


class Mesh:
    """The ranks of a cluster as a matrix: machines by devices.

    Raises:
        ValueError: the machines do not all have the same number of devices, 2 or more.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.machines = tuple(cluster.ranks(node) for node in cluster.nodes)
        counts = {len(ranks) for ranks in self.machines}
        if len(self.machines) < 2 or len(counts) > 1 or counts == {1}:
            raise ValueError(
                "a mesh needs 2 machines or more, all with the same number of devices, 2 or more"
            )
        if tuple(rank for ranks in self.machines for rank in ranks) != tuple(range(len(self))):
            raise ValueError("the ranks of a machine must follow each other")

    def __len__(self) -> int:
        return self.cluster.world_size

    @property
    def width(self) -> int:
        """Devices per machine."""
        return len(self.machines[0])

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Per device of a machine, the ranks with its place in all machines."""
        return tuple(zip(*self.machines, strict=True))

    def place(self, rank: int) -> tuple[int, int]:
        """(machine, column) of a rank."""
        return divmod(rank, self.width)

    @cached_property
    def between(self) -> Cluster:
        """The cluster with whole machines as devices, at the sum of their devices' rates."""
        machines = [[self.cluster.devices[r] for r in ranks] for ranks in self.machines]
        devices = tuple(Device.together(machine, machine[0].node) for machine in machines)
        links = {d.node: self.cluster.inter for d in devices}
        return replace(self.cluster, devices=devices, intra=links)

    def inside(self, machine: int) -> Cluster:
        """The cluster of one machine's devices."""
        ranks = self.machines[machine]
        devices = tuple(self.cluster.devices[r] for r in ranks)
        node = devices[0].node
        return replace(self.cluster, devices=devices, intra={node: self.cluster.intra[node]})


def is_mesh(cluster: Cluster) -> bool:
    """Return whether the cluster has several machines, all with the same number (2+) of devices."""
    counts = {len(cluster.ranks(node)) for node in cluster.nodes}
    return len(cluster.nodes) > 1 and len(counts) == 1 and counts != {1}


AGAIN = "'"
"""Suffix of the name of a value that the backward makes a second time."""


def origin(tensor: str) -> Value:
    """Return the value of the program between that a tensor of a divided graph represents."""
    name, mark, placement = tensor.rstrip(AGAIN).rpartition("~")
    return Value(name, Placement.parse(placement)) if mark else Value(placement, R)


def divide(graph: Graph, program: Program, shares: Shares, machine: int | None = None) -> Graph:
    """Return the step that a machine runs: values become tensors, conversions operators.

    Args:
        program: the program between machines; ``shares`` are units per machine.
        machine: gives the tensors the sizes of this machine's shards. Without it they keep the
            sizes of the whole tensors: the form in which all machines are planned at once.
    """
    return _Divider(graph, program, shares, machine).graph()


def offsets(
    graph: Graph, program: Program, shares: Shares, machine: int, divided: Graph
) -> dict[str, Offset]:
    """Return the starts of a machine's shards, by the names of its divided graph."""
    found = {}
    for name in divided.tensors:
        value = origin(name)
        if value.placement.sharded:
            sizes = program.sizes(graph, value, shares)
            found[name] = Offset(value.placement.dim, sum(sizes[:machine]), sum(sizes))
    return found


class _Divider:
    def __init__(self, graph: Graph, program: Program, shares: Shares, machine: int | None) -> None:
        self._graph, self._program, self._shares = graph, program, shares
        self._machine = machine
        self._names: dict[Value, str] = {}
        self._tensors: dict[str, Tensor] = {}

    def graph(self) -> Graph:
        inputs = tuple(
            Input(tensor=self._made(Value(i.tensor, self._program.inputs[i.tensor])),
                  role=i.role, target=i.target)
            for i in self._graph.inputs
        )  # fmt: skip
        nodes = tuple(
            self._compute(step) if isinstance(step, Compute) else self._convert(step)
            for step in self._program.instructions
        )
        outputs = tuple(
            Output(tensor=self._names[Value(o.tensor, p)], role=o.role, target=o.target)
            for o, p in zip(self._graph.outputs, self._program.outputs, strict=True)
        )
        joint = Graph(
            inputs=inputs, nodes=nodes, outputs=outputs, tensors=self._tensors,
            rules=self._graph.rules, **self._graph.settings,
        )  # fmt: skip
        # Parameters that only the backward reads are not converted at the start.
        return replace(joint, nodes=tuple(sorted(nodes, key=lambda n: n.name in joint.backward)))

    def _made(self, value: Value) -> str:
        """Name a value that is made here, and give its tensor a shape."""
        whole = self._graph.tensors[value.tensor]
        shape = whole.shape
        if self._machine is not None:
            shape = self._program.local_shape(self._graph, value, self._shares, self._machine)
        name = value.tensor if value.placement == R else f"{value.tensor}~{value.placement}"
        if value in self._names:
            name = self._names[value] + AGAIN
        self._names[value] = name
        self._tensors[name] = replace(whole, name=name, shape=shape)
        return name

    def _sizes(self, value: Value) -> tuple[int, ...]:
        return self._program.sizes(self._graph, value, self._shares)

    def _compute(self, step: Compute) -> Node:
        node = self._graph.by_name[step.node]
        placed = iter(step.ins)
        args, kwargs = substitute(
            (node.args, node.kwargs), lambda ref: Ref(self._names[Value(ref.name, next(placed))])
        )
        outputs = tuple(
            self._made(Value(o, p)) if o is not None and p is not None else None
            for o, p in zip(node.outputs, step.outs, strict=True)
        )
        return replace(node, args=args, kwargs=kwargs, outputs=outputs)

    def _convert(self, step: Convert) -> Node:
        src, dst = Value(step.tensor, step.src), Value(step.tensor, step.dst)
        given = Ref(self._names[src])
        how = step.implementation
        match step.kind:
            case "all_gather":
                args: tuple[Arg, ...] = (given, src.placement.dim, self._sizes(src), how)
            case "reduce_scatter":
                args = (given, dst.placement.dim, self._sizes(dst), how)
            case "slice":
                args = (given, dst.placement.dim, self._sizes(dst))
            case "all_to_all":
                dims = (src.placement.dim, dst.placement.dim)
                args = (given, *dims, self._sizes(src), self._sizes(dst), how)
            case "mask":
                args = (given,)
            case _:  # a reduction, which keeps the shape
                args = (given, how)
        made = self._made(dst)
        return Node(
            name=f"{step.kind}_{made}_of_{given.name}", op=BETWEEN + step.kind, args=args,
            outputs=(made,), module=_module(self._graph, step.tensor),
        )  # fmt: skip


def _module(graph: Graph, tensor: str) -> str:
    producer = graph.producer.get(tensor)
    return producer.module if producer else ""


def is_mesh_op(op: str) -> bool:
    """Return whether an operator represents a conversion between machines."""
    return op.startswith(BETWEEN)


def step_ends(graph: Graph) -> frozenset[str]:
    """Return parameters and gradients, including their values before and after conversions.

    They are converted at the two ends of a step, many at a time.
    """
    found = {i.tensor for i in graph.role("parameter")} | set(graph.gradients.values())
    passing = [n for n in graph.nodes if is_mesh_op(n.op)]
    for nodes in (passing, passing[::-1]):
        for node in nodes:
            both = {node.inputs[0], str(node.outputs[0])}
            if found & both:
                found |= both
    return frozenset(found)
