"""Seconds of the transfers between pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hap.cluster.topology import Cluster
from hap.ir.graph import Graph
from hap.ir.stages import Transfer
from hap.synthesizer.schedule.pipeline_simulator import OnceTransfer, StageSeconds
from hap.synthesizer.stages.stage_times import StageFigures

Ranks = tuple[int, ...]


def send_s(
    cluster: Cluster, groups: Sequence[Ranks], number: int, nbytes: float, to: int | None = None
) -> float:
    """Return the seconds of a message between stage ``number`` and another; default: the next one."""
    devices = cluster.devices
    here, there = groups[number][0], groups[number + 1 if to is None else to][0]
    node = devices[here].node
    link = cluster.intra[node] if node == devices[there].node else cluster.inter
    return link.latency_s + nbytes / link.bandwidth_bytes_per_s


def least_send_s(cluster: Cluster, nbytes: float) -> float:
    """Return seconds that no message between two devices of a cluster falls below."""
    links = [cluster.intra[node] for node in cluster.nodes if len(cluster.ranks(node)) > 1]
    links += [cluster.inter] * (len(cluster.nodes) > 1)
    return min((k.latency_s + nbytes / k.bandwidth_bytes_per_s for k in links), default=0.0)


def stage_seconds(
    cluster: Cluster, groups: Sequence[Ranks], parts: Sequence[Graph],
    transfers: Sequence[Transfer], found: Sequence[tuple[StageFigures, int]],
) -> list[StageSeconds]:  # fmt: skip
    """Return the seconds of each stage with its transfers.

    Args:
        groups: the ranks of each stage.
        parts: the graph of each stage for one microbatch.
        found: each stage's figures, and its microbatches in flight.
    """

    def nbytes(t: Transfer) -> float:
        return float(parts[t.src].tensors[t.tensor].nbytes)

    def sent(src: int, dst: int) -> float:
        across = (
            t for t in transfers
            if min(t.src, t.dst) <= min(src, dst) < max(t.src, t.dst)
            and t.backward == (src > dst) and not t.once
        )  # fmt: skip
        return send_s(cluster, groups, min(src, dst), sum(map(nbytes, across)))

    def awaits(dst: int) -> Iterator[OnceTransfer]:
        total: dict[tuple[int, bool], float] = {}
        for t in (t for t in transfers if t.once and t.dst == dst):
            total[t.src, t.backward] = total.get((t.src, t.backward), 0.0) + nbytes(t)
        for (src, backward), size in total.items():
            # The ranks of a group reduce their sums before they send them.
            reduce_s = found[src][0].after_s if backward and len(groups[src]) > 1 else 0.0
            seconds = reduce_s + send_s(cluster, groups, src, size, dst)
            yield OnceTransfer(src, seconds, backward)

    stages, last = [], len(found) - 1
    for k, (each, flight) in enumerate(found):
        stages.append(
            StageSeconds(
                forward_s=each.forward_s, backward_s=each.backward_s,
                send_s=sent(k, k + 1) if k < last else 0.0,
                return_s=sent(k + 1, k) if k < last else 0.0,
                before_s=each.before_s, after_s=each.after_s, awaits=tuple(awaits(k)),
                in_flight=flight, weights_s=each.weights_s, delay=each.delay,
                interference=max(
                    cluster.devices[r].contention.interference for r in groups[k]
                ),
            )
        )  # fmt: skip
    return stages
