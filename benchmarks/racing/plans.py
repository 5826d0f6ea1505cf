"""The plans of a race: ours, and baselines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hap import api
from hap.capture.model_file import ModelFile, load_model_file
from hap.capture.tracing import capture
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cluster.topology import Cluster
from hap.errors import HapError, InfeasibleError
from hap.files import write_whole
from hap.ir.graph import Graph
from hap.ir.plan import Plan, Source
from hap.ir.program import Program
from hap.synthesizer.baselines import METHODS
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.plan_prediction import predict
from hap.synthesizer.planner import Progress
from hap.synthesizer.search.program_space import build_space
from hap.synthesizer.synthesize import Synthesizer

PAPER_METHOD = "HAP 2024"


def ours(
    spec: str, cluster: Cluster, options: PlanOptions, progress: Progress = lambda text: None
) -> Plan:
    """Return the plan of ``hap plan``."""
    return api.plan_file(spec, cluster, options=options, progress=progress)


def baseline(spec: str, cluster: Cluster, method: str) -> Plan:
    """Return the plan of a baseline of :data:`hap.synthesizer.baselines.METHODS`, by name.

    Raises:
        InfeasibleError: The baseline does not fit, as predicted.
        HapError: The baseline cannot run this model.
    """
    file = load_model_file(spec)
    kind = examine(file.optimizer or default_optimizer)
    space = build_space(graph_of(file))
    found: Candidate = next(m for m in METHODS if m.name == method).plan(
        space, cluster, kind.states
    )
    if not found.fits:
        worst = max(range(cluster.world_size), key=lambda rank: found.lacking_bytes[rank])
        lacking = float(found.lacking_bytes[worst]) / 2**20
        raise InfeasibleError(f"{cluster.devices[worst].name} would lack {lacking:.0f} MiB")
    synthesizer = Synthesizer(space, cluster, kind.states)
    return runnable(file, str(kind), synthesizer, found, found.timeline.program)


def graph_of(file: ModelFile) -> Graph:
    """Return the model's step on one device."""
    return capture(file.model(), file.batch(), file.loss)


def runnable(
    file: ModelFile, optimizer: str, synthesizer: Synthesizer, found: Candidate, program: Program
) -> Plan:
    """Return a plan of a candidate's program, in any order, with the candidate's prediction."""
    graph, cluster = synthesizer.space.graph, synthesizer.cluster
    shares = {name: found.shares[name] for name in found.program.used_axes()}
    return Plan(
        source=Source(path=str(file.path), function=file.function), graph=graph, cluster=cluster,
        optimizer=optimizer, program=program, shares=shares,
        idle=tuple(
            r for r in range(cluster.world_size)
            if shares and not any(units[r] for units in shares.values())
        ),
        prediction=predict(graph, found, synthesizer.cost(found), ()),
    )  # fmt: skip


def kept(path: Path, make: Callable[[], Plan]) -> Plan:
    """Return the plan in a file; make and save it if there is none.

    A failure is saved in a note next to the file, and raised again from there.

    Raises:
        HapError: The plan cannot be made.
    """
    why = path.with_suffix(".void")
    if why.exists():
        raise HapError(why.read_text())
    if path.exists():
        return Plan.load(path)
    try:
        plan = make()
    except HapError as error:
        write_whole(why, [error.what])
        raise
    plan.save(path)
    return plan
