"""Launch ranks: spawn local processes, or join those that torchrun or srun started.

:func:`spawn` is a small torchrun for one machine, for tests, ``hap verify`` and emulated clusters.
It returns results in rank order, raises the first failure as one error, and leaves no process
running. Each rank talks to the parent over its own pipe:

    rank                          parent
    "begun"                 ->
                            <-    the target and its arguments
    imports, unpickles them
    "ready"                 ->    before_rank(rank, pid), for example: enter a cgroup
                            <-    go
    joins the process group
    "report", any number    ->    on_report(rank, obj)
    "result" or "error"     ->

:func:`init_from_env` joins a process group without such a parent, for programs started by the
lines of :mod:`hap.runtime.launch_lines`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pickle
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist

from hap.errors import HapError, InputError
from hap.launchers import SRUN, launcher, numbered
from hap.runtime.collectives import LATE
from hap.runtime.peer_errors import LOST, meeting_told, of_peer
from hap.runtime.rank_failures import failure
from hap.runtime.rank_process import RankProcess, end_with_parent, environment, kill, start

T = TypeVar("T")

_POLL_S = 0.1  # interval between checks for dead ranks
GRACE_S = 0.5  # after a failure: time to detect other dead ranks, see :func:`hap.runtime.rank_failures.failure`
_EXIT_S = 5.0  # after the last result: time until ranks that still run are killed
_SKEW_S = 5.0  # after errors that another rank caused: time until silent ranks count as hung

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # from <malloc.h>

_to_parent: Connection | None = None  # in a spawned rank: the pipe to the parent
_send_lock = threading.Lock()


def end_as_lost(text: str) -> NoReturn:
    """Print a message and end this process at once, although its threads wait for a lost peer."""
    print(text, file=sys.stderr, flush=True)
    os._exit(LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """This process's rank, the number of ranks, and the device that it computes on."""

    rank: int
    size: int
    local_rank: int
    device: torch.device


def init_from_env(backend: str | None = None, devices: Sequence[str] = ()) -> World:
    """Join the process group that torchrun (RANK, ...) or srun (SLURM_PROCID, ...) describes.

    Args:
        backend: A backend of torch.distributed; default: nccl if CUDA is available, else gloo.
            If it includes nccl, the current CUDA device is set to that of the local rank.
        devices: The names of the ranks' devices, ``node:number``, as of a plan that leaves some out.
            A process that sees more GPUs than the plan uses on its machine takes the one of its number.

    Raises:
        InputError: A variable is missing or not a number, or the rank has no device.
    """
    rank, size, local_rank = map(env_int, launcher() or SRUN)
    if "MASTER_ADDR" not in os.environ:
        hint = "export MASTER_ADDR with the name of the machine on which rank 0 runs"
        raise InputError("MASTER_ADDR is not set", hint=hint)
    os.environ.setdefault("MASTER_PORT", "29500")
    return join_group(rank, size, local_rank, backend, devices=devices)


def join_group(
    rank: int, size: int, local_rank: int, backend: str | None, store: Any = None,
    devices: Sequence[str] = (), own: str = "",
) -> World:  # fmt: skip
    """Choose this rank's device, and join the process group.

    Args:
        local_rank: the place of this process on its machine.
        backend: as in :func:`init_from_env`.
        devices: as in :func:`init_from_env`; ``own`` is this rank's, by default that of its number.
        store: a store of torch.distributed, where the ranks meet; default: the one that MASTER_ADDR and MASTER_PORT name.

    Raises:
        InputError: the rank has no device.
    """
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if "nccl" in backend:
        count = torch.cuda.device_count()
        bound = launcher() == SRUN and count == 1  # srun may bind one GPU to each task
        index = 0 if bound else local_rank
        if own or rank < len(devices):  # a rank too many is refused later, with its reason
            index = _number(devices, own or devices[rank], count, index)
        if index >= count:
            what = f"local rank {local_rank} has no CUDA device: this process sees {count}"
            raise InputError(what, hint="start as many ranks per machine as it has GPUs")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_memory()
    on_cuda = device if device.type == "cuda" else None
    with meeting_told() if store is None else contextlib.nullcontext():
        dist.init_process_group(
            backend, timeout=LATE, rank=rank, world_size=size, device_id=on_cuda, store=store
        )
    return World(rank=rank, size=size, local_rank=local_rank, device=device)


def _number(devices: Sequence[str], own: str, count: int, other: int) -> int:
    """Return the number of a rank's GPU on its machine.

    Args:
        devices: the names of the devices of all processes, among them this process's ``own``.
        count: the GPUs that this process sees.
        other: the result if they are only those in use, or the ranks of several nodes share a machine.
    """
    node, _, number = own.rpartition(":")
    in_use = sum(name.rpartition(":")[0] == node for name in devices)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", in_use))
    return int(number) if here == in_use < count and number.isdigit() else other


class HoldsGroup(Protocol):
    """Uses the process group in a way that must end before the group does."""

    def release(self) -> None: ...


_holders: weakref.WeakSet[HoldsGroup] = weakref.WeakSet()


def release_before_leaving(holder: HoldsGroup) -> None:
    """Have :func:`leave_group` release this object, if it still exists then."""
    _holders.add(holder)


def leave_group() -> None:
    """Leave the process group; all ranks call it at the end.

    ``dist.destroy_process_group`` alone waits for ever if a CUDA graph of a planned module exists: NCCL keeps a
    communicator until all graphs that use it are gone.
    """
    for holder in list(_holders):
        holder.release()
    dist.destroy_process_group()


def is_first_of_machine() -> bool:
    """Whether this process is the first rank of its machine, or no launcher started it."""
    return numbered("local_rank") == 0


def rank_device() -> torch.device:
    """Return this rank's device: the current CUDA device under NCCL, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def keep_memory() -> None:
    """Keep freed memory in this process, as PyTorch's caching allocator does on GPUs.

    By default glibc returns large blocks to the kernel, which clears their pages when they are
    allocated again, in every step: a copy of 32 MiB then takes several times as long. It also
    gives other threads heaps of 64 MiB, and returns all but the first: all share the main heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have no such setting
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_ARENA_MAX, 1)):
            mallopt(parameter, value)


def env_int(name: str) -> int:
    """Return a variable of the launcher.

    Raises:
        InputError: it is missing, or no number.
    """
    value = os.environ.get(name, "")
    if not value.isdecimal():
        what = f"{name} is {value!r}, not a number" if value else f"{name} is not set"
        raise InputError(what, hint="start the program with torchrun or srun")
    return int(value)


def report(obj: object) -> None:
    """Send a small picklable object to ``on_report`` in the parent of a spawned rank.

    Does nothing in a process without such a parent, so that a program may also run under torchrun.
    """
    if _to_parent is not None:
        _send(_to_parent, "report", obj)


class Where:
    """The place in which ranks are spawned: this machine. A subclass may emulate hosts."""

    address = "127.0.0.1"
    """Address of the store that :func:`spawn` opens, as seen by the ranks."""

    def inside(self, rank: int | None) -> contextlib.AbstractContextManager[None]:
        """Return the context in which a rank is started, or (None) the store is opened."""
        return contextlib.nullcontext()

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return environment variables of a rank; they override those of torchrun."""
        return {}

    def started(self, rank: int, pid: int) -> None:
        """Handle the start of a rank's process; its imports may not have run."""


def spawn(
    target: Callable[..., T],
    world_size: int,
    *,
    args: tuple[Any, ...] = (),
    backend: str = "gloo",
    before_rank: Callable[[int, int], None] | None = None,
    on_report: Callable[[int, Any], None] | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
    where: Where | None = None,
    devices: Sequence[str] = (),
) -> list[T]:
    """Run ``target(*args)`` on ``world_size`` new local processes that form a process group.

    Each process has one torch thread and the environment variables of torchrun. Linux only.

    Args:
        target: A function at the top level of a module; its result must be picklable. A script
            that calls ``spawn`` needs ``if __name__ == "__main__":``, since ranks import it.
        backend: As in :func:`init_from_env`.
        before_rank: Called in the parent with (rank, pid), after that rank's imports and before
            it joins the group; no target runs before all of these calls have returned.
        on_report: Called in the parent with (rank, obj) for each :func:`report` of a rank.
        timeout_s: Limit of the whole call in seconds; None: no limit.
        grace_s: After a failure, the longest time for the other ranks to end by themselves.
        where: The hosts that ranks run on; default: this machine.
        devices: As in :func:`init_from_env`.

    Returns:
        The results in rank order.

    Raises:
        InputError: A world size below one, or a target that cannot be pickled.
        HapError: A rank raised (the message has its traceback), died, or exceeded the limit. All
            other ranks are killed. Errors of the two callbacks propagate, likewise.
    """
    if world_size < 1:
        raise InputError(f"{world_size} ranks asked for", hint="ask for at least one")
    try:
        payload = pickle.dumps((target, args, tuple(devices)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        hint = "pass a function at the top level of a module, and picklable arguments"
        raise InputError(
            f"{target!r} cannot be sent to other processes: {error}", hint=hint
        ) from error
    # The parent holds the store, and the kernel chooses a free port for it.
    where = where or Where()
    # The tracker starts here: inside a host, it would keep the host's namespace alive. It warns of semaphores
    # that killed ranks leave, as a progress bar has, and removes them.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    with where.inside(None):  # the store listens on all addresses of that host
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    # A fork of a server does not enter a host that is emulated.
    method = "forkserver" if type(where) is Where and "nccl" not in backend else "spawn"
    ranks: list[RankProcess] = []
    try:
        for rank in range(world_size):
            variables = torchrun_variables(rank, world_size, where.address, store.port)
            with environment({**variables, **where.variables(rank)}), where.inside(rank):
                ranks.append(start(_rank_main, backend, method))
            where.started(rank, ranks[rank].pid)
        results = _collect(ranks, payload, before_rank, on_report, timeout_s, grace_s)
        patience_ends = time.monotonic() + _EXIT_S
        for one in ranks:
            one.process.join(max(0.0, patience_ends - time.monotonic()))
        return results
    finally:
        for one in ranks:
            kill(one)


def _collect(
    ranks: list[RankProcess],
    payload: bytes,
    before_rank: Callable[[int, int], None] | None,
    on_report: Callable[[int, Any], None] | None,
    timeout_s: float | None,
    grace_s: float,
) -> list[Any]:
    """Handle the ranks' messages until all results have arrived; raise on the first failure."""
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    raised: dict[int, tuple[str, int]] = {}  # (text, exit code), in the order of arrival
    ended: set[int] = set()  # ranks whose pipe is closed
    while len(results) < len(ranks):
        ready = wait([rank.pipe for n, rank in enumerate(ranks) if n not in ended], _POLL_S)
        for n, (_, pid, pipe) in enumerate(ranks):
            if pipe not in ready:
                continue
            try:
                kind, body = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                ended.add(n)
                continue
            if kind == "begun":
                _answer(pipe, payload)
            elif kind == "ready":
                if before_rank is not None:
                    before_rank(n, pid)
                _answer(pipe, b"go")
            elif kind == "report" and on_report is not None:
                on_report(n, body)
            elif kind == "result":
                results[n] = body
            elif kind == "error":
                raised[n] = body
        late = [n for n in range(len(ranks)) if n not in results and n not in raised]
        died = {
            n: code
            for n in late
            if (code := ranks[n].process.exitcode) is not None
            and (n in ended or not ranks[n].pipe.poll())  # no message is unread
        }
        if died or raised:
            all_ended = len(results) + len(raised) + len(died) == len(ranks)
            by_peers = {*died.values(), *(code for _, code in raised.values())} == {LOST}
            wait_s = 0.0 if all_ended else max(grace_s, _SKEW_S) if by_peers else grace_s
            deadline = min(deadline, time.monotonic() + wait_s)
        if time.monotonic() >= deadline:
            raise failure(died, raised, late, timeout_s)
    return [results[n] for n in range(len(ranks))]


def _answer(pipe: Connection, message: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # the rank died; _collect sees its exit code
        pipe.send_bytes(message)


def _rank_main(pipe: Connection, backend: str, variables: Mapping[str, str]) -> None:
    """Run a spawned rank from its start to its exit."""
    global _to_parent
    end_with_parent()
    os.environ.clear()
    os.environ.update(variables)
    _to_parent = pipe
    try:
        # Arguments come by this pipe: multiprocessing hangs if a rank dies before it reads them.
        _send(pipe, "begun", None)
        target, args, devices = pickle.loads(pipe.recv_bytes())
        torch.set_num_threads(1)
        _send(pipe, "ready", None)
        pipe.recv_bytes()
        init_from_env(backend, devices)
        result = target(*args)
        if dist.is_initialized():
            leave_group()
        _send(pipe, "result", result)
    except BaseException as error:
        # Do not destroy the process group: that could wait for the peers.
        summary = "".join(traceback.format_exception_only(error)).strip()
        # Messages for people are printed as they are; other errors need their traceback.
        for_people = isinstance(error, HapError)
        text = str(error) if for_people else f"{summary}\n\n{traceback.format_exc().rstrip()}"
        code = error.exit_code if isinstance(error, HapError) else LOST if of_peer(error) else 1
        _send(pipe, "error", (text, code))
        sys.exit(1)


def _send(pipe: Connection, kind: str, body: object) -> None:
    # Plain pickle, not torch's: a tensor sent by handle is lost when its rank exits.
    message = pickle.dumps((kind, body))
    with _send_lock:
        pipe.send_bytes(message)


def torchrun_variables(rank: int, world_size: int, address: str, port: int) -> dict[str, str]:
    """Return the variables of a rank whose parent serves the store, as torchrun sets them."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent serves the store
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
