"""The pipeline simulator equals the closed form for even stages, and a longest path for uneven ones."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from hap.synthesizer.schedule.pipeline_simulator import in_flight, simulate_pipeline, stage_order


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 1), (1, 5), (2, 1), (2, 6), (4, 3), (4, 9)]
)
def test_even_stages_take_the_closed_form(stages: int, microbatches: int) -> None:
    found = simulate_pipeline([0.3] * stages, [0.7] * stages, microbatches=microbatches)
    assert found.makespan_s == pytest.approx(stages + microbatches - 1)
    assert len(found.forward) == stages
    assert all(len(stage) == microbatches for stage in found.backward)


def _longest_path(
    forward: list[float],
    backward: list[float],
    links: list[float],
    microbatches: int,
    depth: list[int],
) -> float:
    """Relax all precedences until nothing changes: independent of the simulator's order of events."""
    stages = len(forward)
    seconds = {"forward": forward, "backward": backward}
    edges: list[tuple[tuple[str, int, int], tuple[str, int, int], float]] = []
    for s in range(stages):
        tasks = [(way, s, i) for way, i in stage_order(microbatches, depth[s])]
        edges += [(a, b, 0.0) for a, b in pairwise(tasks)]
        for i in range(microbatches):
            if s + 1 < stages:
                edges.append((("forward", s, i), ("forward", s + 1, i), links[s]))
                edges.append((("backward", s + 1, i), ("backward", s, i), links[s]))
            else:
                edges.append((("forward", s, i), ("backward", s, i), 0.0))
    ends = {
        (way, s, i): seconds[way][s]
        for way in seconds for s in range(stages) for i in range(microbatches)
    }  # fmt: skip
    changed = True
    while changed:
        changed = False
        for a, b, wait in edges:
            later = ends[a] + wait + seconds[b[0]][b[1]]
            if later > ends[b] + 1e-12:
                ends[b], changed = later, True
    return max(ends.values())


def test_uneven_stages_take_the_longest_path() -> None:
    draw = random.Random(3)
    for _ in range(60):
        stages, microbatches = draw.randint(1, 5), draw.randint(1, 7)
        forward = [draw.uniform(0.1, 2) for _ in range(stages)]
        backward = [draw.uniform(0.1, 3) for _ in range(stages)]
        links = [draw.choice([0.0, draw.uniform(0, 2)]) for _ in range(stages - 1)]
        more = draw.randint(0, 3)
        depth = [min(microbatches, d + more) for d in in_flight(stages, microbatches)]
        found = simulate_pipeline(
            forward, backward, microbatches=microbatches, boundary_s=links, depth=depth
        )
        expected = _longest_path(forward, backward, links, microbatches, depth)
        assert found.makespan_s == pytest.approx(expected, rel=1e-9)


def test_more_in_flight_hides_slow_links() -> None:
    times = [
        simulate_pipeline(
            [1, 1], [2, 2], microbatches=12, boundary_s=[2], depth=[depth, 1]
        ).makespan_s
        for depth in (2, 4)
    ]
    assert times[1] < 0.9 * times[0]


def test_sends_that_block_take_longer() -> None:
    free, blocked = (
        simulate_pipeline(
            [1, 1], [2, 2], microbatches=8, boundary_s=[0.5], boundary_blocks=blocks
        ).makespan_s
        for blocks in (False, True)
    )
    assert blocked > free


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"backward_s": [1]}, "2 stages have 1 backward times"),
        ({"boundary_s": [1, 1]}, "2 boundaries"),
        ({"microbatches": 0}, "a stage and a microbatch"),
        ({"forward_s": [1, -1]}, "negative"),
        ({"forward_s": [1, float("nan")]}, "no number"),
        ({"depth": [2, 0]}, "at least 1"),
    ],
)
def test_impossible_arguments_are_refused(changed: dict[str, object], text: str) -> None:
    given = {"forward_s": [1, 1], "backward_s": [1, 1], "microbatches": 2} | changed
    with pytest.raises(ValueError, match=text):
        simulate_pipeline(given.pop("forward_s"), given.pop("backward_s"), **given)  # type: ignore
