"""An ordinary PyTorch training loop by a plan, with a scheduler, clipping and checkpoints.

    hap plan examples/gpt2.py --cluster benchmarks/clusters/demo4.yaml -o plan.json
    torchrun --nproc-per-node=4 examples/plain_loop.py plan.json --checkpoint saved

A second start continues from the newest checkpoint, also by a plan for other devices.
"""

import argparse
import os

import gpt2
import torch
import torch.distributed as dist

import hap
from hap.runtime.launch import init_from_env

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("plan")
arguments.add_argument("--steps", type=int, default=8)
arguments.add_argument("--checkpoint", help="folder to save to and to continue from")
args = arguments.parse_args()

plan = hap.Plan.load(args.plan)
rank = init_from_env(devices=plan.device_names).rank  # NCCL if CUDA is available, else gloo
torch.manual_seed(0)  # all ranks start from the same weights
model = hap.compile(gpt2.model(), plan)  # instead of DistributedDataParallel
optimizer = gpt2.optimizer(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
data = gpt2.dataset()
sampler = hap.RankBatchSampler(plan, len(data), rank, seed=0)  # instead of DistributedSampler
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

step = 0
if args.checkpoint and os.path.isdir(args.checkpoint):
    saved = hap.load(model, optimizer, args.checkpoint, scheduler=scheduler)
    sampler.load_state_dict(saved.extra["sampler"])
    step = saved.step

while step < args.steps:
    for batch in loader:
        loss = model(**batch)  # the loss over the global batch, the same on every rank
        loss.backward()  # the gradients are already reduced over the ranks
        hap.clip_grad_norm_(model, 1.0)  # instead of torch's, which would use shards
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if rank == 0:
            print(f"step {step}: loss {loss.item():.7f}", flush=True)
        if args.checkpoint and (step % 4 == 0 or step == args.steps):
            extra = {"sampler": sampler.state_dict(step)}
            hap.save(model, optimizer, args.checkpoint, step=step, scheduler=scheduler, extra=extra)
        if step == args.steps:
            break
    sampler.set_epoch(sampler.epoch + 1)

hap.wait_for_saves()
dist.destroy_process_group()
