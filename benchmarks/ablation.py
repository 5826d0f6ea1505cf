"""The effect of each part of the planner: plans without it, predicted, and raced on request.

    python -m benchmarks.ablation [--cluster FILE] [--models bert vgg19 ...] [--size race]
    python -m benchmarks.ablation --cluster MEASURED --race FILE [--rounds 5]

Every row is the step of the best remaining plan over that of the whole planner: 1.00 means that a
part has no effect there. No device is left out, so that all rows have the same devices, and one mesh
axis is used. Meaningful figures need a measured cluster (``hap profile``).
With ``--race`` all rows take turns on the emulated cluster of that file, with the measured cluster as
its profile, and predicted ratios are followed by measured ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import track

from benchmarks.contenders import IN_TURN
from benchmarks.race import roomy, take_turns
from benchmarks.racing.plans import runnable
from benchmarks.racing.results import Entry
from benchmarks.racing.summary import PLAN, ratio
from hap.capture.building import build_without_data
from hap.capture.model_file import load_model_file
from hap.capture.tracing import capture
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cli.terminal import console, table
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.placement import R
from hap.ir.program import Convert, Program
from hap.runtime.testbed import Testbed
from hap.synthesizer.baselines import data_parallel
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.serial_cost import simulate
from hap.synthesizer.schedule.list_scheduler import orders
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.synthesize import Synthesizer, proportional_shares
from hap.units import format_seconds

HERE = Path(__file__).parent
MODELS = ("vgg19", "vit", "bert", "gpt2", "bert_moe", "wide_mlp")
SIMPLE = {
    "all_gather": "padded", "reduce_scatter": "padded", "all_reduce": "one shot",
    "all_to_all": "exact", "all_reduce_lse": "two reductions",
}  # fmt: skip


def even_shares(s: Synthesizer) -> Candidate:
    """Split every axis into equal parts, except for rounding."""
    return s.cheapest(proportional_shares(s.space.axes, np.ones_like(s.hardware.speed)))


def shares_by_speed(s: Synthesizer) -> Candidate:
    """Split axes in proportion to the speed of products, without the integer program."""
    return s.cheapest(proportional_shares(s.space.axes, s.hardware.speed))


def batch_only(s: Synthesizer) -> Candidate:
    """Data parallel: split the batch, keep parameters whole, and search for shares."""
    allowed = data_parallel(s.space)
    return Synthesizer(s.space, s.cluster, s._states, allowed).best()


def no_factors(s: Synthesizer) -> Candidate:
    """Never compute the gradient of a weight whole from gathered factors (SFB)."""
    return Synthesizer(without_factors(s.space), s.cluster, s._states).best()


def without_factors(space: Space) -> Space:
    """Return the space without rows that make a gradient's product from two whole operands."""
    rows = dict(space.rows)
    for gradient in space.graph.gradients.values():
        node = space.graph.producer[gradient]
        while len(node.inputs) == 1 and node.inputs[0] in space.graph.producer:
            node = space.graph.producer[node.inputs[0]]  # through views
        kept = tuple(row for row in rows[node.name] if not all(p == R for p in row.ins))
        rows[node.name] = kept or rows[node.name]
    return replace(space, rows=rows)


SEARCHED: dict[str, Callable[[Synthesizer], Candidate]] = {
    "even shares": even_shares,
    "shares by speed, not searched": shares_by_speed,
    "the batch split alone": batch_only,
    "no factors gathered (SFB)": no_factors,
}


def in_turn(s: Synthesizer, best: Candidate) -> Variant:
    """Return the best program without overlap."""
    first, *_ = orders(s.space.graph, best.serial, s.cost(best))
    return Variant(best, first.program, best.serial.step_s)


def one_bucket(s: Synthesizer, best: Candidate) -> Variant:
    """Return the best program with overlap, and all reductions or gathers in one bucket."""
    found = list(orders(s.space.graph, best.serial, s.cost(best)))
    order = min(found[:2], key=lambda o: o.step_s)
    return Variant(best, order.program, order.step_s)


def plain_collectives(s: Synthesizer, best: Candidate) -> Variant:
    """Return the best program in its order, with one fixed implementation per collective."""

    def plain(program: Program) -> Program:
        return replace(program, instructions=tuple(
            replace(i, implementation=SIMPLE[i.kind])
            if isinstance(i, Convert) and not i.local else i
            for i in program.instructions
        ))  # fmt: skip

    graph, cost = s.space.graph, s.cost(best)
    first, *_ = orders(graph, simulate(graph, plain(best.program), cost), cost)
    chosen, *_ = orders(graph, best.serial, cost)
    step_s = best.timeline.step_s * first.step_s / chosen.step_s
    return Variant(best, plain(best.timeline.program), step_s)


SCHEDULED: dict[str, Callable[[Synthesizer, Candidate], Variant]] = {
    IN_TURN.removeprefix(PLAN): in_turn,
    "one bucket": one_bucket,
    "one implementation of each collective": plain_collectives,
}
WHOLE = "whole"


class Variant(NamedTuple):
    """A program of a candidate, and its predicted step."""

    candidate: Candidate
    program: Program
    step_s: float


def variants(synthesizer: Synthesizer) -> dict[str, Variant | str]:
    """Return row -> the remaining best plan, or the reason why there is none."""

    def as_it_is(found: Candidate) -> Variant:
        return Variant(found, found.timeline.program, found.timeline.step_s)

    best = synthesizer.best()
    found: dict[str, Variant | str] = {WHOLE: as_it_is(best)}
    for name, search in SEARCHED.items():
        try:
            found[name] = as_it_is(search(synthesizer))
        except HapError as error:
            found[name] = error.what
    return found | {name: without(synthesizer, best) for name, without in SCHEDULED.items()}


def synthesizer_of(spec: str, cluster: Cluster) -> Synthesizer:
    file = load_model_file(spec)
    model, batch = build_without_data(file, lambda text: None)
    states = examine(file.optimizer or default_optimizer).states
    return Synthesizer(build_space(capture(model, batch, file.loss)), cluster, states)


def raced(
    bed: Testbed,
    spec: str,
    synthesizer: Synthesizer,
    found: Mapping[str, Variant | str],
    rounds: int,
) -> dict[str, Entry]:
    """Return row -> its steps, all rows in turn."""
    file, cluster = load_model_file(spec), synthesizer.cluster
    optimizer = str(examine(file.optimizer or default_optimizer))
    with tempfile.TemporaryDirectory() as folder:
        plans: dict[str, Path] = {}
        for number, (row, variant) in enumerate(found.items()):
            if isinstance(variant, Variant):
                path = plans[PLAN + row] = Path(folder) / f"{number}.json"
                runnable(file, optimizer, synthesizer, variant.candidate, variant.program).save(
                    path
                )
        entries = take_turns(bed, file, tuple(plans), plans, cluster, rounds)
    return {entry.name.removeprefix(PLAN): entry for entry in entries}


def shown(row: str, found: Mapping[str, Variant | str], entries: Mapping[str, Entry] | None) -> str:
    """Return the predicted ratio to the whole planner, and the measured one if raced."""
    variant, whole = found[row], found[WHOLE]
    if isinstance(variant, str) or isinstance(whole, str):
        return "-"
    predicted = (
        format_seconds(whole.step_s) if row == WHOLE else f"{variant.step_s / whole.step_s:.2f}x"
    )
    if entries is None:
        return predicted
    entry, base = entries[row], entries[WHOLE]
    if not (entry.counts and base.counts):
        return f"{predicted}, void: {entry.void or base.void}"
    measured = format_seconds(entry.median_s) if row == WHOLE else f"{ratio(entry, base):.2f}x"
    return f"{predicted}, {measured}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cluster", default=str(HERE / "clusters" / "race_4411.yaml"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--size", default="race", help="function of the model files")
    parser.add_argument("--race", help="emulate this cluster, and race all rows on it")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of a race")
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    columns: dict[str, list[str]] = {}
    emulated = Testbed(roomy(load_cluster(options.race)), cores=1.0) if options.race else None
    with emulated or nullcontext() as bed:
        for name in track(options.models, "ablating", console=console()):
            spec = f"{HERE / 'models' / name}.py:{options.size}"
            synthesizer = synthesizer_of(spec, cluster)
            found = variants(synthesizer)
            entries = raced(bed, spec, synthesizer, found, options.rounds) if bed else None
            columns[name] = [shown(row, found, entries) for row in found]
    titles = ["whole planner", *SEARCHED, *SCHEDULED]
    head = ("without", *columns)
    listed = list(zip(titles, *columns.values(), strict=True))
    console().print(table(head, listed, right=range(1, len(head))))


if __name__ == "__main__":
    main()
