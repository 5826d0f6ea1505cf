"""Strategies of Lightning that train by a plan: one for Fabric, one for the Trainer.

The module that was planned returns the loss. Optimizers are made of its shards, after
``hap.compile``. Mixed precision is the plan's ``autocast``, not Lightning's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import hap
from hap.runtime.hap_module import HapModule


class HapFabricStrategy(FabricDDPStrategy):
    """For ``Fabric(strategy=HapFabricStrategy())``.

    Compile the model after ``fabric.launch()``, then ``fabric.setup(model, move_to_device=False)``.
    """

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self._backward_sync_control = None  # gradients are reduced in every backward

    def setup_module(self, module: nn.Module) -> HapModule:
        if not isinstance(module, HapModule):
            raise TypeError("call fabric.setup with the module of hap.compile(model, plan)")
        return module  # in place of DistributedDataParallel

    def clip_gradients_norm(
        self, module: HapModule, optimizer: Any, max_norm: float, norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        if norm_type != 2:
            raise ValueError(f"norm_type is {norm_type}: only the 2-norm is known over all shards")
        norm = hap.clip_grad_norm_(module, float(max_norm))
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm}")
        return norm

    def save_checkpoint(
        self, path: str | Path, state: Mapping[str, Any], storage_options: Any = None,
        filter: Any = None,
    ) -> None:  # fmt: skip
        """Save a state that has one model, at most one optimizer, and plain values."""
        model, optimizer, rest = _sorted(state)
        hap.save(model, optimizer, path, step=rest.get("step", 0), extra=rest, block=True)

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: Any = None
    ) -> dict[str, Any]:
        model, optimizer, rest = _sorted(state)
        saved = hap.load(model, optimizer, path).extra
        state.update({key: saved.pop(key) for key in rest if key in saved})
        return saved


def _sorted(state: Mapping[str, Any]) -> tuple[HapModule, Any, dict[str, Any]]:
    models = [value for value in state.values() if isinstance(value, HapModule)]
    optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise ValueError("a checkpoint has one planned model and at most one optimizer")
    known = {id(value) for value in models + optimizers}
    rest = {key: value for key, value in state.items() if id(value) not in known}
    return models[0], (optimizers or [None])[0], rest


class HapPrecision(Precision):
    """Precision as planned, and clipping by the norm over all shards."""

    net: HapModule

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        hap.clip_grad_norm_(self.net, clip_val)


class HapStrategy(DDPStrategy):
    """For ``Trainer(strategy=HapStrategy(plan), use_distributed_sampler=False)``.

    Args:
        plan: a plan of the module that the LightningModule has as its attribute ``name``.
    """

    def __init__(self, plan: hap.Plan, name: str = "net", **others: Any) -> None:
        super().__init__(**others)
        self.plan, self.name = plan, name
        self._precision_plugin = HapPrecision()

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is not None and type(plugin) not in (Precision, HapPrecision):
            raise ValueError("plan with autocast= and leave Trainer's precision at 32-true")

    def model_to_device(self) -> None:
        pass  # only shards go there

    def configure_ddp(self) -> None:
        net = hap.compile(getattr(self.model, self.name), self.plan, device=self.root_device)
        setattr(self.model, self.name, net)
        self.model.to(self.root_device)
        self._precision_plugin.net = self.net = net

    # Checkpoints are folders: each rank writes its shards, rank 0 the state of the Trainer.

    restore_checkpoint_after_setup = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass  # with the checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass  # with the checkpoint

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        (optimizer,) = self.optimizers
        hap.save(self.net, optimizer, filepath, step=checkpoint["global_step"], block=True)
        super().save_checkpoint(checkpoint, Path(filepath, "trainer.ckpt"), storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        (optimizer,) = self.optimizers
        hap.load(self.net, optimizer, checkpoint_path)
        return super().load_checkpoint(Path(checkpoint_path, "trainer.ckpt"), weights_only)
