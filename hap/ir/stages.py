"""Pipeline stages: the step of a microbatch, cut at operators, each part on a group of ranks.

:func:`cut_stages` returns a graph per stage. Tensors that cross between stages keep their names: they
are inputs of the role ``received`` in one graph, and outputs in another, of the role ``sent`` (by
the forward) or ``returned`` (by the backward). A backward operator belongs to a stage that holds
what it saved; operators without parameters are repeated in each stage that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hap.errors import PlanError
from hap.ir.axes import Shares
from hap.ir.graph import Graph, Input, Node, Output
from hap.ir.mesh import origin
from hap.ir.microbatch import BEFORE, EACH, SUMMED, Phase, is_sum, phases
from hap.ir.placement import P
from hap.ir.program import Program
from hap.ir.widening import widened_later


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a plan: its ranks, and the program that they run over its graph.

    ``shares`` has an entry per rank of the stage; ``in_flight`` is the largest number of microbatches
    whose activations it holds. ``delay`` is that of its gradients of weights: see
    :func:`hap.ir.pipeline_order.turns`. With ``recompute`` it keeps no results of a forward, and runs the
    forward of a microbatch again before its backward. With ``gather_each`` it runs
    :func:`hap.ir.weight_gathers.forward_gathers` in each microbatch, otherwise once per step.
    """

    ranks: tuple[int, ...]
    program: Program
    shares: Shares
    in_flight: int
    delay: int = 0
    recompute: bool = False
    gather_each: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """Stages of a plan. ``cuts`` names the last operator of each stage but the last."""

    cuts: tuple[str, ...]
    stages: tuple[Stage, ...]

    def place(self, rank: int) -> tuple[int, int]:
        """Return (stage, place in it) of a rank."""
        for number, stage in enumerate(self.stages):
            if rank in stage.ranks:
                return number, stage.ranks.index(rank)
        raise ValueError(f"rank {rank} belongs to no stage")


def check_one_program(stages: PipelineStages | None) -> None:
    """Raise ``PlanError`` for a plan with stages, whose ranks run different programs."""
    if stages is not None:
        raise PlanError(
            "the plan has pipeline stages, each with a program of its own",
            hint="hap show lists them; this command needs a plan without stages",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A tensor that goes from one stage to another, of the forward or of the backward.

    ``once``: it crosses once per step: a value of parameters alone before the microbatches, or the sum
    of a parameter's gradient over all of them.
    """

    tensor: str
    src: int
    dst: int
    backward: bool
    once: bool = False


def cut_stages(graph: Graph, cuts: Sequence[str]) -> tuple[tuple[Graph, ...], tuple[Transfer, ...]]:
    """Return the graph of each stage, and the transfers between them in the order of the graph.

    Args:
        graph: the step of a microbatch.
        cuts: the last forward operator of each stage but the last, in order.

    Raises:
        PlanError: no operator has a name of ``cuts``, or the step can't be run in microbatches.
    """
    cutter = _Cutter(graph, cuts)
    return cutter.graphs(), cutter.transfers


def stage_ranges(graph: Graph, cuts: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Return the stages to which each operator may belong under some of the cuts: (first, last).

    Stages are those of all cuts; with fewer cuts, an operator is in a stage that covers a part of its
    range. Operators that may go anywhere, such as sums of gradients, have no entry.
    """
    return _Cutter(graph, cuts).ranges()


class _Cutter:
    def __init__(self, graph: Graph, cuts: Sequence[str]) -> None:
        self._graph, self._count = graph, len(cuts) + 1
        forward = [n.name for n in graph.nodes if n.name not in graph.backward]
        if unknown := [name for name in cuts if name not in forward]:
            raise PlanError(f"no forward operator is called {unknown[0]}", hint="plan anew")
        ends = [forward.index(name) for name in cuts]
        if ends != sorted(set(ends)):
            raise PlanError("the stages' cuts are not in the model's order", hint="plan anew")
        self._phases, self._anywhere = phases(graph), repeatable(graph)
        self._stage = {  # of each node that has one
            name: sum(end < k for end in ends)
            for k, name in enumerate(forward) if name not in self._anywhere
        }  # fmt: skip
        self._parameters = self._owners()
        self._stage |= self._with_owners()
        self._held = self._holders()
        self._assign_backward()

    def _owners(self) -> dict[str, int]:
        """Return the stage that stores each parameter: the first one that reads it."""
        found = {}
        for i in self._graph.role("parameter"):
            readers = {
                self._stage[n.name] for n in self._graph.consumers[i.tensor]
                if n.name in self._stage
            }  # fmt: skip
            found[i.tensor] = min(readers, default=self._count - 1)
        return found

    def _with_owners(self) -> dict[str, int]:
        """Return the stages of operators that make something smaller of a parameter alone: its owner's.

        Such are casts of autocast. So what crosses is smaller.
        """
        tensors = self._graph.tensors
        return {
            n.name: self._parameters[n.inputs[0]] for n in self._graph.nodes
            if n.name in self._stage and len(n.inputs) == 1 and n.inputs[0] in self._parameters
            and self._phases[n.name] is Phase.ONCE
            and sum(tensors[o].nbytes for o in n.outputs if o) < tensors[n.inputs[0]].nbytes
        }  # fmt: skip

    def _holders(self) -> dict[str, set[int]]:
        """Return the stages in which each tensor of the forward exists."""
        every = set(range(self._count))
        held: dict[str, set[int]] = {}
        for i in self._graph.inputs:
            held[i.tensor] = {self._parameters[i.tensor]} if i.role == "parameter" else set(every)
            if i.role == "tangent":
                held[i.tensor] = {self._count - 1}
        for node in self._graph.nodes:
            if node.name in self._graph.backward:
                continue
            at = set(every) if node.name in self._anywhere else {self._stage[node.name]}
            held.update((o, set(at)) for o in node.outputs if o)
            if node.name in self._stage:
                for name in node.inputs:
                    held[name].add(self._stage[node.name])
        return held

    def _assign_backward(self) -> None:
        graph, latest = self._graph, dict[str, int]()
        nodes = [n for n in graph.nodes if n.name in graph.backward]
        possible: dict[str, list[int]] = {}
        made: dict[str, int] = {}
        for node in nodes:
            top = min((made[x] for x in node.inputs if x in made), default=self._count - 1)
            saved = [self._held[x] for x in node.inputs if x in self._held]
            fitting = [s for s in range(top, -1, -1) if all(s in at for at in saved)]
            latest[node.name] = fitting[0] if fitting else top
            possible[node.name] = fitting
            made.update((o, latest[node.name]) for o in node.outputs if o)
        self._latest = latest
        owner = {i.target: self._parameters[i.tensor] for i in graph.role("parameter")}
        widening = self._widening(nodes)
        wanted: dict[str, list[int]] = {}
        for o in graph.outputs:
            if o.role == "gradient":
                wanted.setdefault(o.tensor, []).append(owner[o.target])
        for node in reversed(nodes):
            stage = latest[node.name]
            uses = [s for out in node.outputs if out for s in wanted.get(out, ())]
            # Near its readers, but a sum of several gradients crosses as one tensor.
            gradients = [x for x in node.inputs if x in made]
            if node.name in widening:
                for name in node.inputs:
                    wanted.setdefault(name, []).extend(uses)
                continue
            if uses and len(gradients) == 1 and not self._shrinks(node, gradients[0]):
                near = min(stage, max(uses))
                stage = near if near in possible[node.name] else stage
            self._stage[node.name] = stage
            for name in node.inputs:
                wanted.setdefault(name, []).append(stage)
        for node in (n for n in nodes if n.name in widening):
            self._stage[node.name] = self._stage[graph.producer[node.inputs[0]].name]

    def _shrinks(self, node: Node, gradient: str) -> bool:
        """Whether an operator, the only reader of a gradient, makes something smaller of it.

        Both are sharded over the microbatches, so that the answer is the same for any size of them.
        """
        made = [o for o in node.outputs if o]
        small = sum(self._graph.tensors[o].nbytes for o in made)
        return (
            len(self._graph.consumers[gradient]) == 1
            and all(origin(name).placement.sharded for name in (gradient, *made))
            and small < self._graph.tensors[gradient].nbytes
        )

    def _widening(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Return casts of terms of a parameter's gradient to a wider dtype, and views before them.

        They stay where the term is made, whose sum over the microbatches is then of the wider dtype.
        """
        graph, narrow = self._graph, widened_later(self._graph)
        return frozenset(
            n.name for n in nodes
            if n.inputs and narrow.issuperset(n.inputs) and graph.producer[n.inputs[0]].name in graph.backward
            and all(origin(x).placement == P for x in (*n.inputs, *n.outputs) if x)
        )  # fmt: skip

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Return what :func:`stage_ranges` does.

        A backward operator is in a stage that holds all that it saved. Behind one that no stage can
        serve, nothing is certain.
        """
        graph, held, owner = self._graph, self._held, self._parameters
        named = {i.target: owner[i.tensor] for i in graph.role("parameter")}
        wanted = {o.tensor: named[o.target] for o in graph.outputs if o.role == "gradient"}
        found, doubtful = dict[str, tuple[int, int]](), set[str]()
        highest: dict[str, int] = {}  # of each tensor that the backward makes
        for node in graph.nodes:
            stage = self._stage.get(node.name)
            if node.name not in graph.backward:
                if stage is not None:
                    found[node.name] = stage, stage
                continue
            saved = [held[x] for x in node.inputs if x in held]
            made = [highest[x] for x in node.inputs if x in highest]
            no_stage = bool(saved) and not set.intersection(*saved)
            if no_stage or doubtful.intersection(node.inputs):
                doubtful.update(o for o in node.outputs if o)
                continue
            top = min([*map(max, saved), *made], default=self._count - 1)
            highest.update((o, top) for o in node.outputs if o)
            if len(made) != 1:  # it stays where its inputs come together
                found[node.name] = self._latest[node.name], top
            elif saved:
                found[node.name] = max(map(min, saved)), top
            elif is_sum(node):
                makers = {graph.producer[x].name for x in node.inputs if x in graph.producer}
                ends = {found.get(name) for name in makers}
                ends |= {(wanted[o],) * 2 for o in node.outputs if o in wanted}
                if stage is not None and ends == {(stage, stage)}:
                    found[node.name] = stage, stage
        return found

    @cached_property
    def _members(self) -> list[list[Node]]:
        """The nodes of each stage, with the repeated ones that it needs."""
        graph, found = self._graph, []
        loss = {o.tensor for o in graph.outputs if o.role != "gradient"}
        for stage in range(self._count):
            needed = set(loss) if stage == self._count - 1 else set()
            kept = []
            for node in reversed(graph.nodes):
                if self._stage.get(node.name) == stage or (
                    node.name in self._anywhere
                    and needed.intersection(o for o in node.outputs if o)
                ):
                    kept.append(node)
                    needed.update(node.inputs)
            found.append(kept[::-1])
        return found

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The tensors that cross, each from the stage that makes it."""
        maker = dict(self._parameters)
        maker |= {
            o: self._stage[n.name]
            for n in self._graph.nodes
            if n.name in self._stage
            for o in n.outputs
            if o
        }
        owner = {i.target: self._parameters[i.tensor] for i in self._graph.role("parameter")}
        found = []
        for dst, nodes in enumerate(self._members):
            made = {o for n in nodes for o in n.outputs if o}
            read = dict.fromkeys(x for n in nodes for x in n.inputs)
            read.update(
                dict.fromkeys(
                    o.tensor for o in self._graph.outputs
                    if o.role == "gradient" and owner[o.target] == dst
                )
            )  # fmt: skip
            for name in read:
                if name in maker and name not in made and maker[name] != dst:
                    back = maker[name] > dst
                    found.append(
                        Transfer(
                            tensor=name, src=maker[name], dst=dst, backward=back,
                            once=self._once(name, back),
                        )
                    )  # fmt: skip
        order = {name: k for k, name in enumerate(self._graph.defined)}
        return tuple(sorted(found, key=lambda t: (t.backward, order[t.tensor], t.dst)))

    def _once(self, name: str, backward: bool) -> bool:
        """Return whether a tensor that crosses is the same for all microbatches, or a sum over them."""
        maker = self._graph.producer.get(name)
        phase = self._phases[maker.name] if maker else Phase.ONCE
        term = backward and origin(name).placement == P
        if not term and phase not in (Phase.ONCE, Phase.PART):
            raise PlanError(
                f"{name}, a sum over the microbatches, crosses between stages", hint="plan anew"
            )
        return term or (phase is Phase.ONCE and not backward)

    def graphs(self) -> tuple[Graph, ...]:
        return tuple(self._build(stage, nodes) for stage, nodes in enumerate(self._members))

    def _build(self, stage: int, nodes: list[Node]) -> Graph:
        graph = self._graph
        owner = {i.target: self._parameters[i.tensor] for i in graph.role("parameter")}
        outputs = [o for o in graph.outputs if self._leaves(o, stage, owner)]
        outputs += [
            Output(tensor=t.tensor, role="returned" if t.backward else "sent", target=str(t.dst))
            for t in self.transfers if t.src == stage
        ]  # fmt: skip
        received = [
            Input(tensor=t.tensor, role="received", target=arrival(t))
            for t in self.transfers if t.dst == stage
        ]  # fmt: skip
        used = {x for n in nodes for x in n.inputs} | {o.tensor for o in outputs}
        inputs = [
            i for i in graph.inputs
            if (self._parameters[i.tensor] == stage if i.role == "parameter" else i.tensor in used)
        ]  # fmt: skip
        inputs += received
        names = {i.tensor for i in inputs} | {o for n in nodes for o in n.outputs if o}
        built = Graph(
            inputs=tuple(inputs), nodes=tuple(nodes), outputs=tuple(outputs),
            tensors={name: t for name, t in graph.tensors.items() if name in names},
            rules=graph.rules, **graph.settings,
        )  # fmt: skip
        # The forward first: in the whole step, some of the backward's operators belong to the forward.
        return replace(built, nodes=tuple(sorted(nodes, key=lambda n: n.name in built.backward)))

    def _leaves(self, output: Output, stage: int, owner: Mapping[str, int]) -> bool:
        if output.role == "gradient":
            return owner[output.target] == stage
        return stage == self._count - 1


def arrival(transfer: Transfer) -> str:
    """Return how a received tensor arrives, the target of its input: see :mod:`hap.ir.microbatch`."""
    if not transfer.once:
        return EACH
    return SUMMED if transfer.backward else BEFORE


def repeatable(graph: Graph) -> frozenset[str]:
    """Return the forward operators that depend on no parameter: cheap, and repeated where needed."""
    free = {i.tensor for i in graph.inputs if i.role in ("input", "constant", "buffer")}
    found = set()
    for node in graph.nodes:
        if node.name not in graph.backward and free.issuperset(node.inputs):
            found.add(node.name)
            free.update(o for o in node.outputs if o)
    return frozenset(found)


def crossing(graph: Graph) -> dict[str, list[str]]:
    """Return, after each forward operator, the tensors that later forward operators read.

    Repeatable tensors do not count: a cut there sends the other ones. A parameter counts between its
    first reader and its last.
    """
    skip = repeatable(graph)
    forward = [n for n in graph.nodes if n.name not in graph.backward and n.name not in skip]
    made = {o: k for k, n in enumerate(forward) for o in n.outputs if o}
    for i in graph.role("parameter"):
        made[i.tensor] = next((k for k, n in enumerate(forward) if i.tensor in n.inputs), 0)
    last = {x: k for k, n in enumerate(forward) for x in n.inputs if x in made}
    phase_of = phases(graph)
    sums = [k for k, n in enumerate(forward) if phase_of[n.name] not in (Phase.ONCE, Phase.PART)]
    stop = min([len(forward) - 1, *sums])  # what follows the microbatches is of the last stage
    return {
        node.name: [x for x, end in last.items() if made[x] <= k < end]
        for k, node in enumerate(forward[:stop])
    }
