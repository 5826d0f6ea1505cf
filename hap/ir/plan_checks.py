"""Checks of a plan that was read from a file: its programs fit its graph, its shares their axes."""

from __future__ import annotations

from collections.abc import Mapping

from hap.cluster.link import IMPLEMENTATIONS
from hap.cluster.topology import Cluster
from hap.cluster.work import PRECISIONS
from hap.errors import PlanError
from hap.ir.axes import Shares
from hap.ir.batch import WHOLE, Form
from hap.ir.graph import Graph
from hap.ir.half_gradients import ROUNDINGS
from hap.ir.mesh import Inside, divide
from hap.ir.microbatch_sizes import even_parts, sized_stages
from hap.ir.placement import conversion
from hap.ir.plain_data import read_list, read_map
from hap.ir.program import Convert, Program
from hap.ir.stages import PipelineStages


def check_programs(
    graph: Graph, program: Program, shares: Shares, inside: Inside | None, stages: PipelineStages | None,
    cluster: Cluster,
) -> None:  # fmt: skip
    """Raise ``ValueError`` unless the ranks of a cluster could run the programs of a plan."""
    world, machines = cluster.world_size, len(cluster.nodes)
    if stages is not None:
        _check_stages(graph, program, shares, stages)
        return
    if inside is None:
        _check_program(graph, program, shares, world)
        return
    _check_program(graph, program, shares, machines)
    inner = divide(graph, program, shares)
    _check_program(inner, inside.program, inside.shares, world, machines)


def _check_stages(graph: Graph, program: Program, shares: Shares, stages: PipelineStages) -> None:
    parts = {len(given) for given in shares.values()}
    if len(parts) != 1:
        raise ValueError(f"a plan with stages has one number of microbatches, not {sorted(parts)}")
    _check_program(graph, program, shares, *parts)
    if any(given != even_parts(sum(given), *parts) for given in shares.values()):
        raise ValueError("the microbatches are not equally large, or smaller ones come first")
    if len(stages.cuts) + 1 != len(stages.stages):
        raise ValueError(f"{len(stages.cuts)} cuts, but {len(stages.stages)} stages")
    ahead = [stage.in_flight for stage in stages.stages]
    if ahead != sorted(ahead, reverse=True):
        raise ValueError(f"with {ahead} microbatches in flight, the stages wait for each other")
    for number, stage in enumerate(stages.stages):
        if stage.delay < 0:
            raise ValueError(f"stage {number} delays gradients of weights by {stage.delay}")
        if not stage.ranks or stage.in_flight < 1:
            raise ValueError(f"stage {number} has no ranks, or no microbatch in flight")
    sized = sized_stages(graph, program, shares, stages)
    for part, stage in (pair for each in sized.values() for pair in zip(*each, strict=True)):
        _check_program(part, stage.program, stage.shares, len(stage.ranks))


def _check_program(
    graph: Graph, program: Program, shares: Shares, ranks: int, machines: int = 1
) -> None:
    """Raise ``ValueError`` for instructions that can't run and for shares that don't fit.

    Args:
        ranks: entries of every vector of shares.
        machines: each of them has shares that sum to the units, or none of the axis.
    """
    for number, step in enumerate(program.instructions):
        where = f"instruction {number}"
        if not isinstance(step.backward, bool):
            raise ValueError(f"{where} is of the part {step.backward!r}")
        if isinstance(step, Convert):
            kind = conversion(step.src, step.dst)
            if kind is None:
                raise ValueError(f"{where} converts {step.src} to {step.dst}, which nothing does")
            known = IMPLEMENTATIONS.get(kind, ("",))
            if step.implementation not in known:
                raise ValueError(f"{where} runs {kind} by {step.implementation!r}, not by {known}")
            if not _whole(step.bucket):
                raise ValueError(f"{where} is in the bucket {step.bucket!r}")
    program.check(graph)
    if graph.whole_parameters:
        trained = [i for i in graph.role("parameter") if i.target in graph.gradients]
        if cut := [i.target for i in trained if program.inputs[i.tensor].sharded]:
            raise ValueError(f"{cut[0]} is stored in shards, but the optimizer reads it whole")
    axes = program.used_axes()
    if shares.keys() != axes.keys():
        raise ValueError(f"shares of {sorted(shares)}, but the program uses {sorted(axes)}")
    for name, units in axes.items():
        _check_units(name, shares, units, ranks, machines)
    for dim, (name, units) in program.axes.items():
        tensor, _, place = dim.rpartition(":")
        shape = graph.tensors[tensor].shape
        if units < 1 or shape[int(place)] % units:
            raise ValueError(f"{dim} of {shape} can't be cut into the {units} units of {name}")


def _check_units(
    name: str, shares: Mapping[str, tuple[int, ...]], units: int, ranks: int, machines: int
) -> None:
    given = shares[name]
    if len(given) != ranks or not all(map(_whole, given)):
        raise ValueError(f"the shares of {name} are {given!r}, not {ranks} whole numbers")
    if machines == 1 and sum(given) != units:
        raise ValueError(f"the shares of {name} sum to {sum(given)}, not to {units}")


def _whole(value: object) -> bool:
    """Is this a whole number, 0 or more?"""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_form(form: Form, graph: Graph) -> None:
    """Raise ``ValueError`` unless a batch of this form can be built of the graph's inputs."""
    known = {i.target for i in graph.role("input")}

    def check(part: object) -> None:
        ((kind, content),) = read_map(part, "the batch").items()
        if kind == "tensor" and content not in known:
            raise ValueError(f"the batch has the tensor {content!r}, the graph has not")
        if kind == "dict":
            content = [*read_map(content, "the batch").values()]
        if kind in ("dict", "tuple", "list"):
            for entry in read_list(content, "the batch"):
                check(entry)
        elif kind == "fixed":
            _check_fixed(read_map(content, "a fixed tensor of the batch"))
        elif kind not in ("tensor", "value"):
            raise ValueError(f"the batch has a part of the kind {kind!r}")

    if form is not None:  # as in plans of older versions
        check(form)


def _check_fixed(content: Mapping[str, object]) -> None:
    """Raise ``ValueError`` unless a fixed tensor is a rectangle of whole numbers."""
    if content.keys() != {"dtype", "numbers"} or content["dtype"] not in [*WHOLE]:
        raise ValueError(f"the batch has a fixed tensor of {content!r:.60}")
    level = [content["numbers"]]
    while level and isinstance(level[0], list):
        if len({len(read_list(row, "a fixed tensor of the batch")) for row in level}) > 1:
            raise ValueError("the batch has a fixed tensor whose rows differ in length")
        level = [entry for row in level for entry in row]  # type: ignore[attr-defined]
    least, most = WHOLE[content["dtype"]]
    if not all(type(number) is type(least) and least <= number <= most for number in level):
        raise ValueError(f"the batch has a fixed tensor of {content['dtype']} with other entries")


def check_recipe_names(precision: object, rounding: object) -> None:
    """Raise ``PlanError`` unless the names in a plan's recipe are empty or known."""
    for field, name, known in (
        ("float32_matmul_precision", precision, PRECISIONS), ("gradients", rounding, ROUNDINGS),
    ):  # fmt: skip
        if name and name not in known:
            raise PlanError(
                f"the plan's {field} is {name!r}",
                hint=f"use one of {', '.join(known)}, or plan anew",
            )
