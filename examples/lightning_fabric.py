"""A loop of Lightning Fabric by a plan.

hap plan examples/gpt2.py --cluster benchmarks/clusters/demo4.yaml -o plan.json
torchrun --nproc-per-node=4 examples/lightning_fabric.py plan.json --checkpoint saved
"""

import argparse
import os

import gpt2
import torch
from lightning.fabric import Fabric
from lightning_strategies import HapFabricStrategy

import hap

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("plan")
arguments.add_argument("--steps", type=int, default=8)
arguments.add_argument("--checkpoint", help="folder to save to and to continue from")
args = arguments.parse_args()

plan = hap.Plan.load(args.plan)
fabric = Fabric(devices=plan.world_size, strategy=HapFabricStrategy())
fabric.launch()
fabric.seed_everything(0)  # all ranks start from the same weights
model = hap.compile(gpt2.model(), plan, device=fabric.device)
model = fabric.setup(model, move_to_device=False)
optimizer = fabric.setup_optimizers(gpt2.optimizer(model.parameters()))
data = gpt2.dataset()
sampler = hap.RankBatchSampler(plan, len(data), fabric.global_rank, seed=0)
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)

state = {"model": model, "optimizer": optimizer, "step": 0}
if args.checkpoint and os.path.isdir(args.checkpoint):
    fabric.load(args.checkpoint, state)
    sampler.load_state_dict(sampler.state_dict(state["step"]))

for batch in loader:
    loss = model(**batch)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    state["step"] += 1
    fabric.print(f"step {state['step']}: loss {loss.item():.7f}")
    if args.checkpoint and state["step"] % 4 == 0:
        fabric.save(args.checkpoint, state)
    if state["step"] == args.steps:
        break
