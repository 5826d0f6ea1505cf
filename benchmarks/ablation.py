"""What each part of the planner is worth: plans without it, by the same predictions.

    python -m benchmarks.ablation [--cluster FILE] [--models bert vgg19 ...] [--size race]

Every row is the predicted step of the best that is left, over that of the whole planner: 1.00 is a
part that brings nothing there. No device is left out, so that all rows have the same devices, and
one mesh axis is used. Give a cluster that was measured (``hap profile``) for figures that mean
something.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import track

from hap.api import build_without_data
from hap.capture import capture
from hap.cluster import Cluster, load_cluster
from hap.errors import HapError
from hap.model_file import load_model_file
from hap.optimizer import default_optimizer, examine
from hap.placement import R
from hap.program import Convert
from hap.synthesizer.baselines import data_parallel
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.overlap import orders
from hap.synthesizer.space import Space, build_space
from hap.synthesizer.synthesize import Synthesizer, spread
from hap.terminal import console, table

HERE = Path(__file__).parent
MODELS = ("vgg19", "vit", "bert", "gpt2", "bert_moe", "wide_mlp")
SIMPLE = {
    "all_gather": "padded", "reduce_scatter": "padded", "all_reduce": "one shot",
    "all_to_all": "exact", "all_reduce_lse": "two reductions",
}  # fmt: skip


def whole(s: Synthesizer) -> Candidate:
    return s.best()


def even_shares(s: Synthesizer) -> Candidate:
    """Every axis in equal parts, but for rounding."""
    return s.cheapest(spread(s.space.axes, np.ones_like(s.machine.speed)))


def shares_by_speed(s: Synthesizer) -> Candidate:
    """In proportion to the speed of products, without the integer program."""
    return s.cheapest(spread(s.space.axes, s.machine.speed))


def batch_only(s: Synthesizer) -> Candidate:
    """Data parallel: the batch is split, parameters are whole; the shares are searched for."""
    allowed = data_parallel(s.space)
    return Synthesizer(s.space, s.cluster, s._states, allowed).best()


def no_factors(s: Synthesizer) -> Candidate:
    """No gradient of a weight is computed whole from gathered factors (SFB)."""
    return Synthesizer(without_factors(s.space), s.cluster, s._states).best()


def without_factors(space: Space) -> Space:
    """The space without rows that make a gradient's product from two whole operands."""
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


def in_turn(s: Synthesizer, best: Candidate) -> float:
    """The best program with nothing overlapped."""
    return best.serial.step_s


def one_bucket(s: Synthesizer, best: Candidate) -> float:
    """Overlapped, but what is reduced or gathered together stays together."""
    found = list(orders(s.space.graph, best.program, s.cost(best)))
    return min(order.step_s for order in found[:2])


def plain_collectives(s: Synthesizer, best: Candidate) -> float:
    """One implementation of each collective, whatever the sizes."""
    steps = tuple(
        replace(i, implementation=SIMPLE[i.kind]) if isinstance(i, Convert) and not i.local else i
        for i in best.program.instructions
    )
    program = replace(best.program, instructions=steps)
    first, *_ = orders(s.space.graph, program, s.cost(best))
    chosen, *_ = orders(s.space.graph, best.program, s.cost(best))
    return best.timeline.step_s * first.step_s / chosen.step_s


SCHEDULED: dict[str, Callable[[Synthesizer, Candidate], float]] = {
    "nothing overlapped": in_turn,
    "one bucket": one_bucket,
    "one implementation of each collective": plain_collectives,
}


def ablated(spec: str, cluster: Cluster) -> dict[str, float | str]:
    """Row -> predicted seconds, or why there is no such plan."""
    file = load_model_file(spec)
    model, batch = build_without_data(file, lambda text: None)
    states = examine(file.optimizer or default_optimizer).states
    synthesizer = Synthesizer(build_space(capture(model, batch, file.loss)), cluster, states)
    best = whole(synthesizer)
    found: dict[str, float | str] = {"whole": best.timeline.step_s}
    for name, search in SEARCHED.items():
        try:
            found[name] = search(synthesizer).timeline.step_s
        except HapError as error:
            found[name] = error.what
    found |= {name: price(synthesizer, best) for name, price in SCHEDULED.items()}
    return found


def rows(names: Iterable[str], found: dict[str, dict[str, float | str]]) -> list[tuple[str, ...]]:
    listed = [("whole planner", *(f"{found[m]['whole']:.3f} s" for m in names))]
    for row in (*SEARCHED, *SCHEDULED):
        cells = []
        for m in names:
            value, best = found[m][row], found[m]["whole"]
            known = isinstance(value, float) and isinstance(best, float)
            cells.append(f"{value / best:.2f}x" if known else "-")  # type: ignore[operator]
        listed.append((row, *cells))
    return listed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cluster", default=str(HERE / "clusters" / "race_4411.yaml"))
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--size", default="race", help="function of the model files")
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    found = {
        name: ablated(f"{HERE / 'models' / name}.py:{options.size}", cluster)
        for name in track(options.models, "planning", console=console())
    }
    head = ("without", *options.models)
    console().print(table(head, rows(options.models, found), right=range(1, len(head))))


if __name__ == "__main__":
    main()
