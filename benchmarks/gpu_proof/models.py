"""The models of the proof: nine families for correctness, six models for speed and memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.models import bert, gpt2, llama, segmenter, vgg19, vit
from hap.capture.user_optimizer import MakeOptimizer, default_optimizer
from hap.ir.batch import Batch
from hap.ir.plan import Plan

FAMILIES = ("bert", "bert_moe", "gpt2", "llama", "mlp", "segmenter", "t5", "vgg19", "vit")
"""Modules of ``benchmarks.models``; the proof verifies their ``tiny`` variants."""

PRECISIONS = ("float32", "bfloat16")
"""Precisions of the forward and the loss: plain single precision, or autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prepared plan, and the family of its model."""

    family: str
    plan: Plan

    @staticmethod
    def load(folder: Path, name: str) -> Prepared | None:
        """Return the plan ``folder/name.json``; ``None`` if it was not prepared."""
        file = folder / f"{name}.json"
        if not file.exists():
            return None
        return Prepared(family=name.split("-")[1], plan=Plan.load(file))


def built(family: str) -> tuple[nn.Module, Batch, Any, MakeOptimizer]:
    """Return (model, global batch, loss or None, optimizer), the same in every process."""
    module = import_module(f"benchmarks.models.{family}")
    torch.manual_seed(0)
    return (
        module.tiny(), module.tiny_batch(), getattr(module, "loss", None),
        getattr(module, "optimizer", default_optimizer),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """A model that is large enough to keep one GPU busy."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    optimizer: MakeOptimizer


@functools.lru_cache(maxsize=1)
def built_single(single: Single) -> tuple[nn.Module, Batch]:
    """Return the model and its batch, the same in every process; the last one is kept."""
    torch.manual_seed(0)
    return single.model(), single.batch()


LLAMA_1B = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "seq": 512}

SINGLES = (
    Single(name="bert-base", model=lambda: bert.build(dropout=0.0),
           batch=lambda: bert.inputs(64), optimizer=bert.optimizer),
    Single(name="gpt2", model=lambda: gpt2.build(dropout=0.0),
           batch=lambda: gpt2.inputs(32), optimizer=gpt2.optimizer),
    Single(name="vit", model=lambda: vit.build(dropout=0.0),
           batch=lambda: vit.inputs(128), optimizer=vit.optimizer),
    Single(name="vgg19", model=lambda: vgg19.build(dropout=0.0),
           batch=lambda: vgg19.inputs(256), optimizer=vgg19.optimizer),
    Single(name="segmenter", model=segmenter.build, batch=lambda: segmenter.inputs(64),
           optimizer=default_optimizer),
    Single(name="llama-1b", model=lambda: llama.build(**LLAMA_1B),
           batch=lambda: llama.inputs(size=4, seq=512), optimizer=llama.optimizer),
)  # fmt: skip

TINY_SINGLES = (
    Single(name="bert-tiny", model=bert.tiny, batch=bert.tiny_batch, optimizer=bert.optimizer),
    Single(name="vit-tiny", model=vit.tiny, batch=vit.tiny_batch, optimizer=vit.optimizer),
)


def singles(device: torch.device, names: Collection[str] = ()) -> tuple[Single, ...]:
    """Return the models for one rank on a device, tiny ones on a CPU; those of ``names``, or all."""
    every = SINGLES if device.type == "cuda" else TINY_SINGLES
    return tuple(single for single in every if not names or single.name in names)
