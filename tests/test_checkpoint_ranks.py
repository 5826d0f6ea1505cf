"""Checkpoints of several processes: an error on one rank is an error on all, and harms nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import hap
from hap.capture.model_file import load_model_file
from hap.cli.commands import main
from hap.errors import HapError, InputError
from hap.ir.plan import Plan
from hap.runtime.checkpoints.checkpoint_folder import CheckpointFolder
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.collectives import ProcessGroupComm
from hap.runtime.emulate import run_ranks
from hap.runtime.launch import spawn
from hap.training import train
from tests.checkpoint_runs import Run, net
from tests.random_plans import random_plan
from tests.test_checkpoint import small_files, unchanged
from tests.test_cli import CLUSTER, MODEL

# --- errors --------------------------------------------------------------------------------


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Check that a rank raises an error of one paragraph, with this in it."""
    with pytest.raises(HapError, match=message) as error:
        yield
    assert "\n\n" not in str(error.value) and "Traceback" not in str(error.value)


class Odd:
    def state_dict(self) -> Any:
        raise RuntimeError("odd")


def faults(data: dict[str, Any], folder: str) -> list[float]:
    """Meet the faults one after the other; returns the losses of the steps around them."""
    run = Run(Plan.from_json(data), ProcessGroupComm())
    rank = run.comm.rank
    place = CheckpointFolder(folder)
    losses = run.train(0, 1)
    run.save(folder, 1)

    losses += run.train(1, 2)
    hap.wait_for_saves()
    with small_files(600 if rank == 1 else -1):  # the disk of one rank is full
        run.save(folder, 2)
        losses += run.train(2, 3)
        with refused("step-2 was not saved: rank 1: "), unchanged(run):
            run.save(folder, 3)
    assert place.steps() == [1]

    beside = {"f": print} if rank == 2 else {}  # one rank has something that JSON cannot hold
    with refused("extra.f is a builtin_function_or_method"), unchanged(run):
        hap.save(run.module, run.optimizer, folder, step=3, extra=beside)

    for values in ({"average": torch.ones(rank + 1)}, {"list": [torch.ones(2) * rank]}):
        (name,) = values  # ranks have parts of their own, of which one would be kept
        with refused(rf"extra.{name}.* of rank 1 differs from that of rank 0"), unchanged(run):
            hap.save(run.module, run.optimizer, folder, step=3, extra=values)

    odd = Odd() if rank == 1 else run.scheduler  # one rank has an error of its own
    with pytest.raises(RuntimeError if rank == 1 else HapError, match=r"rank 1: |^odd$"):
        hap.save(run.module, run.optimizer, folder, step=3, scheduler=odd)

    elsewhere = f"{folder}-{rank}" if rank == 1 else folder  # one rank sees another disk
    if rank == 1:
        os.mkdir(elsewhere)
    with refused("rank 1 does not see the folder that rank 0 made"), unchanged(run):
        run.save(elsewhere, 3, block=True)
    assert place.steps() == [1]

    if rank == 0:  # a file is damaged, but has its size
        shard = place.at(1) / "shard-00001.safetensors"
        content = shard.read_bytes()
        shard.write_bytes(b"\xff" * 16 + content[16:])
    dist.barrier()
    with refused("damaged, or no safetensors file"), unchanged(run):
        run.load(folder)
    dist.barrier()
    if rank == 0:
        shard.write_bytes(content)
    run.save(folder, 3)
    losses += run.train(3, 4)
    assert run.load(folder).step == 3
    assert place.steps() == [1, 3]
    return losses + run.train(3, 5)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_fault_of_one_rank_is_told_by_all_and_training_goes_on(tmp_path: Path) -> None:
    plan = random_plan(net(), 3, 2)
    args = (plan.to_json(), str(tmp_path / "checkpoints"))
    reference = Run(None)
    want = reference.train(0, 4)
    want += [want[3], *reference.train(4, 5)]
    for losses in spawn(faults, 3, args=args, timeout_s=240):
        assert losses == pytest.approx(want, abs=1e-9)


def full(data: dict[str, Any], folder: str) -> None:
    run = Run(Plan.from_json(data), ProcessGroupComm())
    run.train(0, 1)
    run.save(folder, 1, block=True)
    if run.comm.rank == 0:
        room = os.statvfs(folder)
        with open(f"{folder}/ballast", "wb") as file:
            file.write(bytes(room.f_bavail * room.f_frsize - 8192))
    dist.barrier()
    with refused("step-2 was not saved: rank .: .*(No space left|os error 28)"), unchanged(run):
        run.save(folder, 2, block=True)
    dist.barrier()
    if run.comm.rank == 0:
        os.unlink(f"{folder}/ballast")
    run.save(folder, 3, keep=1, block=True)
    assert CheckpointFolder(folder).steps() == [3]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        spawn(full, 2, args=(random_plan(net(), 2, 1).to_json(), str(disk)), timeout_s=240)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_emulated_ranks_have_no_checkpoints(tmp_path: Path) -> None:
    plan = random_plan(net(), 2, 1)

    def act(comm: Any) -> None:
        with pytest.raises(InputError, match="emulated ranks cannot save"):
            Run(plan, comm).save(tmp_path, 0)

    run_ranks(2, act)


# --- the command ---------------------------------------------------------------------------


def command(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if code == 0 else result.stderr


def losses_of(text: str) -> dict[int, float]:
    return {int(n): float(loss) for n, loss in re.findall(r"^step (\d+)  loss (\S+)", text, re.M)}


@pytest.mark.slow
@pytest.mark.gloo
def test_the_command_resumes_on_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data is drawn at random in batch(): it goes on where it stopped."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    command("plan", "model.py", "--cluster", "cluster.yaml", "--all-devices")
    command("plan", "model.py", "--cluster", "local:1", "-o", "one.json")
    whole = losses_of(command("run", "one.json", "--nproc", "1", "--steps", "8"))
    words = ("--checkpoint", "saved", "--every", "2", "--keep", "2", "--log", "run.jsonl")
    seen = losses_of(command("run", "plan.json", "--nproc", "4", "--steps", "3", *words))
    assert CheckpointFolder("saved").steps() == [2, 3]
    message = command("run", "one.json", "--nproc", "1", *words, code=2)
    assert "there are checkpoints already, up to step 3" in message
    again = ("run", "one.json", "--nproc", "1", "--steps", "8", *words)
    seen |= losses_of(command(*again, "--resume", "auto"))
    assert seen == pytest.approx(whole, rel=1e-4)
    lines = Path("run.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 9)]
    assert CheckpointFolder("saved").steps() == [6, 8]
    older = ("--resume", "saved/step-6")
    assert "a checkpoint of the later step 8" in command(*again, *older, code=2)
    branch = ("run", "one.json", "--nproc", "1", "--steps", "8", "--checkpoint", "branch")
    assert losses_of(command(*branch, *older)).keys() == {7, 8}
    assert "no such folder" in command(*again, "--resume", "saved/step-7", code=2)
    assert "--resume without --checkpoint" in command(
        "run", "one.json", "--nproc", "1", "--resume", "auto", code=2
    )
    assert "8: 4 tensors in 1 file" in command("export", "saved", "--to", "out")
    assert "4 tensors in start/step-0" in command("import", "out", "--to", "start")
    words = ("--checkpoint", "start", "--resume", "auto")
    first = losses_of(command("run", "one.json", "--nproc", "1", "--steps", "1", *words))
    assert first[1] < whole[1]


def test_several_machines_get_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_plan(net(), 3, 0).save(tmp_path / "plan.json")
    words = ("--checkpoint", "saved", "--every", "5", "--resume", "auto")
    monkeypatch.chdir(tmp_path)
    text = command("run", "plan.json", *words)
    assert f"--checkpoint {tmp_path}/saved --every 5 --keep 3 --resume auto\n" in text
    assert text.count("--resume auto") == 4  # a line for each of 3 machines, and the batch script


SEEKING = """
START = []

def batches({argument}):
    import torch
    START.append({start})
    for number in range({start}, 4 * ({start} // 4) + 4):  # epochs of four batches
        yield torch.full((12, 20), 0.1 * number)
"""


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["", "start"])
def test_data_goes_on_from_its_position(argument: str, tmp_path: Path) -> None:
    """A file whose batches() has an argument is not asked for the batches that are done."""
    text = SEEKING.format(argument=argument, start=argument or "0")
    (tmp_path / "model.py").write_text(MODEL + text)
    file = load_model_file(str(tmp_path / "model.py"))
    plan = hap.api.plan_file(str(tmp_path / "model.py"), "local:1")
    whole = train(plan, file, steps=9)
    settings = {"folder": str(tmp_path / "saved"), "every": 3}
    first = train(plan, file, steps=6, checkpoints=Checkpoints(**settings))
    again = Checkpoints(**settings, resume="auto")
    again.check()
    assert first + train(plan, file, steps=9, checkpoints=again) == whole
    starts = file.batches.__wrapped__.__globals__["START"]
    assert starts[-2:] == ([6, 8] if argument else [0, 0])
    assert train(plan, file, steps=9, checkpoints=again) == []
    (tmp_path / "model.py").write_text(MODEL.replace("randn(12", "randn(24"))
    larger = hap.api.plan_file(str(tmp_path / "model.py"), "local:1")
    with refused("trained with batches of 12 rows, this plan has 24"):
        train(larger, steps=9, checkpoints=again)
