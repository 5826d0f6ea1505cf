"""The training loops in ``examples`` on unlike gloo ranks, beside one device."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hap
from tests.script_server import ScriptServer

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))

import gpt2  # noqa: E402

pytestmark = pytest.mark.slow


Run = Callable[..., str]


@pytest.fixture(scope="module")
def forked() -> Iterator[Run]:
    """Run a script on ranks that have imported the libraries; return its output."""
    imported = ("gpt2", "hf_trainer", "lightning", "lightning_strategies", "accelerate", "hap.api")
    with ScriptServer(EXAMPLES, imported) as server:

        def run(*words: object, ranks: int = 0) -> str:
            script, *arguments = (str(word) for word in words)
            status, out, error = server.run(script, arguments, ranks)
            assert status == 0, error[-3000:]
            return out

        yield run


def losses(output: str) -> dict[int, float]:
    """Return the losses in lines such as ``step 3: loss 5.5``, by step."""
    return {int(a): float(b) for a, b in re.findall(r"step (\d+): loss ([\d.]+)", output)}


DEMO = hap.load_cluster(REPOSITORY / "benchmarks" / "clusters" / "demo4.yaml")
PAIR = DEMO.keep((1, 2))  # a fast and a slow device


def make_plan(name: str, cluster: hap.Cluster, folder: Path) -> Path:
    """Plan a variant of the model file; every device gets some rows."""
    model, batch = (gpt2.trainer, gpt2.trainer_batch) if name else (gpt2.model, gpt2.batch)
    options = hap.PlanOptions(all_devices=True)
    plan = hap.plan(model, batch(), cluster, optimizer=gpt2.optimizer, options=options)
    rows = [plan.batch_rows(rank) for rank in range(plan.world_size)]
    assert len({stop - start for start, stop in rows}) > 1, "the ranks are to be unlike"
    plan.save(folder / "plan.json")
    return folder / "plan.json"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plan("", PAIR, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def trainer_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plan("trainer", DEMO, tmp_path_factory.mktemp("trainer"))


def one_device(steps: int, *, accumulate: int = 1, warmup: bool = True) -> dict[int, float]:
    """Train by plain torch; return the loss of each step."""
    torch.manual_seed(0)
    model, data = gpt2.model(), gpt2.dataset()
    optimizer = gpt2.optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8) if warmup else None
    batches: list[Any] = []
    found = {}
    for step in range(1, steps + 1):
        total = 0.0
        for _ in range(accumulate):
            if not batches:
                epoch = (step - 1) * accumulate // (len(data) // gpt2.ROWS)
                generator = torch.Generator().manual_seed(epoch)
                order = torch.randperm(len(data), generator=generator)
                batches = [*order.split(gpt2.ROWS)[: len(data) // gpt2.ROWS]]
            rows = [data[i] for i in batches.pop(0)]
            batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            loss = model(**batch).loss / accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        found[step] = total
    return found


def assert_equal(found: dict[int, float], wanted: dict[int, float]) -> None:
    assert list(found) == list(wanted)
    assert [*found.values()] == pytest.approx([*wanted.values()], rel=2e-6)


def test_a_plain_loop_and_its_continuation(forked: Run, plan: Path, tmp_path: Path) -> None:
    words = ("plain_loop.py", plan, "--checkpoint", tmp_path / "saved", "--steps")
    wanted = one_device(7)
    first, again = (losses(forked(*words, steps, ranks=2)) for steps in (4, 7))
    assert_equal(first, {step: loss for step, loss in wanted.items() if step <= 4})
    assert_equal(again, {step: loss for step, loss in wanted.items() if step > 4})


def test_a_loop_of_accelerate(forked: Run, plan: Path) -> None:
    words = ("accelerate_loop.py", plan, "--accumulate", 2, "--steps", 5)
    assert_equal(losses(forked(*words, ranks=2)), one_device(5, accumulate=2))


def test_a_loop_of_lightning_fabric(forked: Run, plan: Path, tmp_path: Path) -> None:
    words = ("lightning_fabric.py", plan, "--checkpoint", tmp_path / "saved", "--steps")
    wanted = one_device(6, warmup=False)
    first, again = (losses(forked(*words, steps, ranks=2)) for steps in (4, 6))
    assert_equal(first, {step: loss for step, loss in wanted.items() if step <= 4})
    assert_equal(again, {step: loss for step, loss in wanted.items() if step > 4})


def test_the_trainer_of_lightning(forked: Run, plan: Path, tmp_path: Path) -> None:
    words = ("lightning_trainer.py", plan, "--folder", tmp_path)
    wanted = one_device(28, warmup=False)
    assert_equal(losses(forked(*words, ranks=2)), wanted)
    again = losses(forked(*words, "--resume", tmp_path / "step=20.ckpt", ranks=2))
    assert_equal(again, {step: loss for step, loss in wanted.items() if step > 20})


TRAINER = (
    "--dataloader_drop_last", "--logging_steps", 1, "--max_steps", 14, "--eval_strategy", "steps",
    "--eval_steps", 7, "--gradient_accumulation_steps", 2, "--weight_decay", 0.1,
    "--learning_rate", 1e-3, "--save_steps", 5, "--report_to", "none", "--use_cpu",
    "--disable_tqdm", "True", "--per_device_eval_batch_size", 16,
)  # fmt: skip


def logged(output: str, first: int = 1) -> list[dict[str, float]]:
    """Return what Trainer logged from a step on, without times."""
    entries = [ast.literal_eval(line) for line in output.splitlines() if line.startswith("{")]
    wanted = ("step", "epoch", "loss", "eval_loss", "grad_norm", "learning_rate")
    return [
        {key: entry[key] for key in wanted if key in entry}
        for entry in entries
        if entry.get("step", 0) >= first and "train_loss" not in entry
    ]


def test_the_trainer_of_transformers(forked: Run, trainer_plan: Path, tmp_path: Path) -> None:
    rows = "--per_device_train_batch_size"
    alone = forked("hf_trainer.py", *TRAINER, rows, 16, "--output_dir", tmp_path / "one")
    assert len(logged(alone)) == 16
    words = ("hf_trainer.py", trainer_plan, *TRAINER, rows, 4, "--output_dir", tmp_path / "four")

    def compare(output: str, first: int) -> None:
        for ours, theirs in zip(logged(output, first), logged(alone, first), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)

    compare(forked(*words, ranks=4), 1)
    for name in ("model.safetensors", "pytorch_model.bin"):
        assert not list(tmp_path.glob(f"four/checkpoint-10/{name}")), "no rank has all weights"
    resumed = forked(*words, "--resume_from_checkpoint", tmp_path / "four/checkpoint-10", ranks=4)
    compare(resumed, 11)  # in the middle of an epoch, and into the next one


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fp16": True}, "fp16"),
        ({"bf16": True}, "autocast"),
        ({"torch_compile": True}, "inductor"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"gradient_checkpointing": True}, "recompute"),
        ({"bf16_full_eval": True}, "evaluates as it trains"),
        ({"save_only_model": True}, "hap export"),
        ({"per_device_train_batch_size": 5}, "the 16 of the plan's batch"),
        ({"dataloader_drop_last": False}, "drop_last"),
        ({"optim": "adafactor"}, "adafactor"),
    ],
)
def test_flags_that_conflict_with_a_plan(
    trainer_plan: Path, changes: dict[str, Any], word: str
) -> None:
    assert_refused(trainer_plan, changes, {}, word)


@pytest.mark.parametrize(
    ("others", "word"),
    [
        ({"compute_metrics": len}, "outputs of the model"),
        ({"preprocess_logits_for_metrics": len}, "outputs of the model"),
        ({"optimizers": (torch.optim.SGD([torch.ones(1)]), None)}, "optimizer_cls_and_kwargs"),
        ({"train_dataset": iter(range(8))}, "without a length"),
        ({"eval_dataset": iter(range(8))}, "without a length"),
    ],
)
def test_arguments_that_conflict_with_a_plan(
    trainer_plan: Path, others: dict[str, Any], word: str
) -> None:
    assert_refused(trainer_plan, {}, others, word)


def assert_refused(
    trainer_plan: Path, changes: dict[str, Any], others: dict[str, Any], word: str
) -> None:
    from hf_trainer import CONFLICTS, check
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert names.issuperset(CONFLICTS), "flags that this Trainer does not have"
    given = dict.fromkeys(CONFLICTS) | {
        "bf16": False, "per_device_train_batch_size": 4, "world_size": 4, "optim": "adamw_torch",
        "dataloader_drop_last": True, "average_tokens_across_devices": True,
    }  # fmt: skip
    loaded = hap.Plan.load(trainer_plan)
    allowed = {"optimizers": (None, None), "train_dataset": [1, 2], "eval_dataset": None}
    check(loaded, SimpleNamespace(**given), allowed)
    with pytest.raises(ValueError, match=word):
        check(loaded, SimpleNamespace(**given | changes), others)
