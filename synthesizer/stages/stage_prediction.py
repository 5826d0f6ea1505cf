"""Predictions of a pipeline for a plan file."""

from __future__ import annotations

from hap.ir.prediction import Alternative, Bound, Collective, Prediction, RankPrediction
from hap.synthesizer.stages.stage_search import Pipeline, StageSearch
from hap.synthesizer.stages.stage_transfers import StageTransfers

RELAXED = 9
"""Searches for the bounds of sets of devices without stages; others count computing alone."""


def stage_bound(step_s: float, search: StageSearch) -> Bound:
    """Return a bound of the step over all pipelines, and all programs of one mesh axis without stages.

    In microbatches, a program's operators and collectives take at least as long as on the whole batch.
    So the bound of one group holds for any number of them. A plan may leave out any devices, so all sets
    of them count: each with collectives, or, after some searches, with the least seconds of computing.

    Args:
        step_s: of the plan.
    """
    estimates, searches = search.estimates, 0
    bound_s = estimates.pipelines_s
    for least_s, ranks in estimates.one_groups():
        if least_s >= bound_s:  # as are those of all sets that follow
            break
        if searches < RELAXED:
            relaxed = search.relaxed(ranks)
            searches += relaxed.searches
            least_s = max(least_s, relaxed.bound_s)
        bound_s = min(bound_s, least_s)
    assert bound_s <= step_s * (1 + 1e-9), "the bound is above the plan"
    return Bound(
        covers=f"all programs of one mesh axis; {estimates.covers}", step_s=bound_s,
        gap=max(0.0, 1 - bound_s / step_s) if step_s else 0.0, searches=searches,
    )  # fmt: skip


def predict_pipeline(
    made: Pipeline, rows: tuple[Alternative, ...], bounds: tuple[Bound, ...]
) -> Prediction:
    """Return the predictions of a plan with stages; ``rows``: its alternatives."""
    step_s, ranks = made.times.step_s, dict[int, RankPrediction]()
    work = [float(f.compute_s.sum()) for f in made.figures]
    stored = sum(float(f.stored_bytes.sum()) for f in made.figures)
    hidden = [s.beside_s + f.overlapped_s for s, f in zip(made.seconds, made.figures, strict=True)]
    for stage, each, hidden_s in zip(made.stages.stages, made.figures, hidden, strict=True):
        for place, rank in enumerate(stage.ranks):
            compute_s = float(each.compute_s[place])
            ranks[rank] = RankPrediction(
                work=compute_s / max(sum(work), 1e-300),
                stored=float(each.stored_bytes[place]) / max(stored, 1.0),
                compute_s=compute_s,
                wait_s=max(0.0, step_s - compute_s - each.communicate_s + hidden_s),
                peak_bytes=round(float(each.peak_bytes[place])),
                memory_bytes=made.cluster.devices[rank].memory_bytes,
            )
    inside_s, hidden_s = max(
        (each.communicate_s, beside_s) for each, beside_s in zip(made.figures, hidden, strict=True)
    )
    return Prediction(
        step_s=step_s, communicate_s=inside_s, hidden_s=hidden_s,
        ranks=tuple(ranks[r] for r in sorted(ranks)), collectives=_transfers(made),
        alternatives=rows, bounds=bounds,
    )  # fmt: skip


def _transfers(made: Pipeline) -> tuple[Collective, ...]:
    """Return the transfers between stages, each with the seconds of all microbatches."""
    priced = StageTransfers(made.cluster, made.parts, made.stages.stages, made.transfers)
    found = []
    for t in made.transfers:
        nbytes = made.parts[t.src].tensors[t.tensor].nbytes
        times = 1 if t.once else made.microbatches
        found.append(
            Collective(
                tensor=t.tensor, kind=f"stage {t.src} to stage {t.dst}", nbytes=nbytes * times,
                implementation=f"{times} messages",
                seconds=times * priced.together_s([t]), runner_up="", runner_up_s=0.0,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda c: -c.seconds))
