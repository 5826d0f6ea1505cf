"""``hap run --elastic`` as one process of torchrun's: train with the devices that are there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hap.cli.worker import RunJob, train_and_print
from hap.errors import HapError, InputError
from hap.ir.plan import Plan
from hap.part_plans import PartPlans
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder
from hap.runtime.elastic.emergency import save_what_is_left
from hap.runtime.elastic.meeting import Meeting, meet
from hap.runtime.elastic.notice import SavedAndEnded
from hap.runtime.heartbeats import Heartbeats
from hap.runtime.launch import end_as_lost, leave_group
from hap.runtime.peer_errors import of_peer
from hap.units import format_seconds


def run_elastic(job: RunJob) -> None:
    """Meet the other processes, take the plan for these devices, and train.

    A process whose device has no part in that plan waits for the end of the run.

    Raises:
        InputError: the environment names no device of the plan.
        SavedAndEnded: there was a SIGTERM.
    """
    assert job.checkpoints is not None
    folder = job.checkpoints.folder
    plans = PartPlans(job.path, Path(folder) / "plans")
    sys.argv = job.argv(plans.whole)
    meeting = meet(plans.whole.cluster)
    job = replace(job, again=_all_again(meeting, folder))
    own, ending = meeting.names.index(meeting.own), None
    with Heartbeats(meeting.connection(), meeting.names, own, _lost):
        path, how = _agreed(meeting, plans)
        try:
            ending = _train(job, meeting, path, how, plans)
        except RuntimeError as error:
            if not of_peer(error):
                raise
            reason = str(error).partition("\n")[0]
            end_as_lost(f"{meeting.own}: another rank is lost ({reason})")
    if ending is not None:  # all processes end: none waits for another
        raise ending
    meeting.leave()


def _lost(text: str) -> NoReturn:
    print(text, file=sys.stderr, flush=True)
    save_what_is_left()
    end_as_lost("this rank ends")


def _train(
    job: RunJob, meeting: Meeting, path: str, how: str, plans: PartPlans
) -> SavedAndEnded | None:
    """Train if this device has a part in the plan, else wait for the end; return a notice's end."""
    plan = Plan.load(path)
    names = tuple(device.name for device in plan.cluster.devices)
    if meeting.own not in names:
        meeting.hear_at_last("ended")
        return None
    if meeting.own == names[0]:
        text = f"training on {', '.join(names)} by {path}, {how}"
        print(text, file=sys.stderr, flush=True)
    ending = None
    meeting.join(names)
    try:
        with _plans_for_losses(job, plans) if meeting.own == names[0] else nullcontext():
            train_and_print(plan, job)
    except SavedAndEnded as notice:
        ending = notice
    leave_group()
    if meeting.own == names[0]:
        meeting.tell("ended", "")
    return ending


def _all_again(meeting: Meeting, folder: str | Path) -> bool:
    """Return whether all processes were started before; those of a machine that comes back were not.

    All must check their models, or none: a check is a collective call.
    """
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    again = restarted and bool(CheckpointFolder(folder).steps())
    meeting.tell(f"again/{meeting.own}", "yes" if again else "no")
    return all(meeting.hear(f"again/{name}") == "yes" for name in meeting.names)


def _agreed(meeting: Meeting, plans: PartPlans) -> tuple[str, str]:
    """Return the plan file that the first process chose, and how it came by it; others wait."""
    if not meeting.first:
        path, _, how = meeting.hear("plan").partition("\n")
        if not path:
            raise InputError(how)
        return path, how
    begun = time.perf_counter()
    ready = plans.has(meeting.names)
    try:
        path = str(plans.file(meeting.names))
    except HapError as error:
        meeting.tell("plan", f"\n{error}")
        raise
    how = "made before" if ready else f"made in {format_seconds(time.perf_counter() - begun)}"
    meeting.tell("plan", f"{path}\n{how}")
    return path, how


@contextmanager
def _plans_for_losses(job: RunJob, plans: PartPlans) -> Iterator[None]:
    """Make the plans for likely losses beside training, at the lowest priority."""
    assert job.checkpoints is not None
    if all(map(plans.has, plans.likely())):  # as after a restart
        yield
        return
    folder = str(Path(job.checkpoints.folder) / "plans")
    words = ["nice", "-n", "19", sys.executable, "-m", "hap.part_plans", str(plans.path), folder]
    beside = subprocess.Popen([*words, *job.extra], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        beside.kill()
        beside.wait()
