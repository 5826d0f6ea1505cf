"""The Trainer of Lightning by a plan.

hap plan examples/gpt2.py --cluster benchmarks/clusters/demo4.yaml -o plan.json
torchrun --nproc-per-node=4 examples/lightning_trainer.py plan.json --folder out
"""

import argparse

import gpt2
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_strategies import HapStrategy

import hap


class Language(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2.model()

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.net(**batch)  # the loss over the global batch, the same on every rank
        self.print(f"step {self.global_step + 1}: loss {loss.item():.7f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return gpt2.optimizer(self.net.parameters())


class Text(lightning.LightningDataModule):
    def __init__(self, plan: hap.Plan) -> None:
        super().__init__()
        self.plan = plan

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        data, rank = gpt2.dataset(), self.trainer.global_rank
        sampler = hap.RankBatchSampler(self.plan, len(data), rank, seed=0)
        # Loaders are made anew in each epoch and when training resumes.
        sampler.load_state_dict(sampler.state_dict(self.trainer.global_step))
        return torch.utils.data.DataLoader(data, batch_sampler=sampler)


arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("plan")
arguments.add_argument("--folder", required=True, help="for checkpoints")
arguments.add_argument("--steps", type=int, default=28)
arguments.add_argument("--resume", help="a checkpoint to continue from")
args = arguments.parse_args()

plan = hap.Plan.load(args.plan)
lightning.seed_everything(0, verbose=False)  # all ranks start from the same weights
trainer = lightning.Trainer(
    devices=plan.world_size, strategy=HapStrategy(plan), use_distributed_sampler=False,
    max_steps=args.steps, gradient_clip_val=1.0, reload_dataloaders_every_n_epochs=1,
    callbacks=[ModelCheckpoint(args.folder, "{step}", every_n_train_steps=4, save_top_k=-1)],
    enable_progress_bar=False, enable_model_summary=False, logger=False,
)  # fmt: skip
trainer.fit(Language(), Text(plan), ckpt_path=args.resume)
