"""Profiled links and collectives: fits recover known figures, and cluster files keep them."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hap.cli import profiling
from hap.cluster.cluster_file import load_cluster
from hap.cluster.cluster_text import cluster_yaml
from hap.cluster.device import Contention
from hap.cluster.link import IMPLEMENTATIONS, Collectives, Link, MeasuredSet
from hap.cluster.topology import Cluster
from hap.errors import ClusterError
from hap.profiler import (
    call_timing,
    collective_bench,
    contention_bench,
    link_figures,
    subset_collectives,
)
from hap.profiler.samples import BesideRecord, ExchangeRecord, middle
from hap.runtime.collectives import LocalComm, ProcessGroupComm
from hap.runtime.launch import spawn
from hap.synthesizer.cost.collective_cost import NetworkModel
from tests.known_device import TRUTH

CPU = torch.device("cpu")


def cluster(nodes: str, inside: Link, between: Link) -> Cluster:
    made = tuple(replace(TRUTH, name=f"{node}:{k}", node=node) for k, node in enumerate(nodes))
    return Cluster("made", made, dict.fromkeys(nodes, inside), between)


def exchange_records(
    true: Cluster, noise: float, rng: random.Random, sizes: tuple[int, ...]
) -> list[ExchangeRecord]:
    """Return measurements by the ranks of a cluster, with noise around the true prices."""
    nodes = [d.node for d in true.devices]
    world = tuple(range(len(nodes)))
    groups: list[tuple[tuple[int, ...], ...]] = [(world,)]
    apart = tuple(true.ranks(node) for node in true.nodes)
    if len(apart) > 1 and len(apart[0]) > 1:
        groups.append(apart)
    found = []
    for group in groups:
        n = len(group[0])
        for kind, ways in IMPLEMENTATIONS.items():
            for how in ways:
                if how == "hierarchical" and (len(group) > 1 or len(groups) == 1):
                    continue
                for skew, nbytes in ((s, b) for s in ("even", "half") for b in sizes):
                    parts = np.array(collective_bench.parts(1024, n, skew)) / 1024
                    even = np.full(n, 1 / n)
                    src, dst = (even, parts) if kind == "reduce_scatter" else (parts, even)
                    record = ExchangeRecord(
                        kind=kind, how=how, nbytes=nbytes, groups=group, skew=skew,
                        src=tuple(src.tolist()), dst=tuple(dst.tolist()), seconds=(1.0,),
                    )  # fmt: skip
                    s = profiling.price(true, record) * rng.uniform(1 - noise, 1 + noise)
                    found.append(replace(record, seconds=(s, s * 1.01, s * 0.99)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["abcd", "aabb"])
def test_each_implementation_gets_back_the_links_that_it_sees(nodes: str) -> None:
    rng = random.Random(nodes)
    plain = cluster(nodes, Link(4e9, 20e-6), Link(25e6, 1e-3))
    own = {
        kind: {
            how: {
                "inside": Link(4e9 * rng.uniform(0.3, 1), 20e-6 * rng.uniform(1, 10)),
                "between": Link(25e6 * rng.uniform(0.5, 1), 1e-3 * rng.uniform(0.5, 3)),
            }
            for how in ways
        }
        for kind, ways in IMPLEMENTATIONS.items()
    }
    true = replace(plain, collectives=own)
    records = exchange_records(true, 0.03, rng, (2**12, 2**16, 2**20, 2**24))
    found, residuals = link_figures.collectives(plain, records, profiling.price, "today")
    assert max(abs(r.error) for r in residuals) < 0.1
    for kind, ways in found.items():
        for how, levels in ways.items():
            meant = own[kind][how]["between"]
            assert levels["between"].bandwidth_bytes_per_s == pytest.approx(
                meant.bandwidth_bytes_per_s, rel=0.1
            ), (kind, how)
            assert levels["between"].latency_s == pytest.approx(meant.latency_s, rel=0.2)
            assert ("inside" in levels) == (nodes == "aabb")


def test_least_times_are_separated_from_starts() -> None:
    """Waking up for 30 ms ends before large messages have been sent."""
    rng = random.Random(3)
    true = cluster("abcd", Link(4e9, 20e-6), Link(25e6, 1e-3))
    plain = exchange_records(true, 0.03, rng, (2**12, 2**16, 2**19, 2**22))
    slow = [
        replace(r, seconds=tuple(max(s, 0.03) for s in r.seconds))
        if r.kind == "all_reduce" else r for r in plain
    ]  # fmt: skip
    found, residuals = link_figures.collectives(true, slow, profiling.price, "today")
    for kind, ways in found.items():
        for how, levels in ways.items():
            least_s = 0.03 if kind == "all_reduce" else 0.0
            assert levels["between"].least_s == pytest.approx(least_s, rel=0.05), (kind, how)
    errors = [abs(r.error) for r in residuals if r.record.kind == "all_reduce"]
    assert max(errors) < 0.15


def test_least_times_count_with_a_whole_start_and_for_no_floor() -> None:
    plain = cluster("abcd", Link(4e9, 20e-6), Link(25e6, 1e-3))
    own = {"all_reduce": {"one shot": {"between": Link(25e6, 1e-3, "", 0.5)}}}
    networks = [NetworkModel(plain), NetworkModel(replace(plain, collectives=own))]
    ones = np.ones(4)
    for nbytes, start, least_s in ((8, 1.0, 0.5), (8, 0.5, 0.0), (2**26, 1.0, 0.0)):
        before, after = (
            dict(n.choices("all_reduce", nbytes, ones, ones, start=start)) for n in networks
        )
        assert after == {**before, "one shot": max(before["one shot"], least_s)}
    floors = [n.floor_s("all_reduce", 8) for n in networks]
    assert floors[0] == floors[1]


@pytest.mark.parametrize(
    ("each_s", "parts"),
    [
        ([1.0, 1.1, 1.0], []),
        ([1.0, 4.0, 1.1, 4.0], [(0, 2)]),
        ([4.0, 1.0, 4.1], []),  # one rank communicates with nobody
        ([9.0, 1.0, 3.0, 1.0, 3.1], [(1, 3), (1, 2, 3, 4)]),
        ([9.0, 1.0, 3.0, 3.1], [(1, 2, 3)]),
    ],
)
def test_parts_without_slower_ranks(each_s: list[float], parts: list[tuple[int, ...]]) -> None:
    assert contention_bench.faster(each_s) == parts


@pytest.mark.parametrize(
    ("each_s", "sets"),
    [
        ([1.0, 1.1, 1.0], []),  # all are alike
        ([1.0, 4.0, 1.1, 4.0], [(0, 2), (1, 3)]),
        ([4.0, 1.0, 4.1], [(0, 2)]),
        ([9.0, 1.0, 3.0, 1.0, 3.1], [(1, 3), (1, 2, 3, 4), (2, 4)]),
        ([9.0, 1.0, 3.0], [(1, 2)]),
        ([float(2**k) for k in range(12)], [tuple(range(n)) for n in range(2, 8)]),
    ],
)
def test_sets_are_each_kind_alone_and_with_all_faster_ones(
    each_s: list[float], sets: list[tuple[int, ...]]
) -> None:
    assert subset_collectives.participants(each_s) == sets


def some_records(true: Cluster, ranks: tuple[int, ...], part: float) -> list[ExchangeRecord]:
    """Return even collectives of some ranks, as if they took ``part`` of their price."""
    even, found = (1 / len(ranks),) * len(ranks), []
    for (kind, ways), nbytes in itertools.product(IMPLEMENTATIONS.items(), (64, 2**18, 2**22)):
        for how in ways:
            if how != "hierarchical":
                record = ExchangeRecord(
                    kind=kind, how=how, nbytes=nbytes, groups=(ranks,), skew="even", seconds=(1.0,),
                    src=even, dst=even,
                )  # fmt: skip
                found.append(replace(record, seconds=(part * profiling.price(true, record),)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["abcd", "aabb"])
def test_sets_of_devices_get_back_the_links_that_they_see(nodes: str) -> None:
    plain = cluster(nodes, Link(4e9, 2e-3), Link(25e6, 20e-3))
    sets = {(0, 1): 0.2, (0, 1, 2): 0.6}
    records = [r for ranks, part in sets.items() for r in some_records(plain, ranks, part)]
    among, residuals = subset_collectives.fitted(plain, records, profiling.price, "today")
    assert [each.devices for each in among] == [
        frozenset(plain.devices[r].name for r in ranks) for ranks in sets
    ]
    assert max(abs(r.error) for r in residuals) < 0.02
    assert {r.record.groups for r in residuals} == {((0, 1),), ((0, 1, 2),)}
    slow = replace(plain, among=among)
    whole, even = NetworkModel(slow), np.full(4, 0.25)
    assert whole.choices("all_gather", 2**20, even, even) == NetworkModel(plain).choices(
        "all_gather", 2**20, even, even
    ), "all ranks were not measured"
    told = among[1].links["all_to_all"]["exact"].values()
    assert all("today among 3 devices, n=3" in link.source for link in told)


def test_parts_of_a_cluster_use_the_smallest_measured_set_with_them() -> None:
    plain = cluster("abcd", Link(4e9, 20e-6), Link(25e6, 1e-3))

    def links(latency_s: float) -> Collectives:
        return {"all_gather": {"padded": {"between": Link(1e18, latency_s)}}}

    few, more = (MeasuredSet(frozenset(names), links(s)) for names, s in (
        (("a:0", "b:1"), 2e-3), (("a:0", "b:1", "c:2"), 4e-3)
    ))  # fmt: skip
    measured = replace(plain, collectives=links(8e-3), among=(more, few))
    for ranks, latency_s, told in (
        ((0, 1, 2, 3), 8e-3, "among all devices"), ((2, 3), 8e-3, "among all devices"),
        ((0, 1, 2), 4e-3, "among these"), ((0, 2), 4e-3, "among 3 devices"),
        ((0, 1), 2e-3, "among these"),
    ):  # fmt: skip
        part = measured.keep(ranks)
        even = np.full(len(ranks), 1 / len(ranks))
        steps = (len(ranks) - 1).bit_length()
        found = dict(NetworkModel(part).choices("all_gather", 8, even, even))
        assert found["padded"] == pytest.approx(steps * latency_s)
        assert told in part.collectives_from
        # Unmeasured implementations cost what the links say, for any ranks.
        before = dict(NetworkModel(plain.keep(ranks)).choices("all_gather", 8, even, even))
        assert found["grouped"] == before["grouped"]
    assert not plain.collectives_from
    only_few = replace(plain, among=(few,))
    assert not only_few.measured("all_gather", "padded")
    assert (
        only_few.keep((0, 1)).measured("all_gather", "padded") == few.links["all_gather"]["padded"]
    )


def few_of_three() -> list[tuple[str, str, int, bool]]:
    """Measure with ranks 0 and 2 of three while rank 1 idles."""
    whole = ProcessGroupComm()
    comm = whole.subgroup(((0, 2), (1,)))
    ring = collective_bench.Ring(comm=comm, groups=((0, 2),), counts=(2,), skewed=False)
    limits = replace(collective_bench.QUICK, sizes=(2**14, 2**18), rounds=1)
    made = [r for r in collective_bench.measure([ring], limits, CPU, {}, whole)
            if isinstance(r, ExchangeRecord)]  # fmt: skip
    known = {r.key: r for r in made}
    again = collective_bench.measure([ring], limits, CPU, known, whole)
    assert [r for r in again if isinstance(r, ExchangeRecord)] == made
    assert subset_collectives.among_some(made, 3) == made
    assert all(e.groups == ((0, 2),) and min(e.seconds) > 0 for e in made)
    return [(e.kind, e.how, len(e.src), len(e.seconds) > 1) for e in made]


@pytest.mark.slow
@pytest.mark.gloo
def test_some_ranks_measure_while_others_idle() -> None:
    ways = [
        (k, how) for k, ways in IMPLEMENTATIONS.items() for how in ways if how != "hierarchical"
    ]
    expected = [(kind, how, 2, True) for kind, how in ways for _ in range(2)]
    assert spawn(few_of_three, 3, timeout_s=150) == [expected] * 3


def two_machines_of_three() -> list[float]:
    """Reduce in stages among the first two machines, and then among other sets of ranks."""
    work = profiling._Work(
        device=CPU, ranks=5, pace=call_timing.QUICK, limits=collective_bench.QUICK, wanted=(),
        rings=[], comm=ProcessGroupComm(), nodes=list("aabbc"),
    )  # fmt: skip
    found = []
    for ranks in ((0, 1, 2, 3), (2, 3, 4), (0, 1)):
        ring = work._some(ranks)
        how = "hierarchical" if len(ring.counts) == 2 and min(ring.counts) > 1 else "one shot"
        assert (how == "hierarchical") == (ranks == (0, 1, 2, 3))
        if work.comm.rank in ranks:
            (total,) = ring.comm.all_reduce_many([torch.ones(8)], how)
            found.append(float(total[0]))
    return found


@pytest.mark.gloo
def test_sets_over_machines_run_in_stages_and_leave_later_groups_alone() -> None:
    found = spawn(two_machines_of_three, 5, timeout_s=150)
    assert found == [[4.0, 2.0], [4.0, 2.0], [4.0, 3.0], [4.0, 3.0], [3.0]]


@pytest.mark.parametrize(
    ("alone_s", "computed_s", "ended_s", "drag"),
    [(1.0, 4.0, 2.5, 2.5), (1.0, 2.0, 2.5, 4.0), (1.0, 2.0, 2.0, 2.0), (1.0, 4.0, 0.9, 1.0),
     (1.0, 2.0, 3.5, 10.0)],
)  # fmt: skip
def test_drag_is_told_from_when_a_collective_ends(
    alone_s: float, computed_s: float, ended_s: float, drag: float
) -> None:
    """Beside computing, the collective is ``drag`` times slower; the rest runs at full speed."""
    assert contention_bench.dragged(alone_s, computed_s, ended_s) == pytest.approx(drag)


class Sleeping(LocalComm):
    """Collectives of two ranks that sleep, and sleep longer beside computing."""

    world_size = 2

    def __init__(self, late_s: float) -> None:
        super().__init__()
        self.late_s, self.beside = late_s, False

    def all_reduce_many(self, xs: Sequence[Tensor], how: str) -> list[Tensor]:
        time.sleep(0.02 + 1e-7 * sum(x.nbytes for x in xs) + self.late_s * self.beside)
        return list(xs)

    def all_gather_many(self, xs: Sequence[Tensor], *others: Any) -> list[Tensor]:
        return self.all_reduce_many(xs, "")

    reduce_scatter_many = all_gather_many

    def run(self, call: Callable[[], Any]) -> None:
        self.beside = True
        call()
        self.beside = False


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 0.05])
def test_a_constant_lag_beside_computing_is_delay_and_no_drag(
    monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """The products last longer than the collective, which is awaited after them.

    Other work on the machine lengthens a measurement: one of three must be right.
    """
    monkeypatch.setattr(contention_bench, "gathered_from_all", lambda mine: (mine, mine))
    comm = Sleeping(late_s)
    with ThreadPoolExecutor() as pool:

        def start(call: Callable[[], Any]) -> Callable[[], Any]:
            return pool.submit(comm.run, call).result

        for _ in range(3):
            (_, found) = contention_bench.measure(comm, start, [1.0, 1.0], CPU, {})
            assert isinstance(found, BesideRecord)
            drag, delay_s = statistics.median(found.drag[0]), statistics.median(found.delay[0])
            if right := drag < 1.5 and delay_s == pytest.approx(late_s, abs=0.02):
                break
    assert right, (drag, delay_s)


@pytest.mark.parametrize(("drag", "delay_s"), [(1.0, 0.0), (1.0, 0.05), (2.0, 0.03), (3.0, 0.0)])
def test_a_drag_and_a_delay_are_told_from_large_and_small_collectives(
    drag: float, delay_s: float
) -> None:
    large, small = (
        [(s, drag + delay_s / s) for s in sizes] for sizes in ((0.3, 0.31), (0.01, 0.02))
    )
    drags, delays = contention_bench.split(large, small)
    assert drags == pytest.approx([drag] * 2, rel=0.02)
    assert delays == pytest.approx([delay_s] * 2, rel=0.02)


def test_the_middle_drops_hiccups_and_keeps_alternating_costs() -> None:
    assert middle([1.0, 1.0, 1.0, 1.0, 9.0]) == 1.0
    assert middle([0.2, 1.8, 0.3, 1.7, 1.0]) == pytest.approx(1.0)
    assert middle([3.0]) == 3.0


def test_processor_time_of_a_second_call_is_scaled_to_wall_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a processor that is stopped half of the time, a step of 4 ms takes 8 ms."""
    used = [0.0]
    monkeypatch.setattr(call_timing.time, "thread_time", lambda: used[0])
    monkeypatch.setattr(call_timing.time, "perf_counter", lambda: 2 * used[0])

    def work(seconds: float) -> None:
        used[0] += seconds

    found = call_timing.seconds_after(lambda: work(0.1), lambda: work(0.004), 3)
    assert found == pytest.approx([0.008] * 3)


@pytest.mark.parametrize(
    ("start_s", "bytes_per_s", "wanted"),
    [
        (0.05, 1e9, 4),
        (0.05, 5e6, 3),
        (1e-4, 1e6, 3),
        (1e-5, 1e9, 4),
        (0.15, 6e6, 4),  # 0.85 s, most of it start
        (0.15, 2e6, 3),
        (2.0, 1e9, 4),
        (3.0, 1e9, 1),  # too long at any size
    ],
)
def test_sizes_grow_until_one_would_take_too_long(
    start_s: float, bytes_per_s: float, wanted: int
) -> None:
    limits = collective_bench.Range(sizes=(2**12, 2**16, 2**19, 2**22), rounds=1, longest_s=0.6)

    def one(nbytes: int) -> ExchangeRecord:
        return ExchangeRecord(
            kind="message", how="", nbytes=nbytes, groups=((0, 1),), skew="", src=(), dst=(),
            seconds=(start_s + nbytes / bytes_per_s,),
        )  # fmt: skip

    steps = list(collective_bench._grow("it", one, limits.sizes, limits))
    assert [isinstance(s, ExchangeRecord) for s in steps if not isinstance(s, str)] == (
        [True] * wanted + [False] * (4 - wanted)
    )


@pytest.mark.parametrize(
    ("batches", "kept"),
    [
        ([[0.043, 0.038, 0.043, 0.047]], 4),
        ([[0.224, 0.096, 0.1, 0.078], [0.1] * 4, [0.1] * 4], 8),
        ([[0.01, 0.2, 0.01, 0.01]] * 9, 16),  # does not repeat for ever
    ],
)
def test_repeats_that_differ_much_are_repeated(
    monkeypatch: pytest.MonkeyPatch, batches: list[list[float]], kept: int
) -> None:
    """Two of four may have waited for lost packets; four samples do not tell how often this is."""
    found = iter([[0.1], *batches])
    monkeypatch.setattr(collective_bench, "_one", lambda *args: (0.0, 0.0))
    monkeypatch.setattr(collective_bench, "_last", lambda *args: next(found))
    seconds = collective_bench._seconds(None, collective_bench.FULL, CPU, LocalComm(), 1)
    assert list(seconds) == [s for batch in batches for s in batch][:kept]


class _LateRank(ProcessGroupComm):
    """The last rank learns late that all have met, like a rank with little processor time."""

    def all_reduce_max(self, x: Tensor) -> Tensor:
        found = super().all_reduce_max(x)
        if not x.ndim and self.rank == self.world_size - 1:
            time.sleep(LATE_S)
        return found


LATE_S = 0.4


def _seconds_with_a_late_rank() -> float:
    whole = _LateRank()
    call = collective_bench.small(whole, "all_reduce", 2**12, CPU)
    return min(collective_bench.consecutive_seconds(call, 1, CPU, whole) for _ in range(3))


@pytest.mark.slow
def test_times_of_collectives_exclude_late_ranks() -> None:
    assert spawn(_seconds_with_a_late_rank, 2) == [pytest.approx(0, abs=LATE_S / 2)] * 2


def test_messages_give_the_links() -> None:
    records = [
        ExchangeRecord(
            kind="message", how="", nbytes=nbytes, groups=((a, b),), skew="", src=(1.0, 1.0),
            dst=(1.0, 1.0), seconds=(latency_s + nbytes / rate,) * 3,
        )
        for a, b, latency_s, rate in ((0, 1, 1e-5, 4e9), (1, 2, 1e-3, 25e6), (2, 0, 2e-3, 20e6))
        for nbytes in (2**12, 2**18, 2**22)
    ]  # fmt: skip
    inside, between = link_figures.message_links(["a", "a", "b"], records, "today")
    assert inside["a"].bandwidth_bytes_per_s == pytest.approx(4e9, rel=0.02)
    assert between.bandwidth_bytes_per_s == pytest.approx(20e6, rel=0.02)  # the slowest hop
    assert between.latency_s == pytest.approx(2e-3, rel=0.05)
    assert "n=3" in between.source


def test_measured_figures_stand_for_their_implementation_alone() -> None:
    plain = cluster("abcd", Link(4e9, 20e-6), Link(25e6, 1e-3))
    own = {"all_gather": {"padded": {"between": Link(5e6, 1e-3)}}}
    ones, parts = np.ones(4), np.full(4, 0.25)
    for kind in IMPLEMENTATIONS:
        before, after = (
            dict(NetworkModel(c).choices(kind, 10**6, parts, parts if "to" in kind else ones))
            for c in (plain, replace(plain, collectives=own))
        )
        changed = {how for how in before if after[how] != before[how]}
        assert changed == ({"padded"} if kind == "all_gather" else set())


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "nodes"),
    [
        ("aabb", (0, 1, 0, 1), ["a", "a", "b", "b"]),
        ("abab", (0, 0, 1, 1), ["a", "b", "a", "b"]),  # round-robin
        ("aaaa", (0, 1, 2, 3), ["a"] * 4),
        ("aaaa", (0, 0, 1, 0), ["a-0", "a-1", "a-1", "a-2"]),  # emulated on one host
    ],
)
def test_machines_are_told_apart(
    hosts: str, local_ranks: tuple[int, ...], nodes: list[str]
) -> None:
    assert profiling.machines(list(hosts), local_ranks) == nodes


# --- files ----------------------------------------------------------------------------------


def measured_cluster() -> Cluster:
    own = {
        "all_reduce": {"one shot": {"between": Link(25e6, 1.5e-3, "measured today, n=4", 0.03)}},
        "all_gather": {
            "padded": {"inside": Link(3e9, 1e-5, "m"), "between": Link(2e7, 1e-3, "m")},
            "hierarchical": {"between": Link(2e7, 1e-3, "m")},
        },
    }
    made = cluster("aabb", Link(4e9, 20e-6, "measured today"), Link(25e6, 1e-3, "measured today"))
    slower = replace(made.devices[3], flops_per_s={"float32": 12.345e9}, contention=Contention(interference=0.25, drag=2.5, delay_s=0.0123), relaunch=0.4, source={
        "flops_per_s.float32": "measured today, n=5", "memory_bytes": "read today",
    })  # fmt: skip
    usual = replace(made.devices[2], source={"relaunch": "measured today, n=3"})
    fast = MeasuredSet(
        frozenset(("a:0", "a:1")), {"all_to_all": {"exact": {"inside": Link(3e9, 2e-5, "m")}}}
    )
    devices = (*made.devices[:2], usual, slower)
    return replace(made, devices=devices, collectives=own, among=(fast,))


def test_a_cluster_survives_the_yaml_file() -> None:
    cluster = measured_cluster()
    found = load_cluster(cluster_yaml(cluster, "measured\nby hand"))
    assert found.types() == cluster.types()
    assert found.collectives.keys() == cluster.collectives.keys()
    gather = found.collectives["all_gather"]["padded"]["between"]
    assert gather.bandwidth_bytes_per_s == pytest.approx(2e7, rel=1e-4)
    assert gather.least_s == 0
    assert found.collectives["all_reduce"]["one shot"]["between"].least_s == pytest.approx(0.03)
    assert [d.contention.drag for d in found.devices] == [1.0, 1.0, 1.0, 2.5]
    assert [d.contention.delay_s for d in found.devices] == [0.0, 0.0, 0.0, 0.0123]
    assert [d.contention.interference for d in found.devices] == [0.0, 0.0, 0.0, 0.25]
    assert "n=3" in found.devices[2].source["relaunch"], "measured, and as if it were not"
    (fast,) = found.among
    assert fast.devices == {"a:0", "a:1"}
    assert fast.links["all_to_all"]["exact"]["inside"].latency_s == pytest.approx(2e-5)
    assert [d.relaunch for d in found.devices] == [0.5, 0.5, 0.5, 0.4]
    for mine, theirs in zip(found.devices, cluster.devices, strict=True):
        assert mine.efficiency == pytest.approx(theirs.efficiency, rel=1e-3)
        assert mine.flops_per_s == pytest.approx(theirs.flops_per_s, rel=1e-4)
        assert mine.memory_bytes == theirs.memory_bytes
    assert found.devices[3].source["flops_per_s.float32"].startswith("measured today, n=5 (")
    assert load_cluster(cluster_yaml(found)).digest == found.digest


def test_measured_collectives_are_part_of_a_plans_cluster() -> None:
    cluster = measured_cluster()
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster
    assert replace(cluster, collectives={}).digest != cluster.digest
    assert replace(cluster, among=()).digest != cluster.digest
    renamed = {"all_reduce": {"one shot": {"between": Link(25e6, 1.5e-3, "another day", 0.03)}}}
    one, other = (
        replace(cluster, collectives=c)
        for c in (renamed, {"all_reduce": cluster.collectives["all_reduce"]})
    )
    assert one.digest == other.digest  # the source of a figure is not part of the digest
    assert "collectives" not in replace(cluster, collectives={}).to_dict()


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("  all_gathr: {padded: {between: 1 GB/s}}", 3, "all_gather"),
        ("  all_gather: {paded: {between: 1 GB/s}}", 3, "padded"),
        ("  all_gather:\n    padded:\n      betwen: 1 GB/s", 5, "between"),
        ("  all_gather: {padded: {between: 1 Gb}}", 3, "unit"),
        ("  among: [{devices: [a:0], all_gather: {padded: {between: 1 GB/s}}}]", 3, "two devices"),
        ("  among: [{devices: [a:0, c:9]}]", 3, "c:9"),
        ("  among: [{all_gather: {padded: {between: 1 GB/s}}}]", 3, "devices"),
        ("  all_gather: fast", 3, "key"),
    ],
)
def test_a_wrong_collective_is_told_with_its_line(text: str, place: int, what: str) -> None:
    whole = f"name: x\ncollectives:\n{text}\nnodes:\n  - {{name: a, gpus: 1, type: V100}}\n"
    with pytest.raises(ClusterError) as error:
        load_cluster(whole)
    assert error.value.where == f"<text>:{place}"
    assert what in str(error.value)
