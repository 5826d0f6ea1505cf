"""Find the first value of a program that differs from a run on one device.

It is slow and keeps every value in memory: use it only after a verification has failed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from hap.complex_tensors import as_real
from hap.ir.batch import Batch, flatten
from hap.ir.graph import Graph
from hap.ir.graph_builder import UNDEFINED
from hap.ir.mesh import origin
from hap.ir.placement import R
from hap.ir.plan import Plan
from hap.ir.program import Compute, Program, Value
from hap.runtime.collectives import Comm, LocalComm
from hap.runtime.context import Context
from hap.runtime.emit import Emitter
from hap.runtime.emulate import run_ranks
from hap.runtime.shards import cut, recombined
from hap.runtime.two_level_comm import along_axes


def first_difference(
    plan: Plan, model: nn.Module, batch: Batch, *, widen: bool, tolerance: float
) -> str | None:
    """Return the first value in program order that differs when recombined, or ``None``.

    ``None`` for a plan with stages, whose ranks run different programs.
    """
    if plan.stages is not None:
        return None
    whole = _inputs(plan.graph, model, batch)
    names = [i.tensor for i in plan.graph.inputs]

    def run(comm: Comm) -> dict[Value, Tensor]:
        part = plan.part(comm.rank)
        given = {
            inner.tensor: cut(plan, name, whole[name], comm.rank)
            for name, inner in zip(names, part.graph.inputs, strict=True)
            if name in whole
        }
        emitter = Emitter(graph=part.graph, program=part.program, shares=part.shares,
                          rank=part.rank, device=torch.device("cpu"), widen=widen,
                          offsets=part.offsets)  # fmt: skip
        comms = along_axes(plan, comm)
        return trace(emitter, given, Context(comms[-1], across=comms[0]))

    ranks = run_ranks(plan.world_size, run)
    single = Emitter(graph=plan.graph, program=undivided(plan.graph), shares={}, rank=0,
                     device=torch.device("cpu"), widen=widen)  # fmt: skip
    reference = trace(single, whole, Context(LocalComm()))
    for value in ranks[0]:
        between = origin(value.tensor) if plan.mesh else value
        expected = reference.get(Value(between.tensor, R))
        maker = plan.graph.producer.get(between.tensor)
        if (
            expected is None
            or not expected.is_floating_point()
            or (maker and maker.op in UNDEFINED)
        ):
            continue
        scale = max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
        parts = [seen[value] for seen in ranks]
        wholes = recombined(plan, value, parts)
        for found in wholes:
            if found.shape != expected.shape or not _close(found, expected, 10 * tolerance * scale):
                return str(value)
    return None


def trace(emitter: Emitter, given: dict[str, Tensor], ctx: Context) -> dict[Value, Tensor]:
    """Run a rank's forward and backward, and return every value."""
    emitted = emitter.emit()
    ctx.dropping = False
    seen: dict[Value, Tensor] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if "value" in n.meta and isinstance(result, Tensor):
                seen[n.meta["value"]] = result.detach().clone()
            return result

    with torch.no_grad():
        results = Recorder(nn.Module(), graph=emitted.forward).run(
            ctx, *(given[t] for t in emitted.inputs)
        )
        saved = results[1 + len(emitted.buffers) :]
        Recorder(nn.Module(), graph=emitted.backward).run(ctx, *saved, torch.ones_like(results[0]))
    return seen


def undivided(graph: Graph) -> Program:
    """Return the program of one device: everything is replicated."""
    steps = tuple(
        Compute(node=n.name, ins=(R,) * len(n.inputs), backward=n.name in graph.backward,
                outs=tuple(R if o else None for o in n.outputs))
        for n in graph.nodes
    )  # fmt: skip
    return Program(
        inputs={i.tensor: R for i in graph.inputs},
        instructions=tuple(sorted(steps, key=lambda s: s.backward)),
        outputs=(R,) * len(graph.outputs),
        axes={},
    )


def _inputs(graph: Graph, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    entries = flatten(batch)
    found = {}
    for i in graph.inputs:
        if i.role == "tangent":
            continue
        path, _, leaf = i.target.rpartition(".")
        given = entries[i.target] if i.role == "input" else getattr(model.get_submodule(path), leaf)
        found[i.tensor] = as_real(given.detach())
    return found


def _close(a: Tensor, b: Tensor, limit: float) -> bool:
    same = (a == b) | (a.isnan() & b.isnan())  # infinities, too
    return bool((same | ((a - b).abs() <= limit)).all())
