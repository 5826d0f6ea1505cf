"""Predictions of a pipeline for a plan file."""

from __future__ import annotations

from hap.ir.prediction import Alternative, Collective, Prediction, RankPrediction
from hap.synthesizer.stages.stage_search import Pipeline


def predict_pipeline(made: Pipeline, rows: tuple[Alternative, ...]) -> Prediction:
    """Return the predictions of a plan with stages; ``rows``: its alternatives."""
    step_s, ranks = made.times.step_s, dict[int, RankPrediction]()
    work = [float(f.compute_s.sum()) for f in made.figures]
    stored = sum(float(f.stored_bytes.sum()) for f in made.figures)
    for stage, each in zip(made.stages.stages, made.figures, strict=True):
        for place, rank in enumerate(stage.ranks):
            compute_s = float(each.compute_s[place])
            ranks[rank] = RankPrediction(
                work=compute_s / max(sum(work), 1e-300),
                stored=float(each.stored_bytes[place]) / max(stored, 1.0),
                compute_s=compute_s,
                wait_s=max(0.0, step_s - compute_s - each.communicate_s),
                peak_bytes=round(float(each.peak_bytes[place])),
                memory_bytes=made.cluster.devices[rank].memory_bytes,
            )
    inside_s = max(each.communicate_s for each in made.figures)
    return Prediction(
        step_s=step_s, communicate_s=inside_s, hidden_s=0.0,
        ranks=tuple(ranks[r] for r in sorted(ranks)), collectives=_transfers(made),
        alternatives=rows,
    )  # fmt: skip


def _transfers(made: Pipeline) -> tuple[Collective, ...]:
    """Return the transfers between stages, each with the seconds of all microbatches."""
    found = []
    parts = made.parts
    for t in made.transfers:
        nbytes = parts[t.src].tensors[t.tensor].nbytes
        times = 1 if t.once else made.microbatches
        low = min(t.src, t.dst)
        each = made.seconds[low].return_s if t.backward else made.seconds[low].send_s
        found.append(
            Collective(
                tensor=t.tensor, kind=f"stage {t.src} to stage {t.dst}", nbytes=nbytes * times,
                implementation=f"{times} messages", seconds=each * times, runner_up="",
                runner_up_s=0.0,
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda c: -c.seconds))
