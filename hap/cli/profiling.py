"""``hap profile``: all ranks measure, rank 0 fits the figures and writes a cluster file.

This module joins the packages: the profiler measures the runtime's collectives, and fits the
figures of the synthesizer's prices.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from hap.cli.rank_watch import watched
from hap.cluster.catalogue import find
from hap.cluster.cluster_file import load_cluster
from hap.cluster.cluster_text import cluster_yaml
from hap.cluster.device import Device
from hap.cluster.topology import Cluster
from hap.errors import HapError, InputError
from hap.files import write_whole
from hap.ir.hierarchical import exists
from hap.launchers import numbered
from hap.profiler import (
    call_timing,
    collective_bench,
    contention_bench,
    device_figures,
    link_figures,
    subset_collectives,
)
from hap.profiler.collective_bench import gathered_from_all
from hap.profiler.probes import Arena, Probe, probes, product_probe
from hap.profiler.samples import (
    BesideRecord,
    ExchangeRecord,
    Header,
    Journal,
    OpRecord,
    RankInfo,
    Record,
    middle,
    of_kind,
    read,
)
from hap.runtime.collectives import Comm, ProcessGroupComm
from hap.runtime.lanes import lane_of
from hap.runtime.launch import init_from_env, report, spawn
from hap.runtime.two_level_comm import Levels, TwoLevelComm
from hap.synthesizer.cost.collective_cost import NetworkModel

Progress = Callable[[int, int, str], None]
"""Called with (number of records, largest number of records, the next step)."""

_HEAP_BYTES = 64 * 2**20
"""More than the outputs of an operator, which then need no new pages, as in a step."""

Groups = tuple[tuple[int, ...], ...]
"""Groups of ranks that run a collective in parallel."""

Launch = Callable[..., Any]
"""Called with a rank's function, ``args`` and ``on_report``, like
:func:`hap.runtime.launch.spawn` with a given number of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings that all ranks receive.

    Attributes:
        output: the cluster file; samples are stored in the same folder.
        nodes: the name of each rank's machine; empty: by host name.
        quick: use fewer sizes and fewer windows.
        resume: keep existing samples.
    """

    output: str
    nodes: tuple[str, ...] = ()
    quick: bool = False
    resume: bool = False

    @property
    def samples(self) -> Path:
        return Path(f"{self.output}.samples.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A measured cluster and the residuals of its fit; ``among`` are those of sets of ranks."""

    cluster: Cluster
    types: tuple[device_figures.Type, ...]
    exchanges: tuple[link_figures.LinkResidual, ...]
    among: tuple[link_figures.LinkResidual, ...]


def profile(
    settings: Settings,
    world_size: int,
    *,
    launch: Launch | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Profile:
    """Start ranks that measure, and write the cluster file.

    Args:
        launch: starts the ranks, such as the ``spawn`` of a testbed; by default they run on
            this machine.

    Raises:
        InputError: the output cannot be written, or existing samples are of other ranks.
        HapError: a rank died; the message names it.
    """
    check(settings, world_size)
    backend = "nccl" if torch.cuda.device_count() >= world_size else "gloo"
    launch = launch or partial(spawn, world_size=world_size, backend=backend)
    launch(measure_as_rank, args=(settings,), on_report=lambda rank, step: progress(*step))
    return conclude(settings)


def check(settings: Settings, world_size: int) -> None:
    """Raise early for errors that would otherwise follow the long work."""
    folder = Path(settings.output).absolute().parent
    if Path(settings.output).is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            "the cluster file cannot be written there", where=settings.output, hint="change -o"
        )
    if settings.nodes and len(settings.nodes) != world_size:
        raise InputError(
            f"machines are named for {len(settings.nodes)} ranks, but there are {world_size}",
            hint="name the machine of each rank",
        )


def measure_as_rank(settings: Settings, progress: Progress | None = None) -> None:
    """Measure on this rank; rank 0 stores the samples.

    Call it on every rank, inside a process group.
    """
    progress = progress or (lambda *step: report(step))
    rank = dist.get_rank()
    nccl = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
    header = _header(settings, device, rank)
    with watched(rank, [r.node for r in header.ranks]) as at:
        known = _shared(_known(settings, header) if rank == 0 else None)
        journal = Journal(settings.samples, header, resume=settings.resume) if rank == 0 else None
        work = _Work.of(settings, device, header)
        done = 0
        for item in work.steps(known):
            if isinstance(item, str):
                at(item)
                if rank == 0:
                    progress(done, work.total, item)
                continue
            done += 1
            if journal and item is not None and item.key not in journal.records:
                journal.add(item)
        if journal:
            journal.close()
            progress(work.total, work.total, "fitting")
        dist.barrier()


def _header(settings: Settings, device: torch.device, rank: int) -> Header:
    """Return the header of this run's records, the same on all ranks."""
    local_rank = numbered("local_rank", rank)
    told = gathered_from_all((socket.gethostname(), local_rank, call_timing.kind_name(device)))
    hosts = [host for host, _, _ in told]
    nodes = settings.nodes or machines(hosts, [local for _, local, _ in told])
    # Emulated machines share the memory of the real one.
    here = call_timing.memory_bytes(device, hosts.count(hosts[rank]))
    memory = gathered_from_all(here)
    ranks = tuple(
        RankInfo(node=node, kind=kind, memory_bytes=nbytes)
        for node, (_, _, kind), nbytes in zip(nodes, told, memory, strict=True)
    )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Header(ranks=ranks, quick=settings.quick, date=today)


def machines(hosts: Sequence[str], local_ranks: Sequence[int]) -> list[str]:
    """Return the name of each rank's machine.

    If several ranks of a host are the first of their machine, the host stands for several
    machines: emulated machines share a host's name.
    """
    firsts = Counter(host for host, local in zip(hosts, local_ranks, strict=True) if local == 0)
    seen: Counter[str] = Counter()
    found = []
    for host, local in zip(hosts, local_ranks, strict=True):
        seen[host] += local == 0
        found.append(f"{host}-{seen[host] - 1}" if firsts[host] > 1 else host)
    return found


def _known(settings: Settings, header: Header) -> dict[str, Record]:
    """Return the records of an earlier run, by key."""
    if not settings.resume or not settings.samples.exists():
        return {}
    with Journal(settings.samples, header, resume=True) as journal:
        return dict(journal.records)


def _shared(known: dict[str, Record] | None) -> dict[str, Record]:
    """Return the records of rank 0, on all ranks."""
    box: list[Any] = [known]
    dist.broadcast_object_list(box, src=0)
    found: dict[str, Record] = box[0]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """The measurements to make, the same on all ranks."""

    device: torch.device
    ranks: int
    pace: call_timing.Pace
    limits: collective_bench.Range
    wanted: Sequence[Probe]
    rings: list[collective_bench.Ring]
    comm: ProcessGroupComm
    nodes: Sequence[str]

    @classmethod
    def of(cls, settings: Settings, device: torch.device, header: Header) -> Self:
        comm, size = ProcessGroupComm(), len(header.ranks)
        return cls(
            device=device, ranks=size, comm=comm,
            pace=call_timing.QUICK if settings.quick else call_timing.FULL,
            limits=collective_bench.QUICK if settings.quick else collective_bench.FULL,
            wanted=[p for p in probes(device) if p.quick or not settings.quick],
            rings=_rings(comm, header) if size > 1 else [], nodes=[r.node for r in header.ranks],
        )  # fmt: skip

    @property
    def total(self) -> int:
        """Return the largest number of records; it grows when the sets of ranks are known."""
        sent = len(collective_bench.pairs(self.ranks)) * len(self.limits.sizes)
        together = sent + collective_bench.total(self.rings, self.limits) + 1
        return len(self.wanted) + (together if self.ranks > 1 else 0)

    def steps(self, known: dict[str, Record]) -> Iterator[str | Record | None]:
        """Yield the name of each step, and then its record, measured unless it is known."""
        arena = Arena(self.device)
        if self.device.type == "cpu":
            torch.zeros(_HEAP_BYTES, dtype=torch.uint8)  # freed, but kept: see keep_memory
        product, product_s = product_probe(self.device).name, [0.0]
        for probe in self.wanted:
            yield probe.name
            found = known.get(f"op/{probe.name}") or self._measured(probe, arena)
            if isinstance(found, OpRecord) and probe.name == product:
                product_s = [middle(seconds) for seconds in found.seconds]
            yield found
        if self.ranks > 1:
            before = {r.key: r for r in of_kind(ExchangeRecord, known)}
            how = self.limits, self.device, before, self.comm
            self.rings.extend(map(self._some, subset_collectives.participants(product_s)))
            yield from collective_bench.messages(self.ranks, *how)
            yield from collective_bench.measure(self.rings, *how)
            once = {r.key: r for r in of_kind(BesideRecord, known)}
            yield from contention_bench.measure(
                self.comm, self._start, product_s, self.device, once
            )

    def _some(self, ranks: contention_bench.Ranks) -> collective_bench.Ring:
        """Return the ring of some ranks, while the others idle."""
        mine = self.comm.rank in ranks
        others = tuple(r for r in range(self.ranks) if r not in ranks)
        few: Comm = self.comm.subgroup((ranks, others))
        counts = _counts([self.nodes[r] for r in ranks])
        if exists(counts) and mine:
            few = TwoLevelComm(few, counts)
            few.levels  # noqa: B018  creates two groups
        elif exists(counts):
            for _ in Levels._fields:  # all ranks create equally many groups
                few.subgroup([range(few.world_size)])
        return collective_bench.Ring(
            comm=few, groups=(ranks,), counts=counts or (len(ranks),), skewed=False
        )

    def _start(self, call: Callable[[], Any]) -> Callable[[], Any]:
        lane = lane_of(self.comm, self.device)
        pending = lane.issue(call)
        return lambda: lane.wait(pending)

    def _measured(self, probe: Probe, arena: Arena) -> OpRecord:
        dist.barrier()  # all ranks at the same time, as in a step
        call = probe.make(arena)
        windows, before = self.pace.windows, probe.after and probe.after(arena)
        if probe.clock == "host":
            seconds = call_timing.seconds_of_host(call, self.device, 4 * windows)
        elif before is None:
            seconds = call_timing.seconds_per_call(call, self.device, self.pace)
        elif probe.clock == "queue":
            seconds = call_timing.seconds_in_queue(before, call, windows)
        else:
            seconds = call_timing.seconds_after(before, call, windows)
        mine = [s / probe.count for s in seconds]
        return OpRecord(
            name=probe.name, work=probe.work, seconds=tuple(gathered_from_all(tuple(mine)))
        )


def _rings(flat: ProcessGroupComm, header: Header) -> list[collective_bench.Ring]:
    """Return all ranks, and each machine's ranks if several machines have several."""
    nodes = [r.node for r in header.ranks]
    counts, (world, *alike) = _counts(nodes), _groups(nodes)
    whole = TwoLevelComm(flat, counts) if exists(counts) else flat
    rings = [collective_bench.Ring(comm=whole, groups=world, counts=counts or (len(nodes),))]
    for groups in alike:
        inside = flat.subgroup(_machines(nodes))
        rings.append(collective_bench.Ring(comm=inside, groups=groups, counts=(len(groups[0]),)))
    return rings


def _groups(nodes: Sequence[str]) -> list[Groups]:
    """Return the groups of each ring among all ranks: all, and those of the largest machines."""
    machines = _machines(nodes)
    widest = max(map(len, machines))
    found: list[Groups] = [(tuple(range(len(nodes))),)]
    if len(machines) > 1 and widest > 1:
        found.append(tuple(group for group in machines if len(group) == widest))
    return found


def _machines(nodes: Sequence[str]) -> Groups:
    """Return the ranks of each machine."""
    return tuple(
        tuple(r for r, node in enumerate(nodes) if node == name) for name in dict.fromkeys(nodes)
    )


def _counts(nodes: Sequence[str]) -> tuple[int, ...]:
    """Return ranks of each machine; empty if some machine's ranks are not consecutive."""
    runs = [k for k, node in enumerate(nodes) if k == 0 or nodes[k - 1] != node]
    if len(runs) != len(set(nodes)):
        return ()
    return tuple(b - a for a, b in zip(runs, [*runs[1:], len(nodes)], strict=True))


def conclude(settings: Settings) -> Profile:
    """Fit the stored samples, and write the cluster file.

    Raises:
        InputError: the samples cannot be read.
        HapError: the written text does not load as the same cluster.
    """
    header, *records = list(read(settings.samples))
    if not isinstance(header, Header):
        raise InputError("the samples lack a header with the ranks", where=str(settings.samples))
    found = fit(
        header, [r for r in records if not isinstance(r, Header)], Path(settings.output).stem
    )
    depth = "quick" if header.quick else "full"
    comment = f"Measured by `hap profile` on {header.date}, {len(records)} samples ({depth})."
    text = cluster_yaml(found.cluster, comment)
    if load_cluster(text).types() != found.cluster.types():
        raise HapError("the cluster file does not load as it was measured", where=settings.output)
    write_whole(settings.output, [text])
    return replace(found, cluster=load_cluster(settings.output))


def fit(header: Header, records: Sequence[Record], name: str) -> Profile:
    """Return the cluster that explains the records best."""
    kinds = device_figures.types(header.ranks, of_kind(OpRecord, records), header.date)
    nodes = [r.node for r in header.ranks]
    of_rank = {rank: kind.device for kind in kinds for rank in kind.ranks}
    places = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    if found := of_kind(BesideRecord, records):
        of_rank = device_figures.beside(of_rank, found[-1], header.date)
    made = tuple(_named(of_rank[rank], nodes[rank], places[rank]) for rank in range(len(nodes)))
    sent = of_kind(ExchangeRecord, records)
    inside, between = link_figures.message_links(nodes, sent, header.date)
    cluster = Cluster(name, made, inside, between)
    of_all = [each for each in sent if each.groups in _groups(nodes)]
    some = subset_collectives.among_some(sent, len(nodes))
    measured, residuals = link_figures.collectives(cluster, of_all, price, header.date)
    among, of_sets = subset_collectives.fitted(cluster, some, price, header.date)
    cluster = replace(cluster, collectives=measured, among=among)
    return Profile(
        cluster=cluster, types=tuple(kinds), exchanges=tuple(residuals), among=tuple(of_sets)
    )


def _named(device: Device, node: str, place: int) -> Device:
    entry = find(device.kind)
    kind = entry.device.kind if entry else device.kind
    return replace(device, name=f"{node}:{place}", node=node, kind=kind)


def price(cluster: Cluster, record: ExchangeRecord) -> float:
    """Return the synthesizer's price of a record's collective; the slowest group counts."""
    found = 0.0
    for group in record.groups:
        network = _network(cluster, group)
        choices = network.choices(
            record.kind, record.nbytes, np.array(record.src), np.array(record.dst)
        )
        found = max(found, dict(choices)[record.how])
    return found


_networks: dict[tuple[int, tuple[int, ...]], tuple[Cluster, NetworkModel]] = {}


def _network(cluster: Cluster, group: tuple[int, ...]) -> NetworkModel:
    key = id(cluster), group
    if key not in _networks or _networks[key][0] is not cluster:
        if len(_networks) > 256:
            _networks.clear()
        _networks[key] = cluster, NetworkModel(cluster.keep(group))
    return _networks[key][1]


def run_as_rank(settings: Settings, progress: Progress) -> Profile | None:
    """Measure as one of the ranks of torchrun or srun; return the result on rank 0."""
    world = init_from_env()
    check(settings, world.size)
    measure_as_rank(settings, progress)
    found = conclude(settings) if world.rank == 0 else None
    dist.destroy_process_group()
    return found


__all__ = ["Profile", "Progress", "Settings", "conclude", "fit", "price", "profile"]
