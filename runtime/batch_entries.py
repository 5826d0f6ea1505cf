"""The entries of a call's batch, checked to be this rank's parts of what the plan was made for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hap.complex_tensors import as_real
from hap.errors import PlanError
from hap.ir.batch import LONE, TENSOR, form_of, leaves
from hap.ir.local_batch import label, padding_hint
from hap.ir.plan import Plan


def entry(plan: Plan, rank: int, name: str, given: Tensor, tensor: str) -> Tensor:
    """Return a batch entry as real numbers; a rank without rows gets none of them.

    Args:
        tensor: its name in the plan's graph.

    Raises:
        PlanError: it requires grad, or is not this rank's part of the plan's.
    """
    if given.requires_grad and torch.is_grad_enabled():
        raise PlanError(
            f"{label(name)} requires grad, but the plan computes gradients of parameters only",
            hint="compute it inside the model, or pass x.detach()",
        )
    planned = plan.graph.tensors[tensor].dtype
    if planned == "bool" and given.dtype != torch.bool:  # no operator takes one for the other
        raise PlanError(
            f"{label(name)} is {str(given.dtype).removeprefix('torch.')}, the plan is for bool",
            hint="pass x.bool() if it is a mask of zeros and ones, or plan anew with this batch",
        )
    found, expected = as_real(given), plan.local_shape(tensor, rank)
    if expected[:1] == (0,) and found.shape[1:] == expected[1:]:
        return found[:0]  # the row of RankBatchSampler
    shape = tuple(found.shape)
    if shape != expected:
        uncut = shape == plan.graph.tensors[tensor].shape
        raise PlanError(
            f"{label(name)} has shape {shape}, rank {rank}'s part is {expected}",
            hint=("" if uncut else padding_hint(shape, expected))
            or "cut the global batch with plan.local_batch(batch, rank)",
        )
    return found


def missing(plan: Plan, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlanError:
    """Return the error of a call without a tensor that the plan reads."""
    found = leaves(form_of(kwargs)) | leaves(form_of(args))
    if found.get(name, TENSOR) is not TENSOR and found[name] is not None:
        return PlanError(
            f"{label(name)} is {found[name]!r}, the plan has a tensor",
            hint=f"pass torch.tensor({found[name]!r}), or plan anew with this batch",
        )
    ((form, _),) = (plan.recipe.batch or {"": None}).items()
    hint = "pass plan.local_batch(batch, rank)"
    if name == LONE:
        hint = "the batch is one tensor x: call model(x), not model(*x)"
    elif args and form == "dict":
        hint = "the batch is a dict: call model(**batch)"
    elif form in ("tuple", "list") and any(isinstance(arg, tuple | list) for arg in args):
        hint = f"the batch is a {form}: call model(*batch)"
    return PlanError(f"{label(name)} is missing", hint=hint)
