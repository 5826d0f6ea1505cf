"""Checkpoints in one process: what they hold, which are complete, how they are kept and refused."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan

import hap
from hap.errors import CheckpointError, HapError, InputError
from hap.runtime.batch_sampler import RankBatchSampler
from hap.runtime.checkpoints import checkpoint_resume
from hap.runtime.checkpoints.checkpoint_folder import INDEX, CheckpointFolder
from hap.runtime.checkpoints.checkpoint_resume import Checkpoints
from hap.runtime.checkpoints.checkpoint_shard import ShardSavePlanner
from hap.runtime.checkpoints.checkpoint_storage import SafetensorsWriter
from hap.runtime.checkpoints.checkpoint_values import (
    decode,
    encode,
    random_states,
    set_random_states,
)
from hap.runtime.checkpoints.checkpoint_weights import import_
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule
from tests.checkpoint_runs import Averages, Run, make_optimizer, net
from tests.random_plans import make_case, random_plan


def saved(folder: Path, *steps: int, **options: Any) -> Run:
    """Train, and save at these steps."""
    run, done = Run(None), 0
    for step in steps:
        run.train(done, step)
        run.save(folder, step, block=True, **options)
        done = step
    return run


def state_of(run: Run) -> dict[str, Tensor]:
    """Return copies of all tensors of a run."""
    found = {n: t.clone() for n, t in run.module.state_dict().items()}
    for number, parameter in enumerate(run.module.parameters()):
        for key, value in run.optimizer.state.get(parameter, {}).items():
            found[f"{number}.{key}"] = value.clone()
    return found


@contextmanager
def unchanged(run: Run) -> Iterator[None]:
    """Check that tensors and the schedule stay as they are."""
    before, schedule = state_of(run), run.scheduler.state_dict()
    yield
    after = state_of(run)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run.scheduler.state_dict() == schedule


# --- what is saved beside tensors ----------------------------------------------------------


def test_values_come_back_as_they_were() -> None:
    value = {
        "numbers": [1, 2.5, True, None, -0.0], "text": "é", "pair": (1, (2, [3])), "$odd": 1,
        "by number": {1: "a", (2, 3): "b"}, "counts": Counter({5: 2}), "raw": b"\0\xff",
        "dtype": torch.bfloat16, "large": 2**70,
    }  # fmt: skip
    again = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert again == value
    assert isinstance(again["counts"], Counter)
    infinite = decode(encode([math.inf, -math.inf, math.nan]))
    assert infinite[:2] == [math.inf, -math.inf]
    assert math.isnan(infinite[2])
    for tensor in (torch.tensor(2.5), torch.arange(6).view(2, 3).t(), torch.zeros(0, 3),
                   torch.ones(3, dtype=torch.bfloat16), torch.tensor(True)):  # fmt: skip
        back = decode(encode(tensor))
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [lambda: 0]}, r"extra\.a\[0\] is a function"),
        (nn.Linear(2, 2), "extra is a Linear"),
        (torch.zeros(2**18 + 1), "larger than 1 MiB"),
    ],
)
def test_values_that_json_cannot_hold(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode(value)


def test_random_states_come_back() -> None:
    states = encode(random_states())
    drawn = torch.rand(3), random.random(), np.random.rand()
    set_random_states(decode(json.loads(json.dumps(states))))
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]


def test_what_was_saved_beside(tmp_path: Path) -> None:
    run = Run(None)
    run.train(0, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    torch.manual_seed(7)
    hap.save(run.module, run.optimizer, tmp_path, step=4, extra={"epoch": 2}, scaler=scaler)
    drawn = torch.rand(3)
    other, again = Run(None), torch.amp.GradScaler("cpu")
    found = hap.load(other.module, other.optimizer, tmp_path / "step-4", scaler=again)
    assert (found.step, found.extra, found.path) == (4, {"epoch": 2}, tmp_path / "step-4")
    assert (found.weights_only, found.skipped, found.plan) == (False, (), "")
    assert again.get_scale() == 512.0
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(CheckpointError, match="holds no state of a scheduler"), unchanged(other):
        other.load(tmp_path)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "lamb": lambda p: hap.optim.Lamb(p, lr=0.01),
    "lars": lambda p: hap.optim.Lars(p, lr=0.1),
    "averages": lambda p: Averages(p, lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_go_on(kind: str, tmp_path: Path) -> None:
    def run(planned: bool) -> Run:
        made = Run(random_plan(net(), 1, 0) if planned else None)
        made.optimizer = OPTIMIZERS[kind]([p for p in made.module.parameters() if p.requires_grad])
        made.scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.9)
        return made

    first, second, reference = run(True), run(False), run(False)
    first.train(0, 3)
    first.save(tmp_path, 3, block=True)
    second.load(tmp_path)
    want = reference.train(0, 6)[3:]
    assert second.train(3, 6) == pytest.approx(want, abs=1e-9)


# --- the folder ----------------------------------------------------------------------------


def test_the_newest_are_kept_and_named(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3, 10, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-10", "step-3"]
    assert (tmp_path / "latest").read_text() == "step-10\n"


def test_an_old_checkpoint_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: CheckpointFolder, step: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(CheckpointFolder, "_remove", fail)
    with pytest.warns(UserWarning, match=r"can't be removed: Permission denied"):
        saved(tmp_path, 1, 2, keep=1)
    assert CheckpointFolder(tmp_path).steps() == [1, 2]


def test_a_run_that_is_started_again_begins_where_it_began(tmp_path: Path) -> None:
    """``--resume old/step-4``: until there is a checkpoint of its own."""
    old, new = tmp_path / "old", tmp_path / "new"
    saved(old, 4)
    first = Checkpoints(folder=str(new), resume=f"{old}/step-4")
    again = first.again()
    assert again.resume == f"auto:{old}/step-4" and again.again() == again
    assert first._found() == again._found() == (old / "step-4", [])
    saved(new, 2)
    assert again._found() == (old / "step-4", []), "a checkpoint of a run before"
    saved(new, 6)
    assert again._found() == (new / "step-6", [])
    assert (
        Checkpoints(folder=str(new), resume="autosave/step-5")
        .again()
        .resume.startswith("auto:autosave")
    )
    assert Checkpoints(folder=str(new)).again().resume == "auto"


class Trained:
    """A rank of a run that resumes."""

    batch_size, seeks = 0, True

    def __init__(self, rank: int, says: str) -> None:
        self.rank, self.says, self.loaded = rank, says, ""

    def first_says(self, text: str) -> str:
        self.says = text if self.rank == 0 else self.says
        return self.says

    def batches(self, start: int = 0) -> Iterator[Any]:
        return itertools.count(start)

    def load(self, folder: str) -> Any:
        self.loaded = folder


def test_batches_that_are_drawn_again_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_resume, "_TELL_S", -1.0)
    saved(tmp_path, 3)
    rows = json.loads((tmp_path / "step-3" / INDEX).read_text())["batch_size"]
    for rank in (0, 1):
        run = Trained(rank, "")
        run.batch_size, run.seeks = rows, False
        run.says = json.dumps({"path": "c", "step": 3, "rows": 0, "skipped": []})
        _, batches = Checkpoints(folder=str(tmp_path), resume="auto").resumed(run)
        assert next(batches) == 3
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("reading 3 earlier batches again; ")
    assert told[1:4] == ["read 1 of 3", "read 2 of 3", "read 3 of 3"]
    assert len(told) == 5, "rank 0 tells"


def test_the_first_rank_chooses_the_checkpoint(tmp_path: Path) -> None:
    """Another rank may not see the newest folder yet, or may see none."""
    saved(tmp_path / "seen", 2, 5)
    rows = json.loads((tmp_path / "seen" / "step-5" / INDEX).read_text())["batch_size"]
    first = Trained(0, "")
    first.batch_size = rows
    step, batches = Checkpoints(folder=str(tmp_path / "seen"), resume="auto").resumed(first)
    assert (step, next(batches)) == (5, 5)
    other = Trained(1, first.says)
    other.batch_size = rows
    step, _ = Checkpoints(folder=str(tmp_path / "unseen"), resume="auto").resumed(other)
    assert step == 5 and other.loaded == first.loaded == str(tmp_path / "seen" / "step-5")
    lost = Trained(0, "")
    with pytest.raises(CheckpointError):
        Checkpoints(folder=str(tmp_path / "x"), resume=str(tmp_path / "none")).resumed(lost)
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoints(folder=str(tmp_path / "seen"), resume="auto").resumed(Trained(1, lost.says))


def test_a_step_may_be_saved_again(tmp_path: Path) -> None:
    run = saved(tmp_path, 2)
    run.train(2, 4)
    run.save(tmp_path, 2, block=True)
    want = state_of(run)
    other = Run(None)
    other.load(tmp_path)
    found = state_of(other)
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-2"]


def test_what_killed_saves_left_is_never_loaded_and_is_removed(tmp_path: Path) -> None:
    run = saved(tmp_path, 2)
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-5.tmp")
    (tmp_path / "step-1.gone.tmp").mkdir()
    assert run.load(tmp_path).step == 2
    run.save(tmp_path, 3, block=True)
    assert CheckpointFolder(tmp_path).steps() == [2, 3]
    assert not list(tmp_path.glob("*.tmp"))


def test_two_runs_in_a_folder_do_not_mix_their_shards(tmp_path: Path) -> None:
    place = CheckpointFolder(tmp_path)
    first, second = place.begin(3), place.begin(3)
    assert second.is_dir() and not first.exists()
    of_first = SavePlan([], storage_data=first.name)
    with pytest.raises(CheckpointError, match="rank 1 does not see the folder that rank 0 made"):
        SafetensorsWriter(place, 3, 1, {}, {}, None).write_data(of_first, ShardSavePlanner())


def test_an_interrupted_replacement_is_put_back(tmp_path: Path) -> None:
    run = saved(tmp_path, 2)
    (tmp_path / "step-2").rename(tmp_path / "step-2.old.tmp")
    shutil.copytree(tmp_path / "step-2.old.tmp", tmp_path / "step-2.tmp")
    assert run.load(tmp_path).step == 2
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-2", "step-2.tmp"]


def test_a_run_that_went_further_is_not_overtaken(tmp_path: Path) -> None:
    """Its checkpoints would count as newer, and be resumed."""
    run = saved(tmp_path, 2, 9)
    with pytest.raises(InputError, match="a checkpoint of the later step 9"):
        run.save(tmp_path, 4)
    (tmp_path / "step-9" / INDEX).unlink()
    run.save(tmp_path, 4, keep=2, block=True)
    assert CheckpointFolder(tmp_path).steps() == [2, 4]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda step: (step / "shard-00000.safetensors").write_bytes(b"12345678"),
    "gone": lambda step: (step / "shard-00000.safetensors").unlink(),
    "no index": lambda step: (step / INDEX).unlink(),
    "half an index": lambda step: (step / INDEX).write_bytes((step / INDEX).read_bytes()[:400]),
    "a list": lambda step: (step / INDEX).write_text("[]"),
    "newer": lambda step: (step / INDEX).write_text('{"version": 99}'),
    "other keys": lambda step: (step / INDEX).write_text('{"version": 1}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_passed_over_aloud(damage: str, tmp_path: Path) -> None:
    run = saved(tmp_path, 1, 2)
    DAMAGES[damage](tmp_path / "step-2")
    with pytest.warns(UserWarning, match="incomplete checkpoint skipped: step-2: "):
        found = run.load(tmp_path)
    assert found.step == 1
    assert len(found.skipped) == 1
    DAMAGES[damage](tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="no checkpoint here is complete"), unchanged(run):
        run.load(tmp_path)


def tampered(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((step / INDEX).read_text())
    change(index)
    (step / INDEX).write_text(json.dumps(index))


WEIGHT = "model/up.weight"
TAMPERED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "outside": (lambda i: i["files"].update({"../x": 1}), "a file outside of the folder"),
    "chunks": (lambda i: i["tensors"][WEIGHT].update(chunks=[]), f"{WEIGHT} is not whole"),
    "no chunks": (lambda i: i["tensors"][WEIGHT].pop("chunks"), "damaged"),
    "file": (lambda i: i["tensors"][WEIGHT]["chunks"][0].__setitem__(2, "y"), "unknown file y"),
    "tensors": (lambda i: i.update(tensors=3), "damaged"),
    "optimizer": (lambda i: i.update(optimizer=3), "damaged"),
    "extra": (lambda i: i.pop("extra"), "damaged"),
    "dtype": (lambda i: i["tensors"][WEIGHT].update(dtype="load"), "is load in it"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_changed_index_is_refused(kind: str, tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    change, message = TAMPERED[kind]
    tampered(tmp_path / "step-1", change)
    with pytest.raises(CheckpointError, match=message), unchanged(run):
        run.load(tmp_path / "step-1")


def test_no_foreign_pickle_is_read(tmp_path: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint has its index in a pickle."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    run = Run(None)
    for folder in (tmp_path / "foreign", tmp_path / "run" / "step-4"):
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))
    for folder in (tmp_path / "foreign", tmp_path / "run"):
        with pytest.raises(CheckpointError, match="has a pickle in it") as error, unchanged(run):
            run.load(folder)
        assert "\n\n" not in str(error.value)
    torch.save({"weight": Bomb()}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match="no state_dict that can be read safely"):
        import_(str(tmp_path / "weights.pt"), str(tmp_path / "new"))
    assert not (tmp_path / "exploded").exists()


# --- other models and optimizers -----------------------------------------------------------


def longer(run: Run) -> None:
    run.module.more = nn.Linear(2, 2)


def shorter(run: Run) -> None:
    del run.module.up


def wider(run: Run) -> None:
    run.module.up = nn.Linear(8, 21).double()


def single(run: Run) -> None:
    run.module.float()


def of_sgd(run: Run) -> None:
    run.optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1)


def regrouped(run: Run) -> None:
    run.optimizer = torch.optim.Adam(run.module.parameters(), lr=0.1)


def foreign(run: Run) -> None:
    run.optimizer = make_optimizer(Run(None).module)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (longer, "of another model: it lacks more.weight"),
        (shorter, "of another model: the model lacks up"),
        (wider, r"up.weight has shape \(20, 8\) in it and \(21, 8\) in the model"),
        (single, "is float64 in it and torch.float32 in the model"),
        (of_sgd, "holds the state of Adam, this run has SGD"),
        (regrouped, "no parameter group|lacks frozen|lacks spare|optimizer lacks"),
        (foreign, "a parameter that is not of this module"),
    ],
)
def test_another_model_is_refused(
    change: Callable[[Run], None], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, 2)
    other = Run(None)
    change(other)
    with pytest.raises(HapError, match=message), unchanged(other):
        other.load(tmp_path)


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    run = Run(None)
    for folder, message in (("absent", "no such folder"), ("", "there is no checkpoint here")):
        with pytest.raises(CheckpointError, match=message):
            run.load(tmp_path / folder)


# --- disks ---------------------------------------------------------------------------------


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let no file become larger than a limit, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_at_the_next_save_and_older_checkpoints_stay(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    run.train(1, 2)
    with small_files(4000):
        run.save(tmp_path, 2)  # returns: the error comes later
        run.train(2, 3)
        with (
            pytest.raises(CheckpointError, match="step-2 was not saved: ") as error,
            unchanged(run),
        ):
            run.save(tmp_path, 3)
        assert "hint: the state in memory and older checkpoints are unchanged" in str(error.value)
    assert Run(None).load(tmp_path).step == 1
    run.save(tmp_path, 3, block=True)
    assert CheckpointFolder(tmp_path).steps() == [1, 3]


def test_the_last_error_is_told_at_the_end(tmp_path: Path) -> None:
    run = saved(tmp_path, 1)
    with small_files(4000):
        run.save(tmp_path, 2)
        with pytest.raises(CheckpointError, match="step-2 was not saved"):
            hap.wait_for_saves()
    hap.wait_for_saves()


def test_the_folder_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    run = saved(folder, 1)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="the folder of checkpoints is gone"), unchanged(run):
        run.save(folder, 2)
    assert not folder.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no folder for checkpoints can be made there"):
        run.save(tmp_path / "file" / "inside", 2)


def test_a_snapshot_is_not_changed_by_later_steps(tmp_path: Path) -> None:
    run, reference = Run(None), Run(None)
    run.train(0, 2)
    run.save(tmp_path, 2)
    run.train(2, 6)
    other = Run(None)
    hap.wait_for_saves()
    other.load(tmp_path)
    reference.train(0, 2)
    want = state_of(reference)
    assert all(torch.equal(value, want[name]) for name, value in state_of(other).items())


# --- the order of data ---------------------------------------------------------------------


def test_the_order_of_data_goes_on_under_any_plan() -> None:
    def rows(world: int, seed: int) -> list[RankBatchSampler]:
        plan = random_plan(net(), world, seed)
        return [RankBatchSampler(plan, 100, rank, seed=4) for rank in range(world)]

    def read(samplers: list[RankBatchSampler]) -> list[set[int]]:
        return [set().union(*parts) for parts in zip(*samplers, strict=True)]

    first = rows(4, 1)
    whole = []
    for epoch in range(3):
        for sampler in first:
            sampler.set_epoch(epoch)
        whole += read(first)
    per_epoch = len(first[0])
    assert len(whole) == 3 * per_epoch and all(len(batch) == 12 for batch in whole)
    state = json.loads(json.dumps(first[2].state_dict(per_epoch + 3)))
    second = rows(3, 2)
    for sampler in second:
        sampler.load_state_dict(state)
    again = []
    for epoch in range(second[0].epoch, 3):
        for sampler in second:
            sampler.set_epoch(epoch)
        again += read(second)
    assert again == whole[per_epoch + 3 :]
    with pytest.raises(InputError, match="of 100 samples, this dataset has 99"):
        RankBatchSampler(random_plan(net(), 1, 0), 99, 0).load_state_dict(state)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.linear(x), 0.4, self.training)
        return (h + torch.randn_like(h)).square().mean()


def test_masks_and_noise_go_on_by_the_same_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = make_case(Noisy(), torch.randn(10, 8))
    plan = random_plan(case, 1, 0)

    def made(seed: int) -> tuple[HapModule, torch.optim.Optimizer]:
        module = HapModule(plan, case.model, LocalComm(), torch.device("cpu"), seed=seed)
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    def train(module: HapModule, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(case.batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    first = made(seed=5)
    before = train(*first)
    hap.save(*first, tmp_path, step=3)
    after = train(*first)
    second = made(seed=6)
    hap.load(*second, tmp_path)
    assert train(*second) == after != before


@pytest.mark.parametrize("folder", ["/proc/absent/x", "file", "file/x", "new/x"])
def test_a_folder_that_cannot_be_made_is_told_before_training(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    asked = Checkpoints(folder=str(tmp_path / folder))
    if folder == "new/x":
        asked.check()
    else:
        with pytest.raises(CheckpointError, match="cannot be saved there"):
            asked.check()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
