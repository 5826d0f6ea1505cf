"""Random pipelines: random cuts, groups of ranks, microbatches, and a random program per stage."""

from __future__ import annotations

import random

from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.plan import Plan, Source
from hap.ir.prediction import Prediction
from hap.ir.stages import PipelineStages, Stage, crossing, cut_stages
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.stages.cut_places import possible
from hap.synthesizer.stages.gradient_buckets import with_buckets
from hap.synthesizer.stages.overlapped_turns import with_depth
from hap.synthesizer.stages.stage_times import stage_cost
from hap.synthesizer.stages.time_axis import OverTime, over_time
from hap.synthesizer.stages.turn_seconds import TimedProgram
from tests.random_plans import Case, random_program, two_machines

FAMILIES = ("vit", "bert", "gpt2", "llama", "t5", "bert_moe", "wide_mlp", "mlp")
"""Models of ``benchmarks/models`` whose step can be run in microbatches."""

_DIVIDED: dict[int, tuple[Space, OverTime]] = {}
"""By the id of a space, which is kept so that its id stays its own."""


def random_groups(rng: random.Random) -> tuple[int, ...]:
    """Draw 2 to 4 stages of 1 to 3 ranks each."""
    return tuple(rng.randrange(1, 4) for _ in range(rng.randrange(2, 5)))


def divided(case: Case) -> OverTime:
    """Return the program over time of a case, searched once per space."""
    space = case.space
    if id(space) not in _DIVIDED:
        _DIVIDED[id(space)] = space, over_time(space, two_machines(2), 2)
    return _DIVIDED[id(space)][1]


def uneven_count(case: Case) -> int:
    """Return the largest number of microbatches up to 8 that does not divide the batch."""
    time = divided(case)
    return max(m for m in range(2, 9) if time.shares(m) and not time.divides(m))


def random_staged_plan(
    case: Case,
    groups: tuple[int, ...],
    seed: int,
    microbatches: int = 0,
    cuts: tuple[str, ...] = (),
) -> Plan:
    """Return a random valid plan with a stage for each number of ranks in ``groups``.

    Ranks are dealt to the stages at random; equal arguments give equal plans.

    Args:
        microbatches: their number; 0: a random one.
        cuts: the last tensor of each stage but the last; empty: random ones.
    """
    rng, world = random.Random(f"{groups}/{seed}"), sum(groups)
    buckets, depths = random.Random(seed), random.Random(f"depths/{seed}")
    time = divided(case)
    microbatches = microbatches or rng.choice([m for m in range(1, 9) if time.shares(m)])
    shares = time.shares(microbatches)
    assert shares is not None
    micro = time.part(microbatches)
    places = possible(micro, tuple(crossing(micro)))
    drawn = sorted(rng.sample(range(len(places)), len(groups) - 1))
    cuts = cuts or tuple(places[k] for k in drawn)
    graphs, _ = cut_stages(micro, cuts)
    dealt = rng.sample(range(world), world)
    stages, more, delay = [], rng.choice((1, 2)), rng.choice((0, 1, 2, 9))
    for number, (graph, count) in enumerate(zip(graphs, groups, strict=True)):
        ranks = tuple(sorted(dealt[:count]))
        dealt = dealt[count:]
        cluster = two_machines(count)
        program, own = random_program(build_space(graph), cluster, rng)
        cost = stage_cost(graph, program, own, HardwareModel(cluster), 2)
        program = with_depth(TimedProgram(graph, program, cost), depths.choice((0, 1, 3)))
        program = with_buckets(graph, program, cost, buckets.choice((1, 2, 5)))
        ahead = (len(groups) - number) * more
        stages.append(
            Stage(
                ranks=ranks,
                program=program,
                shares=own,
                in_flight=ahead,
                delay=delay,
                recompute=rng.random() < 0.3,
                gather_each=buckets.random() < 0.5,
            )
        )
    return Plan(
        source=Source(),
        graph=case.graph,
        cluster=two_machines(world),
        optimizer=OptimizerKind(name="AdamW", states=2),
        program=time.program,
        shares=shares,
        prediction=Prediction(
            step_s=0.0, communicate_s=0.0, hidden_s=0.0, ranks=(), collectives=(), alternatives=()
        ),
        stages=PipelineStages(cuts=cuts, stages=tuple(stages)),
    )
