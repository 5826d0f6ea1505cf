"""A model that trains on gloo ranks by any plan, saves, loads, and is compared with one device."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hap
from hap.capture.tracing import capture
from hap.ir.batch import call
from hap.ir.plan import Plan
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.hap_module import HapModule
from hap.synthesizer.search.program_space import build_space
from tests.random_plans import Case, adamw

CPU = torch.device("cpu")
ROWS = 12


class Net(nn.Module):
    """Tied weights, a norm, a frozen layer whose bias the forward updates, an unused parameter, and buffers of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(13, 8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.spare = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros(20))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("hidden", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        wide = self.up(h)
        self.steps += 1
        with torch.no_grad():
            self.seen.mul_(0.9).add_(0.1 * wide.mean((0, 1)))
            self.hidden.add_(0.01 * h.mean((0, 1)))
            self.frozen.bias.mul_(0.9).add_(0.1 * h.mean((0, 1)))
        h = self.frozen(h + self.down((wide - self.seen).relu())) + self.hidden
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


@cache
def net() -> Case:
    torch.manual_seed(0)
    model, batch = Net().double(), data(0)
    return Case(
        model=model, batch=batch, loss=None, optimizer=adamw,
        captured=lambda: build_space(capture(model, batch)),
    )  # fmt: skip


def data(step: int) -> Tensor:
    """Return the global batch of a step."""
    return torch.randint(13, (ROWS, 5), generator=torch.Generator().manual_seed(step))


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Return Adam with two parameter groups."""
    params = {n: p for n, p in module.named_parameters() if p.requires_grad}
    flat = [p for n, p in params.items() if "norm" in n or n.endswith("bias")]
    rest = [p for n, p in params.items() if not ("norm" in n or n.endswith("bias"))]
    groups = [{"params": rest}, {"params": flat, "weight_decay": 0.1, "betas": (0.8, 0.99)}]
    return torch.optim.Adam(groups, lr=0.05, amsgrad=True)


class Averages(torch.optim.Optimizer):
    """Momenta of several rates, in a dict and a list of each parameter's state; optionally of another shape."""

    def __init__(self, params: Any, lr: float, *, flat: bool = False) -> None:
        self.flat = flat
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momenta"] = {0.9: torch.zeros_like(p), 0.5: [torch.zeros_like(p)]}
                state["flat"] = torch.zeros(p.numel() if self.flat else 1)
            for rate, kept in ((0.9, state["momenta"][0.9]), (0.5, state["momenta"][0.5][0])):
                p.sub_(kept.mul_(rate).add_(p.grad), alpha=self.param_groups[0]["lr"])


def make_scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 9], gamma=0.7)


class Run:
    """A module, by a plan or an ordinary one, with its optimizer and schedule."""

    def __init__(self, plan: Plan | None, comm: Comm | None = None, *, shift: float = 0.0) -> None:
        model = copy.deepcopy(net().model)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor += int(shift) if tensor.dtype == torch.int64 else shift
        self.plan, self.comm = plan, comm or LocalComm()
        self.module: nn.Module = HapModule(plan, model, self.comm, CPU) if plan else model
        self.optimizer = make_optimizer(self.module)
        self.scheduler = make_scheduler(self.optimizer)

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            batch = data(step)
            if self.plan:
                batch = self.plan.local_batch(batch, self.comm.rank)
            self.optimizer.zero_grad()
            loss = call(self.module, batch)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self, folder: Path | str, step: int, **options: Any) -> None:
        hap.save(
            self.module, self.optimizer, folder, step=step, scheduler=self.scheduler,
            extra={"epoch": (step, "odd" if step % 2 else "even")}, **options,
        )  # fmt: skip

    def load(self, folder: Path | str) -> Any:
        return hap.load(self.module, self.optimizer, folder, scheduler=self.scheduler)


def stage(data: dict[str, Any], folder: str, steps: int) -> tuple[int, list[float]]:
    """Load what is in the folder, if anything is; train; save in mid-training and at the end.

    Returns the step at which it began, and the losses.
    """
    run = Run(Plan.from_json(data), ProcessGroupComm(), shift=3.0 if any_in(folder) else 0.0)
    start = 0
    if any_in(folder):
        saved = run.load(folder)
        start = saved.step
        assert saved.extra == {"epoch": (start, "odd" if start % 2 else "even")}
    losses = run.train(start, start + 1)
    run.save(folder, start + 1, keep=2)
    losses += run.train(start + 1, start + steps)
    run.save(folder, start + steps, keep=2)
    hap.wait_for_saves()
    return start, losses


def any_in(folder: str) -> bool:
    return (Path(folder) / "latest").exists()
