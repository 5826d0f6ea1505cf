"""A batch without data, to capture the model of a plan again."""

from __future__ import annotations

import torch

from hap.capture import torch_private
from hap.ir.batch import Batch, rebuild
from hap.ir.plan import Plan


def fake_batch(plan: Plan) -> Batch:
    """Return a batch without data, with the shapes and the form of a plan's batch."""
    with torch_private.fake_mode():
        entries = {
            i.target: torch.empty(
                plan.graph.tensors[i.tensor].shape,
                dtype=getattr(torch, plan.graph.tensors[i.tensor].dtype),
            )
            for i in plan.graph.role("input")
        }
    if plan.recipe.batch is not None:
        return rebuild(plan.recipe.batch, entries)
    if "*" in entries:
        return entries["*"]
    positional = all(name.isdigit() for name in entries)
    return tuple(entries.values()) if positional else entries
