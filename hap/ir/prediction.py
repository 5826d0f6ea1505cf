"""A plan's predictions: step, ranks, collectives, alternatives, lower bounds."""

from __future__ import annotations

from dataclasses import dataclass

EVEN_PIPELINE = "3D, even"
"""Name of the alternative that is a pipeline: its seconds of communication are those inside stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """Predictions for one rank. ``work`` and ``stored`` are its parts of the cluster's sums.

    ``compute_s``: seconds in which it computes, slowed down by communication beside it. ``wait_s``:
    seconds in which it neither computes nor communicates. The step is ``compute_s``, ``wait_s`` and the
    part of the plan's ``communicate_s`` during which the rank does not compute.
    """

    work: float
    stored: float
    compute_s: float
    wait_s: float
    peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Communication of ``tensor``, and of the next ``fused - 1`` with it, as one operation.

    ``nbytes`` is the size of the whole tensors, ``runner_up`` the next best implementation.
    """

    tensor: str
    fused: int = 1
    kind: str
    nbytes: int
    implementation: str
    seconds: float
    runner_up: str
    runner_up_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way to train on the same cluster, predicted by the same model.

    If no program runs the model, ``step_s`` is 0 and ``note`` gives the reason. ``peak_bytes``
    and ``lacking_bytes`` are of the rank with the highest peak and of the one that lacks the most.
    """

    name: str
    step_s: float
    fits: bool
    note: str = ""
    communicate_s: float = 0.0
    communicate_bytes: int = 0
    peak_bytes: int = 0
    lacking_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A proof that no program among ``covers`` has a step below ``step_s``, in the cost model.

    ``gap`` is the largest part of the plan's predicted step that a better program could save, and
    ``searches`` the number of searches of the proof.
    """

    covers: str
    step_s: float
    gap: float
    searches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """An operator that the rule table lacks, with the cost of its calls in the step.

    ``origin``: the origin of its rows, see :data:`hap.synthesizer.rules.textual_rules.ORIGINS`.
    ``seconds``: on the rank that computes it longest.
    """

    op: str
    origin: str
    calls: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predictions of the cost model for a plan. Times are seconds of one training step.

    ``communicate_s``: seconds during which collectives run; in a pipeline, those inside the stage that
    communicates longest. ``hidden_s``: the part of them during which the busiest rank computes.
    """

    step_s: float
    communicate_s: float
    hidden_s: float
    ranks: tuple[RankPrediction, ...]
    collectives: tuple[Collective, ...]
    alternatives: tuple[Alternative, ...]
    bounds: tuple[Bound, ...] = ()
