"""The Trainer of transformers by a plan: :class:`HapTrainer`.

    hap plan examples/gpt2.py:trainer --cluster benchmarks/clusters/demo4.yaml -o plan.json
    torchrun --nproc-per-node=4 examples/hf_trainer.py plan.json \\
        --output_dir out --per_device_train_batch_size 4 --dataloader_drop_last

Without a plan, the same script trains on one device, with 16 rows per device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpt2
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

import hap

CONFLICTS = {
    "fsdp": "the plan shards the model",
    "deepspeed": "the plan shards the model",
    "parallelism_config": "the plan splits the model",
    "fp16": "plan with autocast='bfloat16' and give --bf16",
    "torch_compile": "call hap.compile with backend='inductor'",
    "activation_checkpointing": "plan with recompute='blocks'",
    "gradient_checkpointing": "plan with recompute='blocks'",
    "bf16_full_eval": "the planned module evaluates as it trains",
    "fp16_full_eval": "the planned module evaluates as it trains",
    "save_only_model": "checkpoints have shards; hap export makes weights of one",
    "auto_find_batch_size": "a plan is made for one batch size",
    "label_smoothing_factor": "put the loss into the planned model",
    "neftune_noise_alpha": "put the noise into the planned model",
    "use_liger_kernel": "a plan is made of torch's operators",
    "load_best_model_at_end": "load that checkpoint by resume_from_checkpoint",
}
ELEMENTWISE = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")


class RankRows(BatchSampler):
    """A rank's rows of each global batch that a sampler draws."""

    def __init__(self, sampler: Any, plan: hap.Plan, rank: int) -> None:
        super().__init__(sampler, plan.batch_size, drop_last=True)
        self.rows = slice(*plan.batch_rows(rank))

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield batch[self.rows] or batch[:1]  # a loader cannot stack no rows


class HapTrainer(Trainer):
    """A Trainer whose model is trained by a plan.

    The losses are those of a Trainer on one device with the plan's whole batch, also where rows have
    unequal numbers of labels. ``self.model`` stays the whole model, as a source of names and
    configuration; ``self.module`` has this rank's shards.

    Args:
        plan: a plan of the model and of a batch that has ``num_items_in_batch``, a float32 scalar.
        others: the arguments of Trainer.

    Raises:
        ValueError: an argument conflicts with the plan.
    """

    def __init__(self, plan: hap.Plan, model: Any, args: TrainingArguments, **others: Any) -> None:
        check(plan, args, others)
        super().__init__(model=model, args=args, **others)
        self.loss_is_scaled_for_ga = True
        self.plan, self.rank = plan, args.process_index
        self.module = hap.compile(model, plan, device=args.device, seed=args.seed)
        rows = [plan.batch_rows(rank) for rank in range(plan.world_size)]
        self._copies = sum(stop - start for start, stop in rows) / plan.batch_size
        self._has_rows = rows[self.rank][0] < rows[self.rank][1]

    # The model and its optimizer

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        pass  # only shards go there

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.module  # in place of DistributedDataParallel

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        return super().create_optimizer(self.module)

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return super().get_decay_parameter_names(self.model)  # knows the types of the layers

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return hap.clip_grad_norm_(self.module, self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.module.grad_norm() if grad_norm is None else grad_norm

    # Batches and losses

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, sampler_fn: Any = None,
        is_training: bool = False, dataloader_key: str | None = None,
    ) -> DataLoader:  # fmt: skip
        sampler = sampler_fn(dataset) if is_training else SequentialSampler(dataset)
        loader = DataLoader(
            dataset,
            batch_sampler=RankRows(sampler, self.plan, self.rank),
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return prepare_data_loader(  # the order of samples is that of one process
            loader, self.args.device, num_processes=1, process_index=0, put_on_device=True,
            use_seedable_sampler=True, data_seed=self.args.data_seed,
        )  # fmt: skip

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if not self._has_rows:
            for batch in batch_samples:
                batch["labels"].fill_(-100)
        items = super()._get_num_items_in_batch(batch_samples, device)  # summed over the ranks
        return items / self._copies

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:  # fmt: skip
        return self.module(**inputs, num_items_in_batch=num_items_in_batch.float())

    def evaluation_loop(
        self, dataloader: DataLoader, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        """Return the mean of the losses of all whole batches."""
        losses = []
        was, _ = self.module.training, self.module.eval()
        for inputs in dataloader:
            count = self._get_num_items_in_batch([inputs], self.args.device)
            with torch.no_grad():
                losses.append(self.compute_loss(None, inputs, num_items_in_batch=count).item())
        self.module.train(was)
        metrics = {f"{metric_key_prefix}_loss": sum(losses) / len(losses)}
        return EvalLoopOutput(None, None, metrics, len(losses) * self.plan.batch_size)

    # Checkpoints: each rank writes its shards, by Trainer's arguments

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights for ``from_pretrained``; a checkpoint has shards in their place."""
        if not _internal_call:
            weights = self.module.full_state_dict()
            if self.args.should_save:
                self._save(output_dir, state_dict=weights)
        elif self.args.should_save:
            self.model.config.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        hap.save(
            self.module, self.optimizer.optimizer, Path(output_dir, "hap"),
            step=self.state.global_step, scheduler=self.lr_scheduler, block=True,
        )  # fmt: skip

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pass  # with the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            hap.load(
                self.module, self.optimizer.optimizer, Path(checkpoint, "hap"),
                scheduler=self.lr_scheduler,
            )  # fmt: skip


def check(plan: hap.Plan, args: TrainingArguments, others: dict[str, Any]) -> None:
    for name, instead in CONFLICTS.items():
        if getattr(args, name, None):
            raise ValueError(f"{name} conflicts with a plan: {instead}")
    if args.bf16 != (plan.recipe.autocast == "bfloat16"):
        raise ValueError(f"--bf16 is {args.bf16}, the plan's autocast is {plan.recipe.autocast!r}")
    rows = args.per_device_train_batch_size * args.world_size
    if rows != plan.batch_size:
        raise ValueError(
            f"{args.world_size} x per_device_train_batch_size={args.per_device_train_batch_size} "
            f"rows are not the {plan.batch_size} of the plan's batch"
        )
    if not (args.dataloader_drop_last and args.average_tokens_across_devices):
        raise ValueError("give --dataloader_drop_last and leave average_tokens_across_devices on")
    whole = plan.optimizer.whole_parameters or others.get("optimizer_cls_and_kwargs")
    if args.optim not in ELEMENTWISE and not whole:
        raise ValueError(f"optim={args.optim!s} is none of {', '.join(ELEMENTWISE)}")
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        if others.get(name):
            raise ValueError(f"{name} needs outputs of the model; a plan has the loss")
    if (others.get("optimizers") or (None,))[0] is not None:
        raise ValueError("optimizers has whole parameters: give optimizer_cls_and_kwargs instead")
    if not all(
        hasattr(others.get(f"{name}_dataset") or [], "__len__") for name in ("train", "eval")
    ):
        raise ValueError("a dataset without a length has no rows to choose: give one with a length")
    if not any(i.target == "num_items_in_batch" for i in plan.graph.inputs):
        raise ValueError("plan a batch with num_items_in_batch=torch.tensor(1.0)")


def main() -> None:
    args, rest = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        return_remaining_strings=True
    )
    args.label_names = ["labels"]
    torch.manual_seed(0)  # all ranks start from the same weights
    data = gpt2.dataset()
    given = {"model": gpt2.model(), "args": args, "train_dataset": data, "eval_dataset": data[:64]}
    trainer = HapTrainer(hap.Plan.load(rest[0]), **given) if rest else Trainer(**given)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if args.should_save:
        for entry in trainer.state.log_history:
            print(entry)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
