"""Plan, prove and run one training step across unlike GPUs.

    plan = hap.plan(model, batch, "cluster.yaml")   # program + shares + predictions
    model = hap.compile(model, plan)                # this rank's part of it
    loss = model(batch); loss.backward()

The names below are loaded on first use. ``hap`` is both the bottom of its packages, which all
import :mod:`hap.errors` and the like, and their top, the face: an eager import of the top
would be a circle, and ``hap --help`` would wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hap import api as api
    from hap import model_file as model_file
    from hap import optim as optim
    from hap import profile_report as profile_report
    from hap import profiling as profiling
    from hap import report as report
    from hap import rules_text as rules_text
    from hap import simulation as simulation
    from hap import terminal as terminal
    from hap import testbed as testbed
    from hap import worker as worker
    from hap.api import GradScaler, clip_grad_norm_, compile, plan, verify
    from hap.cluster import Cluster, load_cluster
    from hap.errors import (
        ClusterError,
        HapError,
        InfeasibleError,
        InputError,
        ModelError,
        PlanError,
        UnsupportedOpError,
        VerifyError,
    )
    from hap.plan import Plan
    from hap.runtime.data import RankBatchSampler

__all__ = [
    "Cluster",
    "ClusterError",
    "GradScaler",
    "HapError",
    "InfeasibleError",
    "InputError",
    "ModelError",
    "Plan",
    "PlanError",
    "RankBatchSampler",
    "UnsupportedOpError",
    "VerifyError",
    "clip_grad_norm_",
    "compile",
    "load_cluster",
    "plan",
    "verify",
]

_NAMES: Final = {
    "api": ("plan", "compile", "verify", "clip_grad_norm_", "GradScaler"),
    "plan": ("Plan",),
    "cluster": ("Cluster", "load_cluster"),
    "runtime.data": ("RankBatchSampler",),
    "errors": tuple(name for name in __all__ if name.endswith("Error")),
}
_HOME: Final = {name: module for module, names in _NAMES.items() for name in names}
_MODULES: Final = (
    "api",
    "model_file",
    "profile_report",
    "profiling",
    "optim",
    "report",
    "rules_text",
    "simulation",
    "terminal",
    "testbed",
    "worker",
)  # heavy: for the command line


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"hap.{name}")
    if name in _HOME:
        return getattr(import_module(f"hap.{_HOME[name]}"), name)
    raise AttributeError(f"module 'hap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Face(ModuleType):
    """Keeps ``hap.plan`` the function, whoever has imported the module of that name before."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and isinstance(value, ModuleType):
            return  # the import system's note of a submodule; ``from hap.plan import`` needs none
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face
