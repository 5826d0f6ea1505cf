"""Plan, verify and run the training of a PyTorch model on a heterogeneous cluster.

    plan = hap.plan(model, batch, "cluster.yaml")   # program + shares + predictions
    model = hap.compile(model, plan)                # this rank's part of it
    loss = model(batch); loss.backward()

The names below are loaded on first use. ``hap`` contains both the modules that all packages
import, such as :mod:`hap.errors`, and the public API, which imports those packages: an eager
import would be circular, and ``hap --help`` would wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hap import api as api
    from hap import optim as optim
    from hap import plan_cache as plan_cache
    from hap import plan_simulation as plan_simulation
    from hap.api import GradScaler, clip_grad_norm_, compile, plan, verify
    from hap.cluster.cluster_file import load_cluster
    from hap.cluster.topology import Cluster
    from hap.errors import (
        CheckpointError,
        ClusterError,
        HapError,
        InfeasibleError,
        InputError,
        ModelError,
        PlanError,
        UnfinishedError,
        UnsupportedOpError,
        VerifyError,
    )
    from hap.ir.plan import Plan
    from hap.runtime.batch_sampler import RankBatchSampler
    from hap.runtime.checkpoints.checkpoint import load, save, wait_for_saves
    from hap.synthesizer.plan_options import PlanOptions

__all__ = [
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "GradScaler",
    "HapError",
    "InfeasibleError",
    "InputError",
    "ModelError",
    "Plan",
    "PlanError",
    "PlanOptions",
    "RankBatchSampler",
    "UnfinishedError",
    "UnsupportedOpError",
    "VerifyError",
    "clip_grad_norm_",
    "compile",
    "load",
    "load_cluster",
    "plan",
    "save",
    "verify",
    "wait_for_saves",
]

_NAMES: Final = {
    "api": ("plan", "compile", "verify", "clip_grad_norm_", "GradScaler"),
    "ir.plan": ("Plan",),
    "cluster.topology": ("Cluster",),
    "cluster.cluster_file": ("load_cluster",),
    "runtime.batch_sampler": ("RankBatchSampler",),
    "runtime.checkpoints.checkpoint": ("load", "save", "wait_for_saves"),
    "synthesizer.plan_options": ("PlanOptions",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}
_HOME: Final = {name: module for module, names in _NAMES.items() for name in names}
_MODULES: Final = ("api", "optim", "plan_cache", "plan_simulation")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"hap.{name}")
    if name in _HOME:
        return getattr(import_module(f"hap.{_HOME[name]}"), name)
    raise AttributeError(f"module 'hap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
