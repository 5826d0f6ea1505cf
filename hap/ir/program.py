"""The distributed program: one list of instructions that all ranks run.

A *value* is a tensor in one placement, written ``name@S0``; a tensor may exist in several
placements at once. :class:`Compute` runs an operator on local values, :class:`Convert`
turns one placement into another, by a collective or by a local slice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from hap.ir.axes import Axes, Axis, Shares, shard_sizes
from hap.ir.graph import FREE, LATE, Graph
from hap.ir.placement import LOCAL, Placement, R, conversion
from hap.ir.plain_data import read_count, read_list, read_map, read_text


class Value(NamedTuple):
    """A tensor of the graph in one placement."""

    tensor: str
    placement: Placement

    def __str__(self) -> str:
        return f"{self.tensor}@{self.placement}"

    @staticmethod
    def parse(text: str) -> Value:
        tensor, _, placement = text.rpartition("@")
        return Value(tensor, Placement.parse(placement))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run one node of the graph on this rank's values."""

    node: str
    ins: tuple[Placement, ...]
    outs: tuple[Placement | None, ...]
    backward: bool

    def reads(self, graph: Graph) -> list[Value]:
        """The values that it reads, in the order of the node's inputs."""
        return list(map(Value, graph.by_name[self.node].inputs, self.ins))

    def writes(self, graph: Graph) -> list[Value]:
        """The values that it makes."""
        outputs = graph.by_name[self.node].outputs
        return [Value(o, p) for o, p in zip(outputs, self.outs, strict=True) if o and p]

    def aliases(self, graph: Graph) -> bool:
        """Return whether its results share the storage of its first input."""
        return graph.by_name[self.node].op in FREE


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """Turn ``tensor@src`` into ``tensor@dst``; ``implementation`` names one of several ways.

    A collective is issued at its place in the program; the first instruction that reads its
    result waits for it. Neighbours with the same ``bucket`` run as one.
    """

    tensor: str
    src: Placement
    dst: Placement
    implementation: str
    backward: bool
    bucket: int = 0

    @property
    def kind(self) -> str:
        kind = conversion(self.src, self.dst)
        assert kind is not None
        return kind

    @property
    def local(self) -> bool:
        return self.kind in LOCAL

    def reads(self, graph: Graph) -> list[Value]:
        """The value that it converts."""
        return [Value(self.tensor, self.src)]

    def writes(self, graph: Graph) -> list[Value]:
        """The value that it makes."""
        return [Value(self.tensor, self.dst)]

    def aliases(self, graph: Graph) -> bool:
        """Return whether its result shares the storage of its input."""
        return self.kind == "slice"


Instruction = Compute | Convert


def reads(graph: Graph, group: Iterable[Instruction]) -> list[Value]:
    """Return the values that a group of instructions reads."""
    return [value for step in group for value in step.reads(graph)]


def writes(graph: Graph, group: Iterable[Instruction]) -> list[Value]:
    """Return the values that a group of instructions makes."""
    return [value for step in group for value in step.writes(graph)]


FUSIBLE = frozenset({"all_gather", "reduce_scatter", "all_reduce", "all_reduce_lse"})
"""Collectives that can run on several tensors as on one long tensor."""

BETWEEN = "mesh."
"""Prefix of the operators that represent collectives between machines; see :mod:`hap.ir.mesh`."""


Bounds = tuple[tuple[int, int], ...]
"""(start, stop) of each group of neighbouring instructions."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Instructions in the order in which every rank runs them.

    ``inputs`` holds the placement in which each input of the graph is given (for a parameter,
    the placement in which it is stored); ``outputs`` likewise, in the order of the graph's
    outputs. ``axes`` maps ``tensor:dim`` of every sharded value to (axis, units).
    """

    inputs: Mapping[str, Placement]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Placement, ...]
    axes: Mapping[str, tuple[str, int]]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived from the program when it is sent to another process."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def axis(self, tensor: str, dim: int) -> tuple[str, int]:
        return self.axes[f"{tensor}:{dim}"]

    def sizes(self, graph: Graph, value: Value, shares: Shares) -> tuple[int, ...]:
        """Return the elements along the sharded dim of ``value``, one entry per rank."""
        name, units = self.axis(value.tensor, value.placement.dim)
        size = graph.tensors[value.tensor].shape[value.placement.dim]
        return shard_sizes(size, units, shares[name])

    def local_shape(self, graph: Graph, value: Value, shares: Shares, rank: int) -> tuple[int, ...]:
        shape = graph.tensors[value.tensor].shape
        if not value.placement.sharded:
            return shape
        d = value.placement.dim
        return (*shape[:d], self.sizes(graph, value, shares)[rank], *shape[d + 1 :])

    @cached_property
    def collectives(self) -> tuple[Convert, ...]:
        return tuple(i for i in self.instructions if isinstance(i, Convert) and not i.local)

    @cached_property
    def memo(self) -> dict[str, Any]:
        """Cache of values derived from this program, which never changes."""
        return {}

    def groups(self, graph: Graph) -> Iterator[tuple[Instruction, ...]]:
        """Yield the instructions in order; fused collectives form one group.

        Fusion needs the same kind and bucket, and saves starts. The program alone decides it, so
        that all ranks fuse alike.
        """
        for first, end in self.bounds(graph):
            yield self.instructions[first:end]

    def bounds(self, graph: Graph, *, named: bool = True) -> Bounds:
        """Return (start, stop) of each group.

        ``named``: do not fuse different implementations; otherwise these are not chosen yet.
        """

        def key(step: Instruction) -> object:
            if isinstance(step, Compute):
                node = graph.by_name[step.node]
                if node.op.removeprefix(BETWEEN) not in FUSIBLE:
                    return object()  # alone
                dtype = graph.tensors[node.inputs[0]].dtype
                return node.op, node.args[-1], step.backward, dtype
            if step.kind not in FUSIBLE:
                return object()
            dtype = graph.tensors[step.tensor].dtype
            how = step.implementation if named else ""
            return step.kind, how, step.backward, dtype, step.bucket

        lengths = [len(list(group)) for _, group in itertools.groupby(self.instructions, key)]
        ends = list(itertools.accumulate(lengths))
        return tuple(zip([0, *ends], ends, strict=False))

    def own_axes(self) -> Axes:
        """The axes of all sharded values, as the program cuts them."""
        of = {}
        for place, (axis, _) in self.axes.items():
            tensor, _, dim = place.rpartition(":")
            of[tensor, int(dim)] = axis
        named = {name: Axis(name=name, units=units) for name, units in self.used_axes().items()}
        return Axes(axes=named, of=of)

    def used_axes(self) -> dict[str, int]:
        """Axis -> units, for the axes on which some value is sharded."""
        return dict(self.axes.values())

    def check(self, graph: Graph) -> None:
        """Raise ``ValueError`` unless every value exists when it is used."""
        held = {Value(tensor, p) for tensor, p in self.inputs.items()}

        def need(value: Value, user: str) -> None:
            if value not in held:
                raise ValueError(f"{user} uses {value}, which does not exist yet")
            if value.placement.sharded and f"{value.tensor}:{value.placement.dim}" not in self.axes:
                raise ValueError(f"{value} is sharded on no axis")

        done, made_late = set(), set()
        for step in self.instructions:
            if isinstance(step, Compute):
                node = graph.by_name[step.node]
                done.add(step.node)
                if (len(step.ins), len(step.outs)) != (len(node.inputs), len(node.outputs)):
                    raise ValueError(f"{step.node} has other inputs or outputs")
            for value in step.reads(graph):
                need(value, step.kind if isinstance(step, Convert) else step.node)
                if value in made_late and not step.backward:
                    raise ValueError(f"the forward uses {value}, which the backward makes")
            held.update(step.writes(graph))
            if step.backward:
                made_late.update(step.writes(graph))
        if missing := graph.by_name.keys() - done:
            raise ValueError(f"the program never computes {sorted(missing)}")
        for output, p in zip(graph.outputs, self.outputs, strict=True):
            need(Value(output.tensor, p), f"the output {output.target}")
        for output, p in zip(graph.outputs, self.outputs, strict=True):
            if output.role == "loss" and p != R:
                raise ValueError("the loss must end replicated")
            if output.role not in LATE and Value(output.tensor, p) in made_late:
                raise ValueError(f"the forward returns {output.tensor}, which the backward makes")

    def lines(self, graph: Graph) -> Iterator[str]:
        for i in graph.inputs:
            yield f"{i.role:<10} {Value(i.tensor, self.inputs[i.tensor])} = {i.target}"
        for step in self.instructions:
            side = "bwd" if step.backward else "fwd"
            ins, outs = (", ".join(map(str, v)) for v in (step.reads(graph), step.writes(graph)))
            if isinstance(step, Convert):
                how = f" by {step.implementation}" if step.implementation else ""
                yield f"{side}  {outs} = {step.kind}({ins}){how}"
            else:
                yield f"{side}  {outs} = {graph.by_name[step.node].op}({ins})"
        for output, p in zip(graph.outputs, self.outputs, strict=True):
            yield f"return     {output.role} {output.target} = {Value(output.tensor, p)}"

    @cached_property
    def schedule_digest(self) -> str:
        """SHA-256 of the collectives in order, which ranks compare before they start."""
        text = json.dumps([_pack(c) for c in self.collectives], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": {k: str(p) for k, p in self.inputs.items()},
            "instructions": [_pack(i) for i in self.instructions],
            "outputs": [str(p) for p in self.outputs],
            "axes": {k: list(v) for k, v in self.axes.items()},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Program:
        def placed(value: Any, where: str) -> Placement:
            return Placement.parse(read_text(value, where))

        fields = read_map(data, "a program")
        axes = {}
        for dim, entry in read_map(fields["axes"], "the program's axes").items():
            name, units = read_list(entry, f"the axis of {dim}", 2)
            axes[dim] = (
                read_text(name, f"the axis of {dim}"),
                read_count(units, f"the axis of {dim}"),
            )
        given = read_map(fields["inputs"], "the program's inputs")
        return Program(
            inputs={k: placed(p, f"the input {k}") for k, p in given.items()},
            instructions=tuple(
                _unpack(read_list(i, f"instruction {k}"))
                for k, i in enumerate(read_list(fields["instructions"], "the program"))
            ),
            outputs=tuple(
                placed(p, "an output")
                for p in read_list(fields["outputs"], "the program's outputs")
            ),
            axes=axes,
        )


def _pack(step: Instruction) -> list[Any]:
    if isinstance(step, Convert):
        sides = [str(step.src), str(step.dst)]
        return ["convert", step.tensor, *sides, step.implementation, step.backward, step.bucket]
    outs = [None if p is None else str(p) for p in step.outs]
    return ["compute", step.node, [str(p) for p in step.ins], outs, step.backward]


def _unpack(data: list[Any]) -> Instruction:
    match data:
        case ["convert", tensor, src, dst, implementation, backward, *bucket]:
            return Convert(
                tensor=tensor, src=Placement.parse(src), dst=Placement.parse(dst),
                implementation=implementation, backward=backward, bucket=(*bucket, 0)[0],
            )  # fmt: skip
        case ["compute", node, ins, outs, backward]:
            return Compute(
                node=node, ins=tuple(Placement.parse(p) for p in ins), backward=backward,
                outs=tuple(None if p is None else Placement.parse(p) for p in outs),
            )  # fmt: skip
    raise ValueError(f"not an instruction: {data!r}")
