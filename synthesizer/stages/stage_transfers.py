"""Seconds of the transfers between pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from hap.cluster.topology import Cluster
from hap.ir.graph import Graph
from hap.ir.stage_messages import given_placement, messages, rows_of
from hap.ir.stages import Stage, Transfer
from hap.synthesizer.cost.message_cost import link_loads, messages_s
from hap.synthesizer.schedule.pipeline_simulator import OnceTransfer, StageSeconds
from hap.synthesizer.stages.stage_times import StageFigures

Ranks = tuple[int, ...]


def even_send_s(cluster: Cluster, src: Ranks, dst: Ranks, nbytes: float) -> float:
    """Return the seconds of sending a tensor from a group to another if ranks have equal rows of it."""
    each = 1 / (len(src) * len(dst))
    ends_of = [
        {r: (k * len(other), (k + 1) * len(other)) for k, r in enumerate(group)}
        for group, other in ((src, dst), (dst, src))
    ]
    sent = messages(*ends_of, split=True)
    return messages_s(cluster, ((m.src, m.dst, (m.stop - m.start) * each * nbytes) for m in sent))


class StageTransfers:
    """The transfers of a pipeline, priced by the messages of which they consist.

    Args:
        parts: the graph of each stage for one microbatch.
        stages: with ranks of ``cluster``.
    """

    def __init__(
        self, cluster: Cluster, parts: Sequence[Graph], stages: Sequence[Stage],
        transfers: Sequence[Transfer],
    ) -> None:  # fmt: skip
        self._cluster, self._parts, self._stages = cluster, parts, stages
        self._transfers = transfers

    def messages(self, t: Transfer) -> Iterator[tuple[int, int, float]]:
        """Yield the messages of a tensor of one microbatch: sender, receiver, bytes."""
        src, dst = self._stages[t.src], self._stages[t.dst]
        graph, tensor = self._parts[t.src], self._parts[t.src].tensors[t.tensor]
        given = given_placement(graph, src.program, t)
        held = rows_of(graph, src, t.tensor, given)
        needed = rows_of(self._parts[t.dst], dst, t.tensor, dst.program.inputs[t.tensor])
        row = tensor.nbytes / max(tensor.shape[0] if tensor.shape else 1, 1)
        for m in messages(held, needed, split=given.sharded):
            yield m.src, m.dst, (m.stop - m.start) * row

    def together_s(self, transfers: Iterable[Transfer]) -> float:
        """Return the seconds of transfers that begin at once."""
        return messages_s(self._cluster, (m for t in transfers for m in self.messages(t)))

    @cached_property
    def _boundaries(self) -> list[tuple[float, float]]:
        """Seconds of a microbatch at each boundary, of the forward and of the backward."""
        return [(self._sent(k, k + 1), self._sent(k + 1, k)) for k in range(len(self._stages) - 1)]

    def _sent(self, src: int, dst: int) -> float:
        across = (
            t for t in self._transfers
            if min(t.src, t.dst) <= min(src, dst) < max(t.src, t.dst)
            and t.backward == (src > dst) and not t.once
        )  # fmt: skip
        return self.together_s(across)

    @cached_property
    def _once(self) -> list[dict[tuple[int, bool], list[Transfer]]]:
        """Transfers to each stage once per step, by sender and direction."""
        found: list[dict[tuple[int, bool], list[Transfer]]] = []
        for dst in range(len(self._stages)):
            by_source: dict[tuple[int, bool], list[Transfer]] = {}
            for t in (t for t in self._transfers if t.once and t.dst == dst):
                by_source.setdefault((t.src, t.backward), []).append(t)
            found.append(by_source)
        return found

    def _once_s(self, transfers: Sequence[Transfer], found: Sequence[StageFigures]) -> float:
        """Return the seconds of transfers once per step, with conversions that run beside them.

        While all pieces but one are on their way, another is converted. Both load the links of the stage
        that converts.
        """
        src, dst, backward = transfers[0].src, transfers[0].dst, transfers[0].backward
        sent_s = self.together_s(transfers)
        converting = src if backward else dst
        pieces = [p for t in transfers if (p := found[converting].pieces.get(t.tensor))]
        # The ranks of a group reduce their sums before they send them.
        before_s = found[src].returned_s if backward else 0.0
        if not pieces:
            return before_s + sent_s
        local_s, count = sum(s for s, _ in pieces), min(n for _, n in pieces)
        both_s = local_s + self._load_s(transfers, converting)
        return before_s + max(sent_s, both_s) + min(sent_s, local_s) / count

    def _load_s(self, transfers: Sequence[Transfer], number: int) -> float:
        """Return the seconds for which transfers load the links over which a stage communicates."""
        ranks = self._stages[number].ranks
        nodes = {self._cluster.devices[r].node for r in ranks}
        inside = len(nodes) == 1
        ends: set[object] = {*ranks} if inside else {*nodes}
        _, loads = link_loads(self._cluster, (m for t in transfers for m in self.messages(t)))
        way = "out" if transfers[0].src == number else "in"
        return max((loads.get((end, way, inside), 0.0) for end in ends), default=0.0)

    def seconds(self, found: Sequence[StageFigures]) -> list[StageSeconds]:
        """Return the seconds of each stage with its transfers, given the stages' figures."""
        stages, boundaries = [], [*self._boundaries, (0.0, 0.0)]
        for each, stage, once, (there, back) in zip(
            found, self._stages, self._once, boundaries, strict=True
        ):
            awaits = tuple(
                OnceTransfer(src, self._once_s(transfers, found), backward)
                for (src, backward), transfers in once.items()
            )
            stages.append(
                StageSeconds(
                    forward_s=each.forward_s, backward_s=each.backward_s, send_s=there,
                    return_s=back, before_s=each.before_s, shared_s=each.shared_s,
                    after_s=each.after_s, early_s=each.early_s,
                    hidden_s=each.hidden_s, weights_hidden_s=each.weights_hidden_s, awaits=awaits,
                    in_flight=each.in_flight, weights_s=each.weights_s,
                    split_s=each.split_s, delay=each.delay,
                    interference=max(
                        self._cluster.devices[r].contention.interference for r in stage.ranks
                    ),
                )
            )  # fmt: skip
        return stages
