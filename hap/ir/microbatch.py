"""Microbatches: the parts of a step's batch, which the same devices run one after the other.

A microbatch is a split of the batch over *time*: place ``k`` of a mesh axis over time runs part
``k``. So the rule table proves that a step may be run in parts, as it proves that devices may share
it, and :func:`hap.ir.mesh.divide` returns the step of one part. In that graph a ``mesh.all_reduce``
is a sum over the parts. :func:`phases` assigns each node to the phase of the step that runs it.

An input that is replicated over time is whole, and there before the parts. So a part of the model that
can't be split along with the rest, such as the images of a text, runs once before the microbatches, and its
backward once after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from hap.errors import PlanError
from hap.ir.graph import Graph, Input, Node
from hap.ir.mesh import is_mesh_op, origin
from hap.ir.placement import LOCAL, P, R
from hap.ir.program import BETWEEN


class Phase(IntEnum):
    """A phase of a step, in order of time.

    ``ONCE``: of parameters and whole inputs, before all parts. ``COUNT``: of each part's inputs alone, before
    the parts. ``COUNTED``: of the sums of ``COUNT``. ``PART``: of each part. ``END``: of the sums over
    the parts, after all of them.
    """

    ONCE = 0
    COUNT = 1
    COUNTED = 2
    PART = 3
    END = 4


EACH, BEFORE, SUMMED = "each part", "before all parts", "summed over all parts"
"""Arrivals of a tensor from another stage: the targets of inputs of the role ``received``."""


def is_sum(node: Node) -> bool:
    """Return whether a node of a divided graph sums over the parts."""
    return node.op == f"{BETWEEN}all_reduce"


def phases(graph: Graph) -> Mapping[str, Phase]:
    """Return the phase of each node of a step that was divided over time.

    A sum has the phase in which its result is ready.

    Raises:
        PlanError: the step can't be run in parts; the message names the operator.
    """
    if "phases" not in graph.memo:
        graph.memo["phases"] = _phases(graph)
    found: Mapping[str, Phase] = graph.memo["phases"]
    return found


def _phases(graph: Graph) -> Mapping[str, Phase]:
    early = _counts(graph)
    before = _ancestors(graph, early)
    phase_of: dict[str, Phase] = {  # of each tensor
        i.tensor: _phase_of_input(i) for i in graph.inputs
    }
    found: dict[str, Phase] = {}
    for node in graph.nodes:
        if is_mesh_op(node.op) and not is_sum(node):
            kind = node.op.removeprefix(BETWEEN)
            if kind not in LOCAL:
                raise PlanError(
                    f"{node.inputs[0]} is needed whole in the middle of the step ({kind})",
                    where=node.module, hint="plan without --stages",
                )  # fmt: skip
        if is_sum(node):
            phase = Phase.COUNTED if node.name in early else Phase.END
        else:
            phase = _phase(graph, node, {phase_of[name] for name in node.inputs})
            if phase is Phase.PART and node.name in before:
                phase = Phase.COUNT
        if phase is Phase.END and not is_sum(node):
            _check_end(graph, node, phase_of)
        found[node.name] = phase
        phase_of.update((o, phase) for o in node.outputs if o)
    return found | dict.fromkeys(_of_end_alone(graph, found), Phase.END)


def _of_end_alone(graph: Graph, found: Mapping[str, Phase]) -> frozenset[str]:
    """Return the nodes of the backward that read nothing of the parts, and that nodes of the end alone read."""
    once = {i.tensor for i in graph.inputs if _phase_of_input(i) is Phase.ONCE}
    for node in graph.nodes:
        if (found[node.name] is Phase.ONCE or node.name in graph.backward) and not _of_each(node):
            once.update(o for o in node.outputs if o and once.issuperset(node.inputs))
    leaving = {o.tensor for o in graph.outputs}
    names = set[str]()
    for node in reversed(graph.nodes):
        if node.name in graph.backward and once.issuperset(o for o in node.outputs if o):
            readers = [n.name for o in node.outputs if o for n in graph.consumers[o]]
            ends = all(name in names or found[name] is Phase.END for name in readers)
            if readers and ends and leaving.isdisjoint(o for o in node.outputs if o):
                names.add(node.name)
    return frozenset(names)


def is_of_each(i: Input) -> bool:
    """Return whether each microbatch has its own part of an input; a tangent belongs to each."""
    return i.role == "tangent" or (i.role == "input" and origin(i.tensor).placement.sharded)


def _phase_of_input(i: Input) -> Phase:
    """Return the phase in which an input is there."""
    if i.role == "received":
        return {EACH: Phase.PART, BEFORE: Phase.ONCE, SUMMED: Phase.END}[i.target]
    return Phase.PART if is_of_each(i) else Phase.ONCE


def _phase(graph: Graph, node: Node, read: set[Phase]) -> Phase:
    """Return the phase of a node that reads values of the phases ``read``."""
    if Phase.END in read:
        return Phase.END
    # A value that each part uses in the backward is made there, so that it takes no memory before.
    if _of_each(node) or node.name in graph.backward or read & {Phase.COUNT, Phase.PART}:
        return Phase.PART
    return max(read, default=Phase.ONCE)


def _of_each(node: Node) -> bool:
    """Return whether a node makes a value of one microbatch, whatever it reads.

    An expanded parameter has one row for each row of the microbatch, so it belongs to the microbatch.
    """
    return is_mesh_op(node.op) or any(origin(o).placement.sharded for o in node.outputs if o)


def _check_end(graph: Graph, node: Node, phase_of: Mapping[str, Phase]) -> None:
    """Raise ``PlanError`` if a node after the sums needs values of single parts.

    By the rule table, a node that makes terms of terms is linear in them: of sums it makes the sum.
    """
    linear = all(origin(o).placement == P for o in node.outputs if o)
    for name in node.inputs:
        placement = origin(name).placement
        single = phase_of[name] in (Phase.PART, Phase.COUNT) and placement != R
        if single and not (linear and placement == P):
            raise PlanError(
                f"{node.name} needs {name} of each part, and a sum over the whole batch",
                where=node.source or node.module, hint="plan without --stages",
            )  # fmt: skip


def _counts(graph: Graph) -> frozenset[str]:
    """Return the sums that depend on the batch alone, such as a count of labels."""
    role = {i.tensor: i.role for i in graph.inputs}
    of_batch = {name for name, r in role.items() if r in ("input", "constant", "buffer")}
    found = set()
    for node in graph.nodes:
        if of_batch.issuperset(node.inputs):
            of_batch.update(o for o in node.outputs if o)
            if is_sum(node):
                found.add(node.name)
    return frozenset(found)


def _ancestors(graph: Graph, names: frozenset[str]) -> frozenset[str]:
    """Return the nodes on which the named nodes depend."""
    wanted = {name for n in names for name in graph.by_name[n].inputs}
    found = set()
    for node in reversed(graph.nodes):
        if wanted.intersection(o for o in node.outputs if o):
            found.add(node.name)
            wanted.update(node.inputs)
    return frozenset(found - names)
