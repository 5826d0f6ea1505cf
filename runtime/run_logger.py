"""Write the log of a run: each rank measures its steps, and rank 0 writes them."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hap.errors import InputError, reason_of
from hap.files import write_whole
from hap.ir.plan_digest import short_digest
from hap.run_log import LoggedStep, RankFigures
from hap.runtime.hap_module import HapModule
from hap.runtime.timed_lane import TimedLane, TimedStreamLane


class RunLogger:
    """Measures a module's steps from now on. Make one on every rank, before the first step.

    Args:
        path: of the log; empty to measure without one.
        done: steps of the checkpoint that training resumes from; their lines stay in the file.
        last: the loss and the seconds of the last of them, if its line may be absent.

    Memory is measured on CUDA alone, times in collectives on CPUs alone. A step's line is in the
    file when :meth:`step` returns.

    Raises:
        InputError: rank 0 cannot write the file.
    """

    def __init__(
        self, path: str, module: HapModule, done: int = 0, last: Mapping[str, float] | None = None
    ) -> None:
        self._path, self._world_size = path, module._comm.world_size
        self._plan, self._warned = short_digest(module._digest), False
        self._device = module._device
        context: Any = module._ctx
        self._lane: TimedLane | TimedStreamLane
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._lane = TimedStreamLane(context._lane)
        else:
            self._lane = TimedLane(context._lane)
        context._lane = self._lane
        if path and _rank() == 0:
            self._begin("".join(self._kept(done, last)))

    def _kept(self, done: int, last: Mapping[str, float] | None) -> list[str]:
        """Return the lines of earlier steps, without those that will be trained again."""
        try:
            lines = Path(self._path).read_text().splitlines(keepends=True) if done else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise InputError(
                f"the log cannot be read ({error})", where=self._path, hint="change --log"
            ) from error
        kept, newest = [], 0
        for number, line in enumerate(lines, 1):
            try:
                step = json.loads(line)["step"]
                kept += [line] if step <= done else []
                newest = max(newest, step)
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    break  # cut off by a crash
                raise InputError(
                    "this line of the log is damaged",
                    where=f"{self._path}:{number}",
                    hint="change --log",
                ) from error
        if last and newest == done - 1:  # the ranks were lost before they told its figures
            figures = (RankFigures(),) * self._world_size
            missing = LoggedStep(
                step=done, loss=last["loss"], seconds=last["seconds"], ranks=figures
            )
            kept.append(missing.line())
        return kept

    def step(self, number: int, loss: float, seconds: float) -> Sequence[RankFigures]:
        """Write the step that has just ended, and return its figures by rank; call it on all."""
        own = self._figures(seconds)
        ranks = [own]
        if dist.is_initialized():
            ranks = [own] * dist.get_world_size()
            dist.all_gather_object(ranks, own)
        if self._path and _rank() == 0:
            step = LoggedStep(
                step=number, loss=loss, seconds=seconds, ranks=tuple(ranks), plan=self._plan
            )
            self._append(step.line())
        return ranks

    def _figures(self, seconds: float) -> RankFigures:
        waited_s = min(self._lane.waited_s, seconds)
        figures = RankFigures(computing_s=seconds - waited_s, waiting_s=waited_s)
        if isinstance(self._lane, TimedLane):
            spans = self._lane.collectives
            figures = replace(figures, communicating_s=sum(end - begin for begin, end in spans))
        else:
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            figures = replace(figures, memory_bytes=peak)
        self._lane.clear()
        return figures

    def _append(self, line: str) -> None:
        """Add a line; on a full disk warn, once, and leave the line out."""
        size = None
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                size = file.tell() if file.seekable() else None
                file.write(line)
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self._path, size)  # no half of a line before the next one
            if not self._warned:
                warnings.warn(
                    f"{self._path}: steps are missing in the log, which cannot be written now "
                    f"({reason_of(error)}); training goes on",
                    stacklevel=2,
                )
            self._warned = True

    def _begin(self, text: str) -> None:
        try:
            if os.path.isfile(self._path) or not os.path.exists(self._path):
                write_whole(self._path, [text])
                return
            with open(self._path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise InputError(
                f"the log cannot be written ({reason_of(error)})", where=self._path,
                hint="change --log",
            ) from error  # fmt: skip


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
