"""Prices of hierarchical collectives by hand, and where plans switch to them from flat ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.axes import Axes, Axis
from hap.ir.hierarchical import cheaper, even, exists, regular
from hap.runtime.collectives import Comm, Sizes, Waiting
from hap.runtime.emulate import run_ranks
from hap.runtime.two_level_comm import NAME, Levels, TwoLevelComm
from hap.synthesizer.cost.collective_cost import NetworkModel
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.serial_cost import choose_implementations
from tests.small_plan import small_graph, small_program

FAST, SLOW = Link(1e10, 1e-6), Link(1e9, 1e-5)
A, W, SA, SW = (
    FAST.latency_s,
    FAST.bandwidth_bytes_per_s,
    SLOW.latency_s,
    SLOW.bandwidth_bytes_per_s,
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
IRREGULAR = (7, 1, 3, 8, 1, 6, 1, 2)


def cluster(counts: tuple[int, ...], inner: Link = FAST, outer: Link = SLOW) -> Cluster:
    devices = tuple(
        Device(
            name=f"m{m}:{k}", kind="x", node=f"m{m}", memory_bytes=2**30, launch_s=1e-6,
            flops_per_s={"float32": 1e12}, memory_bytes_per_s=1e11,
        )
        for m, count in enumerate(counts) for k in range(count)
    )  # fmt: skip
    return Cluster("test", devices, {f"m{m}": inner for m in range(len(counts))}, outer)


def seconds(
    counts: tuple[int, ...], kind: str, nbytes: float, src: object = None, dst: object = None,
    start: bool = True,
) -> dict[str, float]:  # fmt: skip
    n = sum(counts)
    parts = [np.full(n, 1 / n) if p is None else np.asarray(p, dtype=float) for p in (src, dst)]
    return dict(NetworkModel(cluster(counts)).choices(kind, int(nbytes), *parts, start=start))


def test_two_machines_of_eight_by_hand() -> None:
    b = 16_000_000
    found = seconds((8, 8), "all_reduce", b)
    # Slow link: a ring of 16 sends 2 * 15/16 of the tensor over it, two machines 2 * 1/2.
    assert found["one shot"] == pytest.approx(2 * (3 * A + SA) + 1.875 * b / SW)
    assert found["hierarchical"] == pytest.approx(6 * A + 1.75 * b / W + 2 * SA + 1.0 * b / SW)
    for kind in ("all_gather", "reduce_scatter"):
        found = seconds((8, 8), kind, b)
        assert found["padded"] == pytest.approx(3 * A + SA + 15 / 16 * b / SW)
        assert found["hierarchical"] == pytest.approx(3 * A + 7 / 8 * b / W + SA + b / 2 / SW)
    found = seconds((8, 8), "all_to_all", b)
    # Half of a machine's data leaves it either way; only the starts are fewer.
    assert found["exact"] == pytest.approx(7 * A + 8 * SA + b / 4 / SW)
    # A rank receives 7/8 of its own 1/16 from its 7 peers.
    assert found["hierarchical"] == pytest.approx(7 * A + 7 / 8 / 16 * b / W + SA + b / 4 / SW)


def test_uneven_shards_by_hand() -> None:
    """Two machines of two. The columns hold 5/8 and 3/8 of the tensor."""
    b, parts = 8_000_000, [0.5, 0.25, 0.125, 0.125]
    found = seconds((2, 2), "all_gather", b, parts)
    # Between machines, column 0 pads to 1/2 and column 1 to 1/4. Inside: the larger column.
    assert found["hierarchical"] == pytest.approx(SA + 0.75 * b / SW + A + 0.625 * b / W)
    # A machine without a shard: both columns send what they hold.
    found = seconds((2, 2), "all_gather", b, [0.5, 0.5, 0, 0])
    assert found["hierarchical"] == pytest.approx(SA + b / SW + A + 0.5 * b / W)


def test_machines_of_unequal_sizes_by_hand() -> None:
    """Machines of three and of one: one column of leaders, which broadcast to their other ranks."""
    b = 6_000_000
    found = seconds((3, 1), "all_reduce", b)
    # Inside: a reduction and a broadcast of the whole tensor, each a tree of two steps.
    assert found["hierarchical"] == pytest.approx(2 * (2 * A + b / W) + 2 * SA + b / SW)
    parts = [1 / 3, 1 / 3, 0, 1 / 3]
    found = seconds((3, 1), "all_gather", b, parts)
    level = 2 * A + 2 * b / 3 / W  # padded costs the same as grouped: twice a third
    assert found["hierarchical"] == pytest.approx(level + SA + 2 / 3 * b / SW + 2 * A + b / W)


@pytest.mark.parametrize("counts", [(1,), (8,), (1, 1, 1)])
def test_a_single_level_has_no_hierarchical_collective(counts: tuple[int, ...]) -> None:
    assert not exists(counts)
    for kind in KINDS:
        assert "hierarchical" not in seconds(counts, kind, 1000)


def test_mixed_ranks_have_no_machines() -> None:
    devices = cluster((2, 2)).devices
    mixed = Cluster("mixed", (*devices[::2], *devices[1::2]), {"m0": FAST, "m1": FAST}, SLOW)
    assert mixed.counts == () and cluster((2, 2)).counts == (2, 2)
    assert all(
        choice.implementation != "hierarchical"
        for choice in NetworkModel(mixed).choices("all_reduce", 1000, np.ones(4), np.ones(4))
    )


@pytest.mark.parametrize("counts", [(2, 2), (8, 8), (3, 1), (1, 2, 1), (4, 4, 4), IRREGULAR])
@pytest.mark.parametrize("kind", KINDS)
def test_prices_are_positive_and_grow_with_the_bytes(counts: tuple[int, ...], kind: str) -> None:
    rng, n = random.Random(repr((counts, kind))), sum(counts)
    for _ in range(20):
        src, dst = (np.array([rng.choice((0, 1, 2, 5)) for _ in range(n)]) for _ in range(2))
        src[rng.randrange(n)] = dst[rng.randrange(n)] = 3
        sides = src / src.sum(), dst / dst.sum()
        last = 0.0
        for nbytes in (0, 1, 10**3, 10**6, 10**9):
            found = seconds(counts, kind, nbytes, *sides)
            traffic = seconds(counts, kind, nbytes, *sides, start=False)
            if kind != "all_to_all":
                assert last < found["hierarchical"]
            elif regular(counts):  # an exchange may have nothing to send
                assert last <= found["hierarchical"]
            else:
                assert "hierarchical" not in found
                continue
            last = found["hierarchical"]
            assert found.keys() == traffic.keys()
            assert all(0 <= traffic[how] < found[how] for how in found)


def test_plans_turn_to_stages_where_the_bytes_outweigh_the_starts() -> None:
    """Two machines of two, latency inside 1 us, links of 10 and 1 GB/s.

    One shot: a tree of two steps, 1 us + 10 us and four times the bytes over the slow link.
    Hierarchical: 2 us inside, 10 us and twice the bytes between, and the bytes inside.

        11 us + 4 b / 1e9  =  12 us + 2 b / 1e9 + b / 1e10   at   b = 1 us / 1.9e-9
    """
    turn = 1e-6 / 1.9e-9
    for b, best in ((math.floor(turn), "one shot"), (math.ceil(turn), "hierarchical")):
        found = seconds((2, 2), "all_reduce", b)
        assert min(found, key=found.__getitem__) == best
    # A hierarchical gather has as many starts and steps, and fewer bytes on the slow link.
    found = seconds((2, 2), "all_gather", 1)
    assert min(found, key=found.__getitem__) == "hierarchical"
    # With equal links, moving data twice is slower.
    alike = NetworkModel(cluster((2, 2), SLOW, SLOW))
    first = alike.choices("all_reduce", 10**7, np.ones(4), np.ones(4))[0]
    assert first.implementation == "one shot"


def test_a_program_takes_each_form_where_it_is_the_faster() -> None:
    """The crossover is again at 1.9e-9 seconds a byte per inner latency. The loss has 4 bytes, the
    gradients 96."""
    graph, program = small_graph(8), small_program(8)
    axes = Axes(
        axes={"batch": Axis(name="batch", units=8)},
        of={(name, int(d)): "batch" for name, _, d in (key.partition(":") for key in program.axes)},
    )
    for turn, expected in (
        (3, ["hierarchical"] * 3),
        (5, ["one shot", "hierarchical", "hierarchical"]),
        (95, ["one shot", "hierarchical", "hierarchical"]),
        (97, ["one shot"] * 3),
    ):
        hardware = HardwareModel(cluster((2, 2), Link(W, turn * 1.9e-9)))
        cost = CostModel(graph, axes, hardware, {"batch": (2, 2, 2, 2)}, 2)
        found = choose_implementations(graph, program, cost).collectives
        assert [c.implementation for c in found] == expected, turn


def test_a_cut_is_whole_and_even() -> None:
    for total, parts in itertools.product(range(9), range(1, 5)):
        cut = even(total, parts)
        assert sum(cut) == total and max(cut) - min(cut) <= 1
    assert cheaper([1, 1, 1]) == "padded" and cheaper([3, 0, 0]) == "grouped"
    assert cheaper([1, 1, 0]) == "padded"  # equal bytes, fewer starts


# --- priced bytes are those sent -------------------------------------------------------------


class Counted(Comm):
    """Forwards every call and counts the elements past each link of its ring."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.calls = comm, []
        self.rank, self.world_size = comm.rank, comm.world_size

    def _count(self, sizes: Sizes, how: str) -> None:
        padded = (self.world_size - 1) * max(sizes)
        self.calls.append(padded if how == "padded" else sum(sizes))

    def all_gather(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        self._count(sizes, how)
        return self._comm.all_gather(x, dim, sizes, how)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sizes, how: str) -> Tensor:
        self._count(sizes, how)
        return self._comm.reduce_scatter(x, dim, sizes, how)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing here takes a maximum")

    def all_reduce(self, x: Tensor, how: str) -> Tensor:
        self.calls.append(2 * (self.world_size - 1) / self.world_size * x.numel())
        return self._comm.all_reduce(x, how)

    def all_to_all(
        self, x: Tensor, src: int, dst: int, src_sizes: Sizes, dst_sizes: Sizes, how: str
    ) -> Tensor:
        raise AssertionError("exchanges in stages are not counted here")

    def send(self, x: Tensor, rank: int) -> Waiting:
        raise AssertionError("no collective here sends to one rank")

    def receive(self, into: Tensor, rank: int) -> Waiting:
        raise AssertionError("no collective here receives from one rank")

    def texts(self, text: str) -> list[str]:
        return self._comm.texts(text)

    def subgroup(self, parts: Sequence[Sequence[int]]) -> Comm:
        raise AssertionError("a subgroup is not cut again")


def counted(counts: tuple[int, ...], kind: str, sizes: tuple[int, ...]) -> tuple[float, float]:
    """Return the elements past a link inside machines and past an adapter, for a collective."""

    def run(flat: Comm) -> tuple[int, int, list[float], list[float]]:
        comm = TwoLevelComm(flat, counts)
        inside, across = (Counted(level) for level in comm.levels)
        comm._levels = Levels(inside, across)
        if kind == "all_reduce":
            comm.all_reduce(torch.zeros(sum(sizes)), NAME)
        elif kind == "all_gather":
            comm.all_gather(torch.zeros(sizes[comm.rank]), 0, sizes, NAME)
        else:
            comm.reduce_scatter(torch.zeros(sum(sizes)), 0, sizes, NAME)
        return comm.machine, comm.column, inside.calls, across.calls

    ranks = run_ranks(sum(counts), run)
    # A stage inside ends with the slowest machine; all columns share the adapters.
    stages = zip(*(calls for _, _, calls, _ in ranks), strict=True)
    columns = {column: calls for _, column, _, calls in ranks if calls}
    return sum(map(max, stages)), sum(map(sum, columns.values()))


@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (3, 1), (1, 2, 1), (4, 4, 4), IRREGULAR])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_priced_bytes_are_those_sent(counts: tuple[int, ...], kind: str) -> None:
    free, unit = Link(1e30, 0.0), Link(1.0, 0.0)
    rng, n = random.Random(repr(counts)), sum(counts)
    for _ in range(5):
        # Multiples of the number of columns need no rounding.
        sizes = tuple(min(counts) * rng.choice((0, 0, 1, 2, 3, 7)) for _ in range(n - 1))
        sizes = (*sizes, 5 * min(counts))
        parts = np.array(sizes) / sum(sizes)
        group_seconds = [
            dict(NetworkModel(cluster(counts, *links)).choices(kind, sum(sizes), parts, parts))[
                NAME
            ]
            for links in ((unit, free), (free, unit))
        ]
        assert counted(counts, kind, sizes) == pytest.approx(group_seconds)
