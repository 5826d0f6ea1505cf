"""Dropped labels and replaced variables: the least cost stays, and so do the labellings that have it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hap.synthesizer.search import reduction
from hap.synthesizer.search.bucket_elimination import FORBIDDEN
from hap.synthesizer.search.reduction import Reduced
from hap.synthesizer.search.search_result import cost_of
from hap.synthesizer.search.table_pool import Pool
from tests.test_engines import KINDS, SEEDS, Tables, random_tables, tried


@pytest.fixture
def labels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is replaced."""
    monkeypatch.setattr(reduction, "MOST_NEIGHBOURS", -1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "long"])
@pytest.mark.usefixtures("labels_alone")
def test_a_problem_without_dominated_labels_has_the_same_minimum(kind: str) -> None:
    dropped = 0
    for seed in range(SEEDS):
        unary, pairs = random_tables(kind, seed)
        reduced = Reduced(Pool(), unary, pairs)
        assert len(reduced.left) == len(unary)
        left = min(cost_of(labels, unary, pairs) for labels in itertools.product(*reduced.kept))
        assert min(left, FORBIDDEN) == min(tried(unary, pairs), FORBIDDEN), seed
        dropped += sum(map(len, unary)) - sum(map(len, reduced.kept))
    assert dropped >= SEEDS, "tests little"


@pytest.mark.usefixtures("labels_alone")
def test_no_kept_label_is_dominated() -> None:
    """Check the definition on the original tables."""
    for seed in range(60):
        unary, pairs = random_tables("sparse", seed)
        kept = Reduced(Pool(), unary, pairs).kept
        tables = {**pairs, **{(v, u): t.T for (u, v), t in pairs.items()}}
        for v, labels in enumerate(kept):
            for a, b in itertools.permutations(labels, 2):
                gap = int(unary[v][a]) - int(unary[v][b])
                for (first, u), t in tables.items():
                    if first == v:
                        gap += min(int(t[a, x]) - int(t[b, x]) for x in kept[u])
                assert gap < 0 or (gap == 0 and a < b), (seed, v, a, b)


@pytest.mark.usefixtures("labels_alone")
def test_a_label_is_kept_if_it_is_the_cheaper_one_somewhere() -> None:
    """Label 0 of the first is cheaper with label 0 of the second, label 1 with label 1."""
    pairs = {(0, 1): np.array([[0, 5], [5, 0]], np.int64)}
    reduced = Reduced(Pool(), [np.zeros(2, np.int64), np.zeros(2, np.int64)], pairs)
    assert reduced.kept == [(0, 1), (0, 1)]
    dear = np.array([0, 5], np.int64)  # label 1 of the first now never saves as much as it costs
    reduced = Reduced(Pool(), [dear, np.zeros(2, np.int64)], pairs)
    assert reduced.kept == [(0,), (0,)]


@pytest.mark.parametrize("small", [1 << 14, 30, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_any_labelling_of_what_remains_has_a_whole_one_of_its_cost(
    kind: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``small``: limits of tables, so that more or fewer variables remain."""
    monkeypatch.setattr(reduction, "SMALL", small)
    fewer = 0
    for seed in range(SEEDS):
        unary, pairs = random_tables(kind, seed)
        reduced = Reduced(Pool(), unary, pairs)
        fewer += len(reduced.left) < len(unary)
        if not reduced.feasible:
            assert kind == "long" or tried(unary, pairs) >= FORBIDDEN
            continue
        left, joined = reduced.tables
        labellings = itertools.product(*(range(len(c)) for c in left))
        every = [*itertools.islice(labellings, 100 if kind == "long" else None)]
        for chosen in every:
            rest = cost_of(chosen, left, joined) + reduced.constant
            whole = cost_of(reduced.labels(chosen), unary, pairs)
            assert whole == rest or min(whole, rest) >= FORBIDDEN
        if kind != "long":
            least = min(cost_of(c, left, joined) for c in every) + reduced.constant
            assert min(least, FORBIDDEN) == min(tried(unary, pairs), FORBIDDEN)
    assert fewer >= SEEDS // 4


def ladder(layers: int) -> Tables:
    """Equal layers of two variables, each joined to the one before it."""
    rng = np.random.default_rng(1)
    along, across = rng.integers(0, 99, (2, 3, 3))
    pairs = {}
    for k in range(layers):
        pairs[2 * k, 2 * k + 1] = across
        if k:
            pairs[2 * k - 2, 2 * k] = pairs[2 * k - 1, 2 * k + 1] = along
    return [np.array([0, 1, 2], np.int64)] * (2 * layers), pairs


def test_layers_that_repeat_are_reduced_once() -> None:
    made = []
    for layers in (40, 160):
        pool = Pool()
        assert not Reduced(pool, *ladder(layers)).left
        made.append(len(pool._minima))
    assert 0 < made[1] <= made[0] + 8


def test_a_dropped_label_makes_room_for_replaced_variables() -> None:
    """Each of four variables has three neighbours, until one of them has a single label."""
    unequal = np.array([[0, 5], [5, 0]])
    tables = dict.fromkeys(itertools.combinations(range(4), 2), unequal)
    unary = [np.zeros(2, np.int64)] * 4
    assert Reduced(Pool(), unary, tables).left == [0, 1, 2, 3]
    assert not Reduced(Pool(), [np.array([0, 100]), *unary[1:]], tables).left
