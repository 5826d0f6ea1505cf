"""Gaps between plans and their lower bounds.

    python -m benchmarks.gaps            the real models on three clusters
    python -m benchmarks.gaps --quick    tiny models, to test the benchmark
    python -m benchmarks.gaps --prove 20 with more searches for each proof

Each row is one plan, made like ``hap plan``: its predicted step, and the gap to each lower bound
of the plan file. A gap is a part of the predicted step: no program that the
bound covers is predicted to be faster by more than that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hap.capture import torch_private
from hap.capture.model_file import load_model_file
from hap.capture.tracing import capture
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cluster.cluster_file import load_cluster
from hap.ir.prediction import Bound
from hap.synthesizer.plan_prediction import bounds
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.synthesize import Synthesizer
from hap.units import format_seconds

HERE = Path(__file__).parent
MODELS = ("mlp", "wide_mlp", "vgg19", "vit", "bert", "gpt2", "bert_moe")
CLUSTERS = ("unlike8", "even8", "hap_testbed")
QUICK = (("mlp:tiny", "vit:tiny"), ("unlike8",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan and its bounds; ``cpu_s`` is the time of searching and proving."""

    model: str
    cluster: str
    step_s: float
    fits: bool
    cpu_s: float
    bounds: tuple[Bound, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan, print the table, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models only")
    parser.add_argument("--only", help="models whose name holds this text")
    parser.add_argument("--prove", type=int, default=0, help="more searches for each proof")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    models, clusters = QUICK if options.quick else (MODELS, CLUSTERS)
    rows = []
    for model in models:
        if (options.only or "") in model:
            space, states = _space(model)
            rows += [gaps(model, space, states, cluster, options.prove) for cluster in clusters]
    Console(highlight=False, width=None if sys.stdout.isatty() else 150).print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _space(model: str) -> tuple[Space, int]:
    """Return a model's space, captured without weights, and its optimizer's number of states."""
    file, _, function = model.partition(":")
    loaded = load_model_file(f"{HERE / 'models' / file}.py:{function or 'model'}")
    with torch_private.fake_mode():
        module, batch = loaded.model(), loaded.batch()
    return build_space(capture(module, batch, loaded.loss)), examine(
        loaded.optimizer or default_optimizer
    ).states


def gaps(model: str, space: Space, states: int, cluster: str, prove: int) -> Row:
    """Plan one model on one cluster."""
    start = time.process_time()
    found = load_cluster(HERE / "clusters" / f"{cluster}.yaml")
    synthesizer = Synthesizer(space, found, states)
    best = synthesizer.best()
    proved = bounds(synthesizer, best, prove)
    return Row(
        model=model, cluster=cluster, step_s=best.timeline.step_s, fits=best.fits,
        cpu_s=time.process_time() - start, bounds=proved,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """Return a line per plan, and the medians."""
    shown = Table(box=None)
    heads = [f"gap: {b.covers}" for b in rows[0].bounds]
    for name in ("model", "cluster", "step", *heads, "searches", "processor"):
        shown.add_column(name, justify="left" if name in ("model", "cluster") else "right")
    for row in rows:
        shown.add_row(
            row.model, row.cluster, format_seconds(row.step_s) + " " * row.fits or " (no fit)",
            *(f"{b.gap:.1%}" for b in row.bounds), str(sum(b.searches for b in row.bounds)),
            format_seconds(row.cpu_s),
        )  # fmt: skip
    medians = [statistics.median(r.bounds[k].gap for r in rows) for k in range(len(heads))]
    shown.add_row("median", "", "", *(f"{m:.1%}" for m in medians), "", "")
    return shown


if __name__ == "__main__":
    main()
