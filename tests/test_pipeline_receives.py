"""Pipelines whose messages are kernels, as NCCL's are: a host that waits for its GPU waits for both ends.

No GPU is needed: the turns are checked in a model, and emulated ranks wait as such hosts do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch

import hap
from hap.ir.pipeline_order import AHEAD, Turn, first_turns, turns
from hap.runtime.collectives import Waiting
from hap.runtime.emulate import EmulatedComm, run_ranks
from hap.runtime.hap_module import HapModule
from hap.runtime.pipeline import boundary, runner
from tests.random_plans import benchmark_case
from tests.random_stages import random_staged_plan

Message = tuple[int, int, bool, int]
"""Sending and receiving stage, whether it is a gradient, microbatch."""


def ends(orders: Sequence[Iterable[Turn]], ahead: int) -> bool:
    """Whether the stages come to their end if a turn begins when all its stage's messages have both ends."""
    left = [list(order) for order in orders]
    count = max(turn.microbatch for turn in left[0]) + 1
    sent, posted = set[Message](), set[Message]()

    def post(stage: int) -> None:
        """Post the receives up to the next turn's, and those ahead of it."""
        for source, backward in ((stage - 1, False), (stage + 1, True)):
            if 0 <= source < len(left):
                open_ = [
                    t.microbatch
                    for t in left[stage]
                    if (t.backward, t.weights) == (backward, False)
                ]
                turn = left[stage][0]
                now = turn.backward == backward and not turn.weights
                until = (open_[0] if open_ else count) + now + ahead
                posted.update((source, stage, backward, k) for k in range(min(until, count)))

    moved = True
    while moved:
        moved = False
        for stage in range(len(left)):
            if not left[stage]:
                continue
            known = len(posted)
            post(stage)
            moved |= len(posted) > known
            if all(m in sent for m in posted if m[1] == stage) and all(
                m in posted for m in sent if m[0] == stage
            ):
                turn = left[stage].pop(0)
                to = stage - 1 if turn.backward else stage + 1
                if not turn.weights and 0 <= to < len(left):
                    sent.add((stage, to, turn.backward, turn.microbatch))
                moved = True
    return not any(left)


IN_FLIGHT = ([1], [2, 1], [1, 1], [3, 2, 1], [4, 3, 2, 1], [4, 2], [8, 8], [8, 6, 4, 2])


@pytest.mark.parametrize("in_flight", IN_FLIGHT)
@pytest.mark.parametrize("delay", range(4))
@pytest.mark.parametrize("count", [1, 3, 16])
def test_first_turns_end_although_hosts_wait(in_flight: list[int], delay: int, count: int) -> None:
    stages = len(in_flight)
    orders = [
        list(first_turns(count, most, delay if k else 0, k, stages))
        for k, most in enumerate(in_flight)
    ]
    assert ends(orders, 0)
    for order, most in zip(orders, in_flight, strict=True):
        assert sorted(order) == sorted(
            turns(count, most, min(1, delay) if order is not orders[0] else 0)
        )


def test_other_turns_and_receives_ahead_would_not_end() -> None:
    assert not ends([turns(16, 4), turns(16, 2, 2)], 0)
    assert not ends([turns(16, 2), turns(16, 1)], AHEAD)


class Hosts:
    """Counts both ends of the messages of emulated ranks, and waits as a host that loads a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent, self.posted = Counter[tuple[int, int, int]](), Counter[tuple[int, int, int]]()
        self.comms: list[EmulatedComm] = []  # they live, so that their ids differ
        self.rank = threading.local()
        send, receive = EmulatedComm.send, EmulatedComm.receive

        def sending(comm: EmulatedComm, x: torch.Tensor, rank: int) -> Waiting:
            self._note(self.sent, comm, comm.rank, rank)
            return send(comm, x, rank)

        def receiving(comm: EmulatedComm, into: torch.Tensor, rank: int) -> Waiting:
            self._note(self.posted, comm, rank, comm.rank)
            return receive(comm, into, rank)

        monkeypatch.setattr(EmulatedComm, "send", sending)
        monkeypatch.setattr(EmulatedComm, "receive", receiving)

    def _note(self, what: Counter[Any], comm: EmulatedComm, src: int, dst: int) -> None:
        self.comms.append(comm)
        key = (id(comm._world), src, dst)
        what[key] += 1
        mine = self.rank.__dict__.setdefault("keys", set())
        mine.add((key, comm.rank == src))

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        for key, sending in self.rank.__dict__.get("keys", ()):
            mine, other = (self.sent, self.posted) if sending else (self.posted, self.sent)
            while other[key] < mine[key]:
                if time.monotonic() > deadline:
                    raise TimeoutError("a message has one end only")
                time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "seed"), [((1, 1), 2), ((2, 1, 2), 3), ((1, 1, 1, 1), 1)])
def test_the_first_step_ends_although_hosts_wait(
    groups: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one takes the planned turns; receives are posted at their turns in both."""
    case = benchmark_case("bert", "tiny")  # an embedding in two stages
    plan = random_staged_plan(case, groups, seed, microbatches=8)
    hosts, run = Hosts(monkeypatch), runner._Step._run
    waiting = threading.Event()

    def waits(step: Any, *args: Any, **named: Any) -> None:
        if waiting.is_set():
            hosts.wait()
        run(step, *args, **named)

    monkeypatch.setattr(runner._Step, "_run", waits)
    monkeypatch.setattr(runner, "receives_ahead", lambda device: 0)

    def losses(comm: hap.Comm) -> list[float]:
        module = HapModule(plan, case.model, comm, torch.device("cpu"))
        batch: Any = plan.local_batch(case.batch, comm.rank)
        found = []
        for first in (True, False):
            comm.agree("")
            waiting.set() if first else waiting.clear()
            comm.agree("")
            loss = module(**batch) if isinstance(batch, Mapping) else module(*batch)
            loss.backward()
            found.append(loss.item())
        return found

    expected = case.loss_of(case.model).item()
    for found in run_ranks(plan.world_size, losses):
        assert found == pytest.approx([expected, expected], rel=1e-5)


def test_receives_ahead_by_device() -> None:
    assert boundary.receives_ahead(torch.device("cpu")) == AHEAD
    assert boundary.receives_ahead(torch.device("cuda")) == 0


def test_one_queue_of_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert boundary.receive_stream(torch.device("cpu")) is None
    with pytest.raises(hap.InputError, match="CUDA_DEVICE_MAX_CONNECTIONS is 1"):
        boundary.receive_stream(torch.device("cuda"))
