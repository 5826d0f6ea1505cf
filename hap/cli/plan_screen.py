"""The screen of ``hap plan`` and the listing of ``hap show``.

The same plan gives the same screen: nothing here reads a clock.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hap.cli.cluster_table import cluster_table
from hap.cli.terminal import MANY_RANKS, alike, pattern, runs, shown_time, spans, table
from hap.ir.axes import Shares
from hap.ir.half_gradients import ROUNDINGS
from hap.ir.mesh import is_mesh_op, origin
from hap.ir.placement import R
from hap.ir.plan import Plan
from hap.ir.prediction import EVEN_PIPELINE, Collective
from hap.ir.program import Compute, Value
from hap.ir.regather import ALIAS
from hap.ir.stages import PipelineStages, Stage
from hap.ir.widening import narrow_sums
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.rules.textual_rules import rule_origin
from hap.units import format_bytes, format_seconds

_COLLECTIVES = 8
_OPERATORS = 10

NO_GAIN = "no plan found with them is over 1 % faster"
"""The reason why a plan leaves devices out, for people."""

_LITTLE = 1e-9
"""Fraction of the step below which seconds are rounding errors."""

_ORIGINS = {
    "derived": "rules derived from tags and schema",
    "discovered": "rules discovered by running, hap rules discover shows them",
    "replicated": "without a rule, run in full by every rank",
}

_RECOMPUTED = {"cheap": "all but products and attention of each block", "blocks": "each block"}


def plan_screen(plan: Plan, path: str = "plan.json", *, compare: bool = False) -> RenderableType:
    """Return the screen of a plan in the file ``path``.

    ``compare``: show the alternatives with their communication and memory, in a wider table.
    """
    sections = (
        ("Cluster", cluster_table(plan)),
        ("Model", _model(plan)),
        ("Shares", _shares(plan)),
        ("Devices", _devices(plan)),
        ("Step", _comparison(plan) if compare else _step(plan)),
        ("Communication", _communication(plan)),
        ("Next", _next(plan, path)),
    )
    parts: list[RenderableType] = []
    for title, body in sections:
        parts += [Text(title, style="bold"), Padding(body, (0, 0, 1, 2))]
    return Group(*parts)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan for other programs: every field but graph and program, and the totals."""
    data = plan.to_json()
    del data["graph"], data["program"]
    # A plan file leaves out defaults; readers of this output need not know them.
    data |= {"idle": plan.idle, "left_out": plan.left_out, "stopped": plan.stopped}
    data |= {"unruled": [asdict(operator) for operator in plan.unruled]}
    data |= {"prediction": asdict(plan.prediction), "recipe": asdict(plan.recipe)}
    collectives = plan.prediction.collectives
    count, nbytes = _parameters(plan)
    data["totals"] = {
        "parameters": count,
        "parameter_bytes": nbytes,
        "operators": len(plan.graph.nodes),
        "undivided_operators": dict(_undivided(plan)),
        "collectives": len(collectives),
        "collective_bytes": sum(c.nbytes for c in collectives),
    }
    return data


def _model(plan: Plan) -> RenderableType:
    count, nbytes = _parameters(plan)
    source = f"{plan.source.path}:{plan.source.function}, " if plan.source.path else ""
    autocast = f", autocast {plan.recipe.autocast}" if plan.recipe.autocast else ""
    text = Text(
        f"{source}{count:,} parameters ({format_bytes(nbytes)}), "
        f"{len(plan.graph.nodes)} operators, optimizer {plan.optimizer}{autocast}"
    )
    undivided = _undivided(plan).most_common()
    if undivided and plan.world_size > 1:
        names = [f"{op.removeprefix('aten.')} ({n}x)" for op, n in undivided[:_OPERATORS]]
        rest = sum(n for _, n in undivided[_OPERATORS:])
        more = f", and {rest} others" if rest else ""
        text.append(f"\nrun in full by every rank: {', '.join(names)}{more}")
    own = [op for op, lines in plan.graph.rules.items() if not rule_origin(lines) and "(" not in op]
    if own:
        text.append(f"\nrules of the model file: {', '.join(own)}")
    if again := _RECOMPUTED.get(plan.recipe.recompute):
        text.append(f"\nthe backward computes {again} again, which saves memory")
    if plan.recipe.gradients:
        dtype = ROUNDINGS[plan.recipe.gradients].dtype
        text.append(
            f"\ngradients are rounded to {dtype}: training differs from that on one device",
            style="yellow",
        )
    for came, says in _ORIGINS.items():
        found = [o for o in plan.unruled if o.origin == came]
        if found:
            listed = [f"{o.op} ({o.calls}x, {format_seconds(o.seconds)})" for o in found]
            text.append(f"\n{says}: {', '.join(listed)}", style="yellow")
    return text


def _parameters(plan: Plan) -> tuple[int, int]:
    tensors = [plan.graph.tensors[i.tensor] for i in plan.graph.role("parameter")]
    return sum(t.numel for t in tensors), sum(t.nbytes for t in tensors)


def _undivided(plan: Plan) -> Counter[str]:
    """Count operators with work on more than scalars that every rank does in full."""
    found: Counter[str] = Counter()
    if plan.stages is not None:
        return found
    graph, program = plan.whole
    for step in program.instructions:
        if not isinstance(step, Compute) or any(p and p != R for p in step.ins + step.outs):
            continue
        node = graph.by_name[step.node]
        names = [*node.inputs, *filter(None, node.outputs)]
        if is_mesh_op(node.op) or any(origin(n).placement != R for n in names):
            continue
        work = node_work(node, graph)
        if (work.flops or work.bytes) and any(graph.tensors[n].numel > 1 for n in names):
            found[node.op] += 1
    return found


def _stages(plan: Plan, stages: PipelineStages) -> RenderableType:
    rows = []
    for number, (graph, stage) in enumerate(zip(plan.cut[0], stages.stages, strict=True)):
        names = [plan.cluster.devices[r].name for r in stage.ranks]
        modules = [n.module for n in graph.nodes if n.module and n.name not in graph.backward]
        weights = sum(graph.tensors[i.tensor].nbytes for i in graph.role("parameter"))
        rows.append(
            (
                str(number), spans(stage.ranks), ", ".join(alike(names)),
                f"{modules[0]} to {modules[-1]}" if modules else "", format_bytes(weights),
                str(stage.in_flight), _extras(stage),
            )
        )  # fmt: skip
    head = ("stage", "rank", "devices", "modules", "weights", "in flight", "")
    units = next(iter(plan.shares.values()), (1,))
    sizes = " or ".join(str(n * plan.batch_size // sum(units)) for n in dict.fromkeys(units))
    text = Text(f"{plan.microbatches} microbatches of {sizes} rows")
    part = plan.microbatch()
    if narrow := narrow_sums(part):
        dtypes = " and ".join(sorted({part.tensors[name].dtype for name in narrow}))
        text.append(
            f"\n{len(narrow)} gradients are summed over the microbatches in {dtypes}, "
            "and then cast to the parameter's dtype; PyTorch casts before it sums",
            style="yellow",
        )
    return Group(text, table(head, rows, right=(0, 4, 5)), *_inside_stages(stages))


def _inside_stages(stages: PipelineStages) -> Iterator[RenderableType]:
    """Yield the shares of the stages that split a microbatch over their ranks."""
    whole = [("nothing is split", "", "every rank computes all of it")]
    rows = [
        (str(number), *row)
        for number, stage in enumerate(stages.stages)
        if len(stage.ranks) > 1
        for row in _shares_of_axes(stage.program.used_axes(), stage.shares) or whole
    ]
    if rows:
        yield table(("stage", "axis of a microbatch", "units", "per rank"), rows, right=(0, 2))


def _extras(stage: Stage) -> str:
    """Return what a stage does beside its turns, for people."""
    found = ["recomputes its forward"] if stage.recompute else []
    found += ["gathers weights in each microbatch"] if stage.gather_each else []
    if stage.delay:
        s = "" if stage.delay == 2 else "es"
        later = f", {stage.delay - 1} microbatch{s} later" if stage.delay > 1 else ""
        found.append(f"computes gradients of weights separately{later}")
    return "; ".join(found)


def _shares(plan: Plan) -> RenderableType:
    if plan.stages is not None:
        return _stages(plan, plan.stages)
    if plan.inside is None:
        return _axes(plan.program.used_axes(), plan.shares, "per rank")
    return Group(
        _axes(plan.program.used_axes(), plan.shares, "per machine", " between machines"),
        _axes(plan.inside.program.used_axes(), plan.inside.shares, "per rank", " inside machines"),
    )


def _axes(axes: Mapping[str, int], shares: Shares, per: str, where: str = "") -> RenderableType:
    if not axes:
        doer = "every machine does" if per == "per machine" else "every rank does"
        return Text(f"nothing is split{where}: {doer} the whole step")
    return table((f"axis{where}", "units", per), _shares_of_axes(axes, shares), right=(1,))


def _shares_of_axes(axes: Mapping[str, int], shares: Shares) -> list[tuple[str, str, str]]:
    """Return a row per axis, or per axes with alike names and equal shares."""
    kinds: dict[tuple[str, int, tuple[int, ...]], list[str]] = {}
    for name, units in axes.items():
        kinds.setdefault((pattern(name), units, shares[name]), []).append(name)
    return [
        (alike(names)[0], str(units), f"-> {runs(given, len(given))}")
        for (_, units, given), names in kinds.items()
    ]


def _devices(plan: Plan) -> RenderableType:
    """Return a line per rank; above 16 ranks, a line per group of equal devices and figures."""
    lines: dict[tuple[object, ...], list[int]] = {}
    for rank, r in enumerate(plan.prediction.ranks):
        figures = (
            f"{r.work:.1%}",
            f"{r.stored:.1%}",
            f"{format_bytes(r.peak_bytes)} of {format_bytes(r.memory_bytes)}",
            f"{r.peak_bytes / r.memory_bytes:.0%}",
            format_seconds(r.compute_s),
            shown_time(r.wait_s),
            "idle" if rank in plan.idle else "",
        )
        device = plan.cluster.devices[rank]
        one = device.kind if plan.world_size > MANY_RANKS else f"{device.kind} {device.name}"
        key = rank if plan.world_size <= MANY_RANKS else device.figures
        lines.setdefault((key, one, *figures), []).append(rank)
    rows = [(spans(ranks), *map(str, line[1:])) for line, ranks in lines.items()]
    head = ("rank", "device", "work", "stored", "peak memory", "", "busy", "waiting", "")
    body: list[RenderableType] = [table(head, rows, right=(2, 3, 4, 5, 6, 7))]
    if plan.left_out:
        names = ", ".join(alike(list(plan.left_out)))
        advice = f"{NO_GAIN}; start no processes there"
        body.append(Text(f"unused: {names}; {advice}", style="yellow"))
    if plan.idle:
        names = ", ".join(plan.cluster.devices[r].name for r in plan.idle)
        advice = "remove them from the cluster file, and plan anew"
        body.append(Text(f"idle, without a share: {names}; {advice}", style="yellow"))
    return Group(*body)


def _step(plan: Plan) -> RenderableType:
    p = plan.prediction
    rows = [("this plan", format_seconds(p.step_s), "1.00x", _split(plan))]
    for other in p.alternatives:
        time = (format_seconds(other.step_s), f"{other.step_s / p.step_s:.2f}x")
        known = time if other.step_s else ("-", "-")  # without a program the note gives the reason
        unfit = ["does not fit the memory"] if other.step_s and not other.fits else []
        note = "; ".join([*([other.note] if other.note else []), *unfit])
        rows.append((other.name, *known, note))
    return Group(table(("predicted", "step", "", ""), rows, right=(1, 2)), *_bounds(plan))


def _bounds(plan: Plan) -> Iterator[Text]:
    """Yield predicted step, lower bound and gap: one line per proof."""
    p = plan.prediction
    if plan.stopped:
        yield Text(
            f"the search was not finished ({plan.stopped}): this is the best plan so far, "
            "without baselines and lower bounds",
            style="yellow",
        )
    if plan.inside:
        yield Text("lower bound: none is computed for two mesh axes")
    for b in p.bounds:
        yield Text(
            f"predicted step {format_seconds(p.step_s)}, lower bound {format_seconds(b.step_s)} "
            f"({b.covers}), gap {b.gap:.1%}"
        )


def _comparison(plan: Plan) -> RenderableType:
    """Return a row per alternative: speedup of the plan over it, traffic, worst peak."""
    p = plan.prediction
    worst = max(rank.peak_bytes for rank in p.ranks)
    moved = sum(c.nbytes for c in p.collectives)
    # Collectives inside stages are a part of what a pipeline moves; its transfers have no sum.
    own_s = None if plan.stages else p.communicate_s
    rows = [("this plan", *_figures(p.step_s, p.step_s, own_s, moved, worst), "yes")]
    for o in p.alternatives:
        other_s = None if o.name == EVEN_PIPELINE else o.communicate_s
        figures = _figures(p.step_s, o.step_s, other_s, o.communicate_bytes, o.peak_bytes)
        fits = "yes" if o.fits else f"lacks {format_bytes(o.lacking_bytes)}"
        known = (*figures, fits) if o.step_s else ("-",) * 6  # the note gives the reason
        rows.append((o.name, *known))
    head = ("predicted", "step", "plan's gain", "moving", "bytes", "worst peak", "fits")
    notes = table(("", ""), [(o.name, o.note) for o in p.alternatives if o.note])
    shown = table(head, rows, right=(1, 2, 3, 4, 5))
    return Group(shown, *_bounds(plan), Text(""), notes)


def _figures(
    plan_s: float, step_s: float, communicate_s: float | None, moved: int, peak: int
) -> tuple[str, ...]:
    return (
        format_seconds(step_s),
        f"{step_s / plan_s:.2f}x",
        "-" if communicate_s is None else format_seconds(communicate_s),
        format_bytes(moved),
        format_bytes(peak),
    )


def _split(plan: Plan) -> str:
    """Return the busiest rank's computing, waiting, and hidden and exposed communication."""
    p = plan.prediction
    if not p.ranks:
        return ""  # the plan file predicts the step alone
    rank = max(p.ranks, key=lambda r: r.compute_s)
    computing, moving = format_seconds(rank.compute_s), format_seconds(p.communicate_s)
    if plan.stages:
        return f"{computing} computing on the busiest device, {moving} in collectives inside stages"
    waiting = (
        f" + {format_seconds(rank.wait_s)} waiting" if rank.wait_s > _LITTLE * p.step_s else ""
    )
    text = f"{computing} computing{waiting} + {moving} communicating"
    hidden = p.hidden_s > _LITTLE * p.step_s
    return f"{text}, {format_seconds(p.hidden_s)} of it overlapped" if hidden else text


def _communication(plan: Plan) -> RenderableType:
    """Return the longest kinds of collectives; equal ones of several layers are one kind."""
    kinds: dict[tuple[object, ...], list[Collective]] = {}
    for c in plan.prediction.collectives:
        label = tensor_label(plan, c.tensor)
        key = (pattern(label), c.kind, c.fused, c.nbytes, c.implementation, c.runner_up)
        kinds.setdefault(key, []).append(c)
    if not kinds or plan.world_size == 1:
        return Text("none")
    groups = sorted(kinds.values(), key=lambda group: -sum(c.seconds for c in group))
    rows = []
    for group in groups[:_COLLECTIVES]:
        c = group[0]
        total, second = sum(x.seconds for x in group), sum(x.runner_up_s for x in group)
        runner_up = f"{c.runner_up} {format_seconds(second)}" if c.runner_up else "none"
        label = alike([tensor_label(plan, x.tensor) for x in group])[0]
        if c.fused > 1:
            label = f"{label} and {c.fused - 1} more, fused"
        how = (c.kind, format_bytes(c.nbytes), c.implementation, format_seconds(total), runner_up)
        rows.append((label, *how))
    shown = table(
        ("tensor", "collective", "each", "by", "seconds", "runner-up"), rows, right=(2, 4)
    )
    rest = groups[_COLLECTIVES:]
    if not rest:
        return shown
    seconds = format_seconds(sum(c.seconds for group in rest for c in group))
    return Group(shown, Text(f"and {sum(map(len, rest))} more, {seconds} together"))


def tensor_label(plan: Plan, tensor: str) -> str:
    """Name a tensor in the model's terms: a parameter, its gradient, or a module's output."""
    tensor = origin(tensor).tensor
    for i in plan.graph.inputs:
        if i.tensor == tensor:
            return i.target
    for target, gradient in plan.graph.gradients.items():
        if gradient == tensor:
            return f"grad {target}"
    node = plan.graph.producer.get(tensor)
    if node is None or not node.module:
        if node is not None and node.op == ALIAS:  # a parameter's alias for the backward
            return f"{tensor_label(plan, node.inputs[0])}, again"
        return tensor
    return f"{node.module} {node.op.split('.')[1]}"


def _next(plan: Plan, path: str) -> RenderableType:
    file = shlex.quote(path)
    if len(plan.cluster.nodes) == 1:
        return Text(f"hap verify {file}\nhap run {file}")
    here = f"hap run {file} --nproc {plan.world_size}"
    width = len(here) + 2
    return Text(
        f"hap verify {file}\n{f'hap run {file}':{width}}# prints the command for each machine\n"
        f"{here:{width}}# runs all ranks on this machine"
    )


def program_lines(plan: Plan, *, rank: int | None = None, side: str = "") -> Iterator[str]:
    """Yield the instructions as text; with ``rank``, the shapes that this rank makes.

    Args:
        side: ``fwd`` or ``bwd`` for the instructions of one side alone.
    """
    if plan.stages is not None:
        for number, (graph, stage) in enumerate(zip(plan.cut[0], plan.stages.stages, strict=True)):
            if rank is None or rank in stage.ranks:
                yield f"stage {number}, ranks {spans(stage.ranks)}, one microbatch"
                yield from (x for x in stage.program.lines(graph) if x.startswith(side))
        return
    graph, program = plan.whole
    made = [[Value(i.tensor, program.inputs[i.tensor])] for i in graph.inputs]
    for step in program.instructions:
        if isinstance(step, Compute):
            outs = zip(graph.by_name[step.node].outputs, step.outs, strict=True)
            made.append([Value(name, p) for name, p in outs if name and p])
        else:
            made.append([Value(step.tensor, step.dst)])
    made += [[] for _ in graph.outputs]
    part = None if rank is None else plan.part(rank)
    for line, values in zip(program.lines(graph), made, strict=True):
        if not line.startswith(side):
            continue
        if part is None or not values:
            yield line
            continue
        local = [part.program.local_shape(part.graph, v, part.shares, part.rank) for v in values]
        yield f"{line}  # {', '.join(map(str, local))}"
