"""Megatron-LM's tensor parallelism through DTensor: columns, then rows; all ranks see all rows.

Each family has a recipe: a pattern of module names -> the style that cuts their weights. The
vocabulary or the classes of a last layer are cut as well, and the loss is computed on the parts
(``loss_parallel``). Every rank computes all other modules whole: convolutions, norms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip

from benchmarks.contenders.base import Contender, Setting, as_step, built, mesh_of, optimizer, train


class TensorParallel(Contender):
    """Equal parts of the weights on every rank.

    Raises:
        ValueError: there is no recipe for the model's class.
    """

    def __init__(self, setting: Setting) -> None:
        file = setting.file
        model = built(file)
        kind = type(model).__name__
        if kind not in RECIPES:
            raise ValueError(f"no tensor-parallel recipe for {kind}")
        recipe = RECIPES[kind]
        mesh = mesh_of(setting)
        recipe.prepare(model, mesh.size())
        names = _names(model)
        styles = {name: style() for name, style in recipe.styles.items()}
        parallelize_module(model, mesh, styles)
        _tie(model, names)
        self._classes_cut = recipe.classes_cut
        self._step = as_step(file, model, file.batch())
        self._optimizer = optimizer(file, list(self._step.parameters()))

    def step(self, batch: Any) -> float:
        with loss_parallel() if self._classes_cut else contextlib.nullcontext():
            loss = train(self._step, self._optimizer, batch)
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The way to cut the models of one family.

    Attributes:
        styles: Pattern of module names -> maker of the style.
        classes_cut: Whether the logits are shards, so that the loss is computed on shards.
        prepare: Called with (model, ranks) before the cut.
    """

    styles: Mapping[str, Callable[[], ParallelStyle]]
    classes_cut: bool = False
    prepare: Callable[[nn.Module, int], None] = lambda model, ranks: None


def _whole_input() -> ParallelStyle:
    """Style of a module that passes its input to several layers: sums its gradients once."""
    return PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
    )  # fmt: skip


def _whole_output() -> ParallelStyle:
    """Style of a loss to which an ordinary tensor is added."""
    return PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())


def _vocabulary_rows() -> ParallelStyle:
    return RowwiseParallel(input_layouts=Replicate())


def _classes() -> ParallelStyle:
    """Style of the last layer; its output stays a distributed tensor for ``loss_parallel``."""
    return ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)


def _linear(conv: Any, parts: int = 1, ranks: int = 1) -> nn.Linear:
    """Return GPT-2's layer, with a weight of (in, out), as a linear one.

    With several parts (q, k, v), the rows are reordered so that an equal cut gives each
    rank its part of each.
    """
    linear = nn.Linear(conv.nx, conv.nf)
    order = torch.arange(conv.nf).view(parts, ranks, -1).transpose(0, 1).reshape(-1)
    with torch.no_grad():
        linear.weight.copy_(conv.weight.t()[order])
        linear.bias.copy_(conv.bias[order])
    return linear


def _prepare_gpt2(model: Any, ranks: int) -> None:
    for block in model.transformer.h:
        block.attn.c_attn = _linear(block.attn.c_attn, 3, ranks)
        block.attn.c_proj = _linear(block.attn.c_proj)
        block.mlp.c_fc, block.mlp.c_proj = _linear(block.mlp.c_fc), _linear(block.mlp.c_proj)
        block.attn.split_size //= ranks


def _attention(at: str) -> dict[str, Callable[[], ParallelStyle]]:
    return {at: _whole_input} | {f"{at}.{x}": ColwiseParallel for x in ("query", "key", "value")}


RECIPES = {
    "VGG": Recipe(
        styles={"classifier.0": ColwiseParallel, "classifier.3": RowwiseParallel},
    ),
    "WideClassifier": Recipe(
        styles={"trunk.0": ColwiseParallel, "trunk.1": RowwiseParallel, "head": _classes},
        classes_cut=True,
    ),
    "ViT": Recipe(
        styles={
            **_attention("blocks.*.attention"), "blocks.*.attention.out": RowwiseParallel,
            "blocks.*.up": ColwiseParallel, "blocks.*.down": RowwiseParallel,
        },
    ),
    "BertForMaskedLM": Recipe(
        styles={
            "bert.embeddings.word_embeddings": _vocabulary_rows,
            **_attention("bert.encoder.layer.*.attention.self"),
            "bert.encoder.layer.*.attention.output.dense": RowwiseParallel,
            "bert.encoder.layer.*.intermediate.dense": ColwiseParallel,
            "bert.encoder.layer.*.output.dense": RowwiseParallel,
            "cls.predictions.decoder": _classes,
        },
        classes_cut=True,
    ),
    "BertMoE": Recipe(
        styles={
            "word": _vocabulary_rows,
            **_attention("layers.*.attention"), "layers.*.attention.out": RowwiseParallel,
            "layers.0.ffn.up": ColwiseParallel, "layers.0.ffn.down": RowwiseParallel,
            "head": _classes, "cross_entropy": _whole_output,
        },
        classes_cut=True,
    ),
    "GPT2LMHeadModel": Recipe(
        styles={
            "transformer.wte": _vocabulary_rows,
            "transformer.h.*.attn.c_attn": ColwiseParallel,
            "transformer.h.*.attn.c_proj": RowwiseParallel,
            "transformer.h.*.mlp.c_fc": ColwiseParallel,
            "transformer.h.*.mlp.c_proj": RowwiseParallel,
            "lm_head": _classes,
        },
        classes_cut=True, prepare=_prepare_gpt2,
    ),
}  # fmt: skip
"""Class of the model -> its recipe."""


def _names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Tie the names of a group again, to the parameter that was cut."""
    for names in groups:
        kept = [model.get_parameter(name) for name in names]
        chosen = next((p for p in kept if isinstance(p, DTensor)), kept[0])
        for name in names:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, chosen)
