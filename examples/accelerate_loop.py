"""A loop of Hugging Face Accelerate by a plan.

    hap plan examples/gpt2.py --cluster benchmarks/clusters/demo4.yaml -o plan.json
    torchrun --nproc-per-node=4 examples/accelerate_loop.py plan.json

Accelerate keeps the processes, the devices, the optimizer, accumulation, printing and tracking.
The model and the loader come from ``hap``, so they are not prepared.
"""

import argparse

import gpt2
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import hap

arguments = argparse.ArgumentParser(description=__doc__)
arguments.add_argument("plan")
arguments.add_argument("--steps", type=int, default=8)
arguments.add_argument("--accumulate", type=int, default=1, help="batches of each step")
args = arguments.parse_args()

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate
)
set_seed(0)  # all ranks start from the same weights
plan = hap.Plan.load(args.plan)
model = hap.compile(gpt2.model(), plan, device=accelerator.device)
optimizer = accelerator.prepare(gpt2.optimizer(model.parameters()))
# Not prepared: Accelerate would call its step() once for each process.
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
data = gpt2.dataset()
sampler = hap.RankBatchSampler(plan, len(data), accelerator.process_index, seed=0)
loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)

batches = iter(loader)
for step in range(1, args.steps + 1):
    losses = []
    for _ in range(args.accumulate):
        with accelerator.accumulate(model):
            loss = model(**next(batches))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                hap.clip_grad_norm_(model, 1.0)  # in place of accelerator.clip_grad_norm_
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    scheduler.step()
    accelerator.print(f"step {step}: loss {sum(losses) / len(losses):.7f}")

accelerator.end_training()
