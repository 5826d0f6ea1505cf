"""The model as a tree of modules, with the placements of parameters and operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hap.cli.plan_screen import tensor_label
from hap.cli.terminal import runs
from hap.ir.graph import FREE, Graph, Input
from hap.ir.mesh import origin
from hap.ir.microbatch import Phase, phases
from hap.ir.placement import Placement
from hap.ir.plan import Plan
from hap.ir.program import Compute, Convert, Instruction, Program
from hap.plan_simulation import Simulation
from hap.stage_simulation import stage_costs
from hap.synthesizer.schedule.event_simulator import group_seconds


@dataclass(slots=True)
class TreeModule:
    """A module, its own parameters and instructions, and the modules inside it.

    ``seconds`` are of the slowest rank in each of its operators, those inside it included.
    """

    name: str
    parameters: list[tuple[str, str, str, str]] = field(default_factory=list)
    """(name, shape, placement, elements per rank of the split dim)"""
    instructions: list[tuple[str, str]] = field(default_factory=list)
    """(stage and forward or backward, what is computed or converted in which placements)"""
    children: dict[str, TreeModule] = field(default_factory=dict)
    numel: int = 0
    seconds: float = 0.0
    placements: set[str] = field(default_factory=set)

    @property
    def sides(self) -> list[str]:
        """The first entries of the instructions, each once: forward, backward, per stage."""
        return list(dict.fromkeys(side for side, _ in self.instructions))

    @property
    def count(self) -> int:
        """The instructions of this module and those inside it."""
        return len(self.instructions) + sum(c.count for c in self.children.values())


def module_tree(made: Simulation) -> TreeModule:
    """The tree; instructions that belong to no module are the root's own."""
    plan = made.plan
    root = TreeModule(name=plan.source.function if plan.source.path else "model")
    seconds, owners = _seconds(made), _owners(plan)
    for at, i in enumerate(plan.graph.inputs):
        if i.role == "parameter":
            _add_parameter(plan, root, at, i)
    for graph, program, stage in _programs(plan):
        for number, step in enumerate(program.instructions):
            for module in _path(root, _module_of(graph, step, owners)):
                module.seconds += seconds.get((stage, number), 0.0)
            side = "backward" if step.backward else "forward"
            where = f"stage {stage}, {side}" if plan.stages else side
            module.instructions.append((where, _line(plan, graph, step)))
    return root


def _programs(plan: Plan) -> Iterator[tuple[Graph, Program, int]]:
    """The graphs and programs with the number of their stage; without stages one, of number 0."""
    if plan.stages is None:
        yield *plan.whole, 0
        return
    for number, (graph, stage) in enumerate(zip(plan.cut[0], plan.stages.stages, strict=True)):
        yield graph, stage.program, number


def _add_parameter(plan: Plan, root: TreeModule, at: int, i: Input) -> None:
    tensor = plan.graph.tensors[i.tensor]
    owner, _, leaf = i.target.rpartition(".")
    placement = _placement(plan, at)
    for module in _path(root, owner):
        module.numel += tensor.numel
        module.placements.add(placement)
    shape = f"{tensor.dtype} [{', '.join(map(str, tensor.shape))}]"
    module.parameters.append((leaf, shape, placement, _sizes(plan, i.tensor)))


def _placement(plan: Plan, at: int) -> str:
    """The placement of an input as it is stored; of both mesh axes where there are two."""
    tensor = plan.graph.inputs[at].tensor
    if plan.stages:
        owner = plan.owners[tensor]
        return f"{plan.stages.stages[owner].program.inputs[tensor]} on stage {owner}"
    outer = str(plan.program.inputs[tensor])
    if plan.inside is None:
        return outer
    graph, program = plan.whole
    return f"{outer} between machines, {program.inputs[graph.inputs[at].tensor]} inside"


def _sizes(plan: Plan, tensor: str) -> str:
    """Elements per rank of the dim that is split; empty if none is."""
    ranks = plan.groups[plan.owners[tensor]] if plan.stages else range(plan.world_size)
    cuts = [plan.levels(tensor, rank)[1 if plan.stages else 0 :] for rank in ranks]
    level = next((k for k, cut in reversed(list(enumerate(cuts[0]))) if cut), None)
    if level is None:
        return ""
    sizes = [cut.sizes[cut.place] for each in cuts if (cut := each[level])]
    dim = next(cut.dim for each in cuts if (cut := each[level]))
    return f"dim {dim}: {runs(sizes, len(sizes))}"


def _path(root: TreeModule, path: str) -> list[TreeModule]:
    """The modules from the root to ``path``, made where they are missing."""
    found = [root]
    for part in filter(None, path.split(".")):
        found.append(found[-1].children.setdefault(part, TreeModule(name=part)))
    return found


def _seconds(made: Simulation) -> dict[tuple[int, int], float]:
    """(stage, instruction) -> seconds of computing on the rank that takes longest."""
    found: dict[tuple[int, int], float] = defaultdict(float)
    if made.plan.stages:
        for number, (graph, stage, cost) in enumerate(stage_costs(made.plan)):
            of_node = phases(graph)
            for at, step in enumerate(stage.program.instructions):
                if isinstance(step, Compute):
                    seconds, _ = group_seconds(graph, (step,), cost)
                    times = made.plan.microbatches if of_node[step.node] is Phase.PART else 1
                    found[number, at] = times * float(seconds.max())
        return found
    for span in made.run.spans:
        if isinstance(span.what, tuple) and isinstance(span.what[0], Compute):
            found[0, span.at] += float((span.end_s - span.start_s).max())
    return found


def _module_of(graph: Graph, step: Instruction, owners: Mapping[str, str]) -> str:
    """The module of an instruction; views of a parameter belong to the parameter's."""
    tensor = step.tensor if isinstance(step, Convert) else ""
    node = graph.by_name[step.node] if isinstance(step, Compute) else graph.producer.get(tensor)
    while node is not None and not node.module:
        if node.op not in FREE:
            return owners.get(origin(tensor).tensor, "")
        tensor = node.inputs[0]
        node = graph.producer.get(tensor)
    return node.module if node is not None else owners.get(origin(tensor).tensor, "")


def _owners(plan: Plan) -> dict[str, str]:
    """Parameters and their gradients -> the module that owns them."""
    targets = {i.tensor: i.target for i in plan.graph.role("parameter")}
    targets |= {gradient: target for target, gradient in plan.graph.gradients.items()}
    return {tensor: target.rpartition(".")[0] for tensor, target in targets.items()}


def _line(plan: Plan, graph: Graph, step: Instruction) -> str:
    if isinstance(step, Convert):
        by = f" by {step.implementation}" if step.implementation else ""
        return f"{step.kind}  {step.src} -> {step.dst}  {tensor_label(plan, step.tensor)}{by}"
    node = graph.by_name[step.node]
    shapes = ", ".join(str(list(graph.tensors[o].shape)) for o in node.outputs if o)
    placed = f"{_join(step.ins)} -> {_join(step.outs)}"
    source = f"  {_short(node.source)}" if node.source else ""
    return f"{node.op.removeprefix('aten.')}  {placed}  {shapes}{source}"


def _join(placements: Sequence[Placement | None]) -> str:
    return " ".join(str(p) if p else "_" for p in placements)


def _short(source: str) -> str:
    """The end of a source line's path: ``bert/modeling_bert.py:99``."""
    return "/".join(source.split("/")[-2:])
