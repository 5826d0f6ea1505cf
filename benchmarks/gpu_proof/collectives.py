"""Every collective that plans use, on real ranks, against the emulator: uneven and empty shards.

Terms are small integers, so that sums are exact in any order and results must agree bit for bit.
The log-sum-exp is not a sum of integers: it may differ by a few roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line
from benchmarks.gpu_proof.settings import Settings
from hap.cluster.link import IMPLEMENTATIONS
from hap.ir.hierarchical import regular
from hap.runtime.collectives import Comm
from hap.runtime.emulate import run_ranks
from hap.runtime.two_level_comm import TwoLevelComm

PART = "collectives"
DTYPES = ("float32", "float64", "bfloat16")
LSE_ROUNDINGS = 8


def run(settings: Settings) -> Iterator[Line]:
    """Yield one line per world size and dtype."""
    for world in dict.fromkeys((1, settings.ranks)):
        if world == 1 and not settings.on_gpu:
            reason = "gloo at world size 1 shows nothing that more ranks do not"
            yield Line(part=PART, claim="world size 1", outcome=SKIPPED, reason=reason)
            continue
        found = settings.on_ranks(every_dtype, world)
        expected = run_ranks(world, partial(every_dtype, device=torch.device("cpu")))
        for dtype in DTYPES:
            pairs = [(name, real, emulated[dtype][name])
                     for mine, emulated in zip(found, expected, strict=True)
                     for name, real in mine[dtype].items()]  # fmt: skip
            wrong = sorted(
                {name for name, real, emulated in pairs if not _equal(name, real, emulated)}
            )
            names = len({name for name, _, _ in pairs})
            yield Line(
                part=PART, claim=f"{settings.backend}, {world} ranks, {dtype}: bits of the emulator",
                outcome=MISSED if wrong else MET, seen=f"{names - len(wrong)} of {names} agree",
                aim="all", reason=f"wrong: {', '.join(wrong)}" if wrong else "",
            )  # fmt: skip


def every_dtype(comm: Comm, device: torch.device) -> dict[str, dict[str, Tensor]]:
    """Return dtype -> collective -> this rank's result, on the CPU."""
    return {dtype: every_collective(comm, device, getattr(torch, dtype)) for dtype in DTYPES}


def every_collective(comm: Comm, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return collective, implementation and sizes -> this rank's result, on the CPU."""
    found: dict[str, Tensor] = {}
    world = comm.world_size
    comms: dict[str, Comm] = {"": comm}
    for counts in machines(world):
        comms[f"on machines of {counts} "] = TwoLevelComm(comm, counts)

    def integers(*shape: int, same: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) + (0 if same else 101 * comm.rank))
        drawn = torch.randint(-6, 7, shape, generator=generator)
        return drawn.to(device=device, dtype=dtype)

    for place, on in comms.items():
        for sizes in shards(world):
            for dim in (0, 1):
                whole = [4, 4]
                whole[dim] = sum(sizes)
                mine = list(whole)
                mine[dim] = sizes[on.rank]
                told = f"{place}dim {dim} of {sizes}"
                for how in _ways("all_gather", place):
                    found[f"all_gather {how} {told}"] = on.all_gather(
                        integers(*mine), dim, sizes, how
                    )
                    many = on.all_gather_many([integers(*mine)] * 2, [dim] * 2, [sizes] * 2, how)
                    found[f"all_gather_many {how} {told}"] = torch.stack(many)
                for how in _ways("reduce_scatter", place):
                    found[f"reduce_scatter {how} {told}"] = on.reduce_scatter(
                        integers(*whole), dim, sizes, how
                    )
            flat = not isinstance(on, TwoLevelComm)
            for how in _ways("all_to_all", place) if flat or regular(on.counts) else ():
                other = list(reversed(sizes))
                x = integers(sizes[on.rank], sum(other))
                moved = on.all_to_all(x, 0, 1, sizes, other, how)
                found[f"all_to_all {how} {place}{sizes}"] = moved
        for how in _ways("all_reduce", place):
            for shape in ((5, 3), (1,), (0, 4), ()):
                found[f"all_reduce {how} {place}{shape}"] = on.all_reduce(integers(*shape), how)
        for how in _ways("all_reduce_lse", place):
            if (
                dtype != torch.bfloat16
            ):  # losses keep their log-sum-exp in single precision or better
                found[f"all_reduce_lse {how} {place}"] = on.all_reduce_lse(integers(6, 2), how)
        found[f"all_reduce_max {place}"] = on.all_reduce_max(integers(6, 2))
    return {name: tensor.cpu() for name, tensor in found.items()}


def shards(world: int) -> list[list[int]]:
    """Return sizes of shards: equal, growing, alternately empty, all on the last rank."""
    return [
        [2] * world,
        [rank + 1 for rank in range(world)],
        [3 if rank % 2 else 0 for rank in range(world)] if world > 1 else [3],
        [0] * (world - 1) + [5],
    ]


def machines(world: int) -> list[tuple[int, ...]]:
    """Return ranks per machine of two-level communicators: two equal or two unequal machines."""
    if world < 4:
        return []
    return [(world // 2, world // 2), (world - 1, 1)] if world % 2 == 0 else [(world - 2, 2)]


def _ways(kind: str, place: str) -> tuple[str, ...]:
    """Return the implementations of a collective on a flat, or a two-level, communicator."""
    if place:
        return ("hierarchical",) if "hierarchical" in IMPLEMENTATIONS[kind] else ()
    return tuple(how for how in IMPLEMENTATIONS[kind] if how != "hierarchical")


def _equal(name: str, real: Tensor, emulated: Tensor) -> bool:
    if not name.startswith("all_reduce_lse"):
        return torch.equal(real, emulated)
    room = LSE_ROUNDINGS * torch.finfo(real.dtype).eps
    return bool(torch.allclose(real, emulated, rtol=room, atol=room))
