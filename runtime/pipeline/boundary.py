"""Boundaries between stages, as seen by one rank: it sends its rows of tensors, or receives them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hap.errors import InputError
from hap.ir.graph import Graph
from hap.ir.pipeline_order import AHEAD
from hap.ir.plan import Plan
from hap.ir.program import Value
from hap.ir.shared_pieces import piece, pieces_of
from hap.ir.stage_messages import Message, given_placement, messages, rows_of
from hap.ir.stages import Stage, Transfer
from hap.runtime.collectives import Comm, Waiting


class Boundary:
    """One tensor between two stages, as seen by one rank.

    Its placements where it is made and where it is read are replicated, or shards by rows.

    Args:
        graphs, stages: those of a microbatch.
        rank: this rank in the plan.
        comm: the communicator of :func:`direction_comms`.
        receiving: the stream of :func:`receive_stream`.
    """

    def __init__(
        self, graphs: Sequence[Graph], stages: Sequence[Stage], transfer: Transfer, rank: int,
        comm: Comm, receiving: torch.cuda.Stream | None = None,
    ) -> None:  # fmt: skip
        self.transfer, self._comm, self._receiving = transfer, comm, receiving
        tensor = transfer.tensor
        src, dst = stages[transfer.src], stages[transfer.dst]
        self.given = given_placement(graphs[transfer.src], src.program, transfer)
        self.wanted = dst.program.inputs[tensor]
        held = rows_of(graphs[transfer.src], src, tensor, self.given)
        needed = rows_of(graphs[transfer.dst], dst, tensor, self.wanted)
        converting = transfer.src if transfer.backward else transfer.dst
        own = stages[converting]
        self.pieces = 1
        """In how many pieces of rows the tensor crosses, one after the other."""
        if transfer.once:
            self.pieces = pieces_of(graphs[converting], own.program, len(own.ranks), tensor)
        self._sharded = held if transfer.backward else needed
        self._messages = messages(held, needed, split=self.given.sharded)
        self._rank = rank
        self._number = {r: k for k, r in enumerate(sorted((*src.ranks, *dst.ranks)))}
        self._start = {**held, **needed}.get(rank, (0, 0))[0]
        shape = graphs[transfer.src].tensors[tensor].shape
        rows = needed.get(rank, (0, 0))
        self._shape = (rows[1] - rows[0], *shape[1:]) if shape else shape
        self._whole = not shape

    @property
    def sends(self) -> Value:
        """The value that the sending stage makes."""
        return Value(self.transfer.tensor, self.given)

    @property
    def arrives(self) -> Value:
        """The value that the receiving stage reads."""
        return Value(self.transfer.tensor, self.wanted)

    def send(self, x: Tensor) -> list[tuple[Tensor, Waiting]]:
        """Start to send this rank's part; the tensors must live until the waits return."""
        return [sent for k in range(self.pieces) for sent in self._send(x, self._start, k)]

    def send_piece(self, number: int, x: Tensor) -> list[tuple[Tensor, Waiting]]:
        """Start to send this rank's rows of a piece."""
        start, _ = piece(*self._sharded[self._rank], number, self.pieces)
        return self._send(x, start, number)

    def _send(self, x: Tensor, start: int, number: int) -> list[tuple[Tensor, Waiting]]:
        """Start to send this rank's part of a piece; ``x`` has its rows from ``start`` on."""
        found = []
        for m in self._messages_of(number):
            if m.src == self._rank:
                rows = x if self._whole else x[m.start - start : m.stop - start]
                rows = rows.contiguous()
                found.append((rows, self._comm.send(rows, self._number[m.dst])))
        return found

    def receive(self, dtype: torch.dtype, device: torch.device) -> Arrival:
        """Start to receive this rank's part."""
        with torch.cuda.stream(self._receiving):  # without effect if that is None
            return self._receive(dtype, device)

    def _receive(self, dtype: torch.dtype, device: torch.device) -> Arrival:
        into = torch.empty(self._shape, dtype=dtype, device=device)
        pieces = []
        for number in range(self.pieces):
            waits = []
            for m in self._messages_of(number):
                if m.dst == self._rank:
                    rows = m.start - self._start, m.stop - self._start
                    part = into if self._whole else into[slice(*rows)]
                    waits.append(self._comm.receive(part, self._number[m.src]))
            pieces.append(waits)
        return Arrival(into, pieces)

    def _messages_of(self, number: int) -> list[Message]:
        """Return the messages of a piece: the pieces are of the rows of each rank that converts them."""
        if self.pieces == 1:
            return self._messages
        found = []
        for m in self._messages:
            rows = self._sharded[m.src if self.transfer.backward else m.dst]
            first, end = piece(*rows, number, self.pieces)
            start, stop = max(m.start, first), min(m.stop, end)
            if start < stop:
                found.append(m._replace(start=start, stop=stop))
        return found


def direction_comms(
    plan: Plan, transfers: Sequence[Transfer], comm: Comm, device: torch.device
) -> dict[tuple[int, int], Comm]:
    """Return the communicator of each pair of stages (sender, receiver); a collective call.

    Its ranks are connected. NCCL connects two ranks at their first message, and blocks both until the other one
    has issued it as well: ranks that each expect another's first message would wait for ever. So they exchange
    one element here, pair by pair, in one order on all ranks.

    NCCL runs the messages of one communicator in the order in which a rank issues them. In each of these a
    rank only sends or only receives, so that a message never waits behind a receive that depends on it.
    """
    assert plan.stages is not None
    stages, found = plan.stages.stages, {}
    for src, dst in sorted({(t.src, t.dst) for t in transfers}):
        members = sorted((*stages[src].ranks, *stages[dst].ranks))
        others = [[rank] for rank in range(comm.world_size) if rank not in members]
        group = found[src, dst] = comm.subgroup([members, *others])
        element = torch.zeros(1, device=device)
        for sender, receiver in itertools.product(stages[src].ranks, stages[dst].ranks):
            if comm.rank == sender:
                group.send(element, members.index(receiver))()
            elif comm.rank == receiver:
                group.receive(element, members.index(sender))()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return found


def receive_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream of a GPU in which receives are issued, so that they do not wait for its computing.

    Raises:
        InputError: the environment has the GPU run all streams one after the other.
    """
    if device.type != "cuda":
        return None
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise InputError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: messages between stages would queue behind kernels that wait for "
            "them",
            hint="unset it, or set it to 8 or more",
        )
    return torch.cuda.Stream(device)


def receives_ahead(device: torch.device) -> int:
    """Return for how many microbatches ahead receives are posted.

    gloo's receives wait in memory. NCCL's are kernels that wait on the GPU: a host that waits for its whole
    GPU, as to load a kernel, would wait for all of them. There each is posted at its turn, and arrives
    earlier because the host is ahead of the GPU.
    """
    return 0 if device.type == "cuda" else AHEAD


Arrivals = dict[Value, "Arrival"]


class Incoming:
    """The tensors that one direction brings to a stage, microbatch by microbatch.

    Receives are posted in the order in which the tensors are sent.

    Args:
        count: the number of microbatches.
        each: posts the receives of a microbatch.
        once: posts those of what comes after all of them.
        ahead: the result of :func:`receives_ahead`.
    """

    def __init__(
        self, count: int, each: Callable[[int], Arrivals], once: Callable[[], Arrivals], ahead: int
    ) -> None:
        self._count, self._each, self._once, self._ahead = count, each, once, ahead
        self._posted: list[Arrivals] = []
        self.once: Arrivals = {}
        """Arrivals of sums, once per step; their receives are posted after all others."""
        self._post(ahead)

    def take(self, number: int) -> dict[Value, Tensor]:
        """Return the tensors of a microbatch as soon as they are there."""
        self._post(number + 1)
        arrivals, self._posted[number] = self._posted[number], {}
        found = {value: arrival.wait() for value, arrival in arrivals.items()}
        self._post(number + 1 + self._ahead)
        if number + 1 == self._count:
            self.once = self._once()
        return found

    def _post(self, until: int) -> None:
        for number in range(len(self._posted), min(until, self._count)):
            self._posted.append(self._each(number))


class Arrival:
    """A tensor that is arriving, in one or more pieces."""

    def __init__(self, into: Tensor, pieces: list[list[Waiting]]) -> None:
        self._into, self._pieces = into, pieces

    def wait(self) -> Tensor:
        """Return the tensor as soon as all of it is there."""
        for number in range(len(self._pieces)):
            self.wait_piece(number)
        return self._into

    def wait_piece(self, number: int) -> Tensor:
        """Return the rows of a piece as soon as they are there."""
        waits = self._pieces[number]
        while waits:
            waits.pop(0)()
        if self._into.is_cuda:  # made in the stream of receives
            self._into.record_stream(torch.cuda.current_stream(self._into.device))
        if len(self._pieces) == 1:
            return self._into
        first, end = piece(0, len(self._into), number, len(self._pieces))
        return self._into[first:end]
