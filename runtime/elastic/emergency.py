"""After a loss, the ranks that are left save what they hold, if it is everything.

No launcher keeps the memory of its processes: those that are left are started again. So before they
end, they write the state after the last step that all of them have finished.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from hap.errors import CheckpointError
from hap.runtime.checkpoints.checkpoint import beside, make, taken
from hap.runtime.checkpoints.checkpoint_folder import VERSION, CheckpointFolder, is_complete
from hap.runtime.checkpoints.checkpoint_layout import layout, survivable, writers
from hap.runtime.checkpoints.checkpoint_shard import ShardSavePlanner
from hap.runtime.checkpoints.checkpoint_storage import SafetensorsWriter, file_of, metadata_of
from hap.runtime.checkpoints.checkpoint_values import encode, random_states
from hap.runtime.checkpoints.checkpoint_writing import writing_of
from hap.runtime.elastic.survivors import (
    DECIDE_S,
    PERIOD_S,
    SAVE_S,
    SaveDecision,
    Survivors,
    forget,
    new_folder,
)
from hap.runtime.hap_module import HapModule
from hap.runtime.launch import end_as_lost

FREEZE_S = 3.0
"""The longest wait for the end of an update that is in progress."""

LONGEST_S = FREEZE_S + DECIDE_S + SAVE_S
"""The longest time from the notice of a loss to the end of the ranks that are left."""

_RAISE_S = 0.5
"""Time for the main thread to raise its own error before the process ends without one."""


class EmergencySave:
    """Saves the state after a loss, if the placements prove that the ranks left hold all of it.

    A context manager, which all ranks enter. An error inside of it counts as a loss: this rank then
    stands still, and so do the others, which see it by the folder.

    Args:
        folder: of the run's checkpoints, seen by all machines.
        keep: as in :func:`hap.save`.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = None) -> None:
        self._place, self._keep = CheckpointFolder(Path(folder).absolute()), keep
        self._watch: _Watch | None = None
        _open.add(self)

    def forget(self, model: torch.nn.Module) -> None:
        """Shut out ranks of earlier starts; call it on all ranks before a checkpoint is chosen."""
        writing_of(model).of_first(lambda: forget(self._place.path))

    def follow(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, step: int,
        scheduler: Any = None, scaler: Any = None,
    ) -> None:  # fmt: skip
        """Watch a module from now on; all ranks call it between two steps.

        Nothing is done if no rank of the plan can be lost without a loss of its shards.

        Args:
            step: the number of steps that are done.
            scheduler, scaler: as in :func:`hap.save`.
        """
        self.close()
        if not isinstance(model, HapModule) or not survivable(model._plan):
            return
        writing = writing_of(model)

        def opened() -> str:
            make(self._place, writing.folders)
            return str(new_folder(self._place.path))

        folder = Path(writing.of_first(opened))
        survivors = Survivors(folder, writing.rank, writing.world_size)
        state = {"scheduler": scheduler, "scaler": scaler}
        self._watch = _Watch(model, optimizer, state, self._place, self._keep, survivors)
        if step:  # a start anew has nothing to save
            self._watch.ended(step, {})
        self._watch.start()

    def ended(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Note that a step has ended: its update, and those of the scheduler and the scaler.

        Args:
            step: the number of steps that are done.
            extra: as in :func:`hap.save`; it must not be changed afterwards. No older checkpoint
                is removed if it has a number that is not finite, such as a loss.
        """
        if self._watch is not None:
            self._watch.ended(step, extra or {})

    def attempt(self) -> None:
        """Save what the ranks that are left hold, if it is everything; training must end then."""
        if self._watch is not None:
            self._watch.attempt()

    def close(self) -> None:
        """Watch no longer."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            self.attempt()
        self.close()


_open: weakref.WeakSet[EmergencySave] = weakref.WeakSet()


def save_what_is_left() -> None:
    """Attempt it for the module that this process trains, from any thread."""
    for emergency in list(_open):
        emergency.attempt()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steady:
    """State that a step changes before its update, as of the end of the last step.

    Attributes:
        drawn: the step of the module's random numbers.
        buffers: copies of those that the forward updates.
        beside: states of the scheduler and the scaler, as JSON.
    """

    step: int
    drawn: int
    random: dict[str, Any]
    buffers: dict[str, Tensor]
    beside: dict[str, Any]
    extra: Mapping[str, Any]


@contextlib.contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Run copies in a stream of their own, since that of a step may wait for a lost rank."""
    if device.type != "cuda":
        yield
        return
    # A thread begins on the first GPU. Back from a stream alone, it would open that one, which may be full.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def _finite(extra: Mapping[str, Any]) -> bool:
    return all(math.isfinite(value) for value in extra.values() if isinstance(value, float))


class _Watch:
    """One module's state between two steps, and the thread that listens to the other ranks.

    The main thread holds ``_updates`` from the begin of an update to the end of its step. A
    thread that saves takes it and keeps it, so that the parameters no longer change.
    """

    def __init__(
        self, model: HapModule, optimizer: torch.optim.Optimizer, given: Mapping[str, Any],
        place: CheckpointFolder, keep: int | None, survivors: Survivors,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._given = model, optimizer, given
        self._place, self._keep, self._survivors = place, keep, survivors
        self._updated = set(model._code.buffers)
        self._steady: _Steady | None = None
        self._updates, self._updating = threading.Lock(), False
        self._attempt, self._attempted = threading.Lock(), False
        self._main = threading.current_thread()
        self._closed = threading.Event()
        self._hook = optimizer.register_step_pre_hook(lambda *_: self._begin())
        self._thread = threading.Thread(target=self._listen, name="loss", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._hook.remove()
        if self._model._comm.rank == 0 and not self._attempted:
            forget(self._place.path)

    def _begin(self) -> None:
        """Hold the lock while parameters change; on CUDA only after all collectives have ended."""
        if not self._updating:
            if self._model._device.type == "cuda":
                torch.cuda.current_stream(self._model._device).synchronize()
            self._updates.acquire()
            self._updating = True

    def ended(self, step: int, extra: Mapping[str, Any]) -> None:
        self._begin()
        buffers = {n: b.clone() for n, b in self._model.named_buffers() if n in self._updated}
        if self._model._device.type == "cuda":
            torch.cuda.current_stream(self._model._device).synchronize()
        self._steady = _Steady(
            step=step, drawn=self._model._ctx.step, random=random_states(), buffers=buffers,
            beside=beside(**self._given), extra=extra,
        )  # fmt: skip
        self._updating = False
        self._updates.release()

    def _listen(self) -> None:
        while not self._closed.wait(PERIOD_S):
            if self._survivors.heard():
                self.attempt()
                if not self._closed.wait(_RAISE_S):
                    end_as_lost(f"rank {self._model._comm.rank}: another rank is lost")

    def attempt(self) -> None:
        """Stand still, agree, and write this rank's part; once."""
        with self._attempt:
            if self._attempted or self._closed.is_set():
                return
            self._attempted = True
            try:
                self._save()
            except Exception as error:  # the run ends in any case, and says what it ends by
                text = f"the state of the remaining ranks was not saved: {error}"
                print(text, file=sys.stderr, flush=True)

    def _save(self) -> None:
        """Raises: OSError, CheckpointError: this rank or another could not write."""
        patience_s = 0.0 if threading.current_thread() is self._main else FREEZE_S
        still = self._updates.acquire(timeout=patience_s)  # never released
        steady = self._steady if still else None
        decision = self._survivors.agree(steady.step if steady else None, self._holds)
        if decision.step is None:
            return
        if steady is None or self._model._comm.rank not in decision.ranks:
            self._survivors.wait()
            return
        try:
            self._write(steady, decision)
        except Exception as error:
            self._survivors.end(f"rank {self._model._comm.rank}: {error}")
            raise
        self._survivors.wait()

    def _holds(self, ranks: Collection[int]) -> bool:
        return writers(self._model._plan, self._model._inputs.values(), ranks) is not None

    def _write(self, steady: _Steady, decision: SaveDecision) -> None:
        rank, first = self._model._comm.rank, decision.ranks[0]
        if rank == first and is_complete(self._place.at(steady.step)):
            self._survivors.end("it is saved already")
            return
        state, index = self._write_part(steady, decision.ranks)
        self._survivors.wrote(index)
        if rank != first:
            return
        parts = self._survivors.written(decision.ranks)
        whole = {"version": VERSION, **state, "files": {}, "tensors": {}}
        for part in parts:
            whole["files"] |= part["files"]
            for name, entry in part["tensors"].items():
                known = whole["tensors"].setdefault(name, {**entry, "chunks": []})
                known["chunks"] += entry["chunks"]
        metadata_of(whole)  # raises an error if a tensor is not whole
        absent = set(index["names"]) - whole["tensors"].keys()
        if absent:
            raise CheckpointError(f"no rank wrote {min(absent)}", where=str(self._place.path))
        self._place.check_newest(steady.step)
        keep = self._keep if _finite(steady.extra) else None
        self._place.publish(self._part, steady.step, whole, keep)
        print(
            f"a rank is lost; step {steady.step} is saved by {len(decision.ranks)} of "
            f"{self._model._comm.world_size} ranks, which hold all of it",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        self._survivors.end("saved")

    @property
    def _part(self) -> Path:
        return self._survivors.folder / "part"

    def _write_part(
        self, steady: _Steady, ranks: tuple[int, ...]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write this rank's shards; return the JSON of a checkpoint, and what was written."""
        self._part.mkdir(exist_ok=True)
        held = layout(self._model, ranks)
        buffers = {n: s.like(steady.buffers.get(n, s.tensor)) for n, s in held.buffers.items()}
        # Tensors that become JSON are copied, too, such as the steps that a fused optimizer counts on its GPU.
        device = self._model._device
        with _aside(device):
            shards, state = taken(
                self._model, self._optimizer, steady.step, replace(held, buffers=buffers)
            )
            state["module"]["step"] = steady.drawn
            state |= {"world_size": len(ranks), "extra": encode(dict(steady.extra))} | steady.beside
            if device.type == "cuda":
                shards = {n: s.like(s.tensor.cpu()) for n, s in shards.items()}
        number = ranks.index(self._model._comm.rank)
        own = {"rng": encode(steady.random, "rng")}
        writer = SafetensorsWriter(
            self._place, steady.step, number, state, own, self._keep, self._part
        )
        planner = ShardSavePlanner()
        planner.set_up_planner(shards, is_coordinator=True)
        plan = planner.create_local_plan()
        results = writer.write_data(plan, planner).value()
        name = file_of(number)
        tensors = {}
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            tensors[item.index.fqn] = {
                "dtype": str(data.properties.dtype).removeprefix("torch."),
                "shape": list(data.size),
                "chunks": [[list(data.chunk.offsets), list(data.chunk.sizes), name]],
            }
        size = next(r.size_in_bytes for r in results if not r.index.fqn)
        return state, {"files": {name: size}, "tensors": tensors, "names": sorted(shards)}
