"""The race's models as chains of layers, as a person cuts them for a pipeline.

A chain's layers take and return one tensor, so it can be cut after any of them. The loss is a function
of the last tensor and the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hap.ir.batch import flatten


class Chain(NamedTuple):
    """``loss(output, labels)`` is a mean over labels; ``labels`` is the batch's last tensor."""

    layers: tuple[nn.Module, ...]
    loss: Callable[[Tensor, Tensor], Tensor]


class _Call(nn.Module):
    """A function with the modules that it calls, as a layer."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._function = function
        for number, module in enumerate(modules):
            setattr(self, f"part{number}", module)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def chain(model: nn.Module) -> Chain:
    """Return a model of the race as a chain.

    Raises:
        ValueError: it is none, such as a mixture of experts with a capacity per batch.
    """
    kind = type(model).__name__
    if kind not in _CHAINS:
        raise ValueError(f"{kind} is no chain of layers, or its loss no mean over rows")
    return _CHAINS[kind](model)


def _vgg(model: Any) -> Chain:
    pool = _Call(lambda x: model.pool(x).flatten(1))
    return Chain((*model.features, pool, *model.classifier), F.cross_entropy)


def _vit(model: Any) -> Chain:
    def embed(images: Tensor) -> Tensor:
        x = model.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([model.token.expand(x.shape[0], -1, -1), x], dim=1)
        return model.dropout(x + model.position)

    first = _Call(embed, model.embed, model.token, model.position)
    last = _Call(lambda x: model.head(model.norm(x)[:, 0]), model.norm, model.head)
    return Chain((first, *model.blocks, last), F.cross_entropy)


def _wide(model: Any) -> Chain:
    def trunk(layer: nn.Module) -> nn.Module:
        return _Call(lambda x: model.dropout(F.gelu(layer(x))), layer)

    return Chain((*map(trunk, model.trunk), model.head), F.cross_entropy)


def _bert(model: Any) -> Chain:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    first = _Call(lambda ids: model.bert.embeddings(input_ids=ids), model.bert.embeddings)
    return Chain((first, *model.bert.encoder.layer, model.cls), loss)


def _gpt2(model: Any) -> Chain:
    body = model.transformer

    def embed(ids: Tensor) -> Tensor:
        return body.drop(body.wte(ids) + body.wpe(torch.arange(ids.shape[1])))

    def block(layer: nn.Module) -> nn.Module:
        return _Call(lambda x: _first(layer(x)), layer)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    first = _Call(embed, body.wte, body.wpe)
    last = _Call(lambda x: model.lm_head(body.ln_f(x)), body.ln_f, model.lm_head)
    return Chain((first, *map(block, body.h), last), loss)


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


_CHAINS: dict[str, Callable[[Any], Chain]] = {
    "VGG": _vgg, "ViT": _vit, "WideClassifier": _wide, "BertForMaskedLM": _bert,
    "GPT2LMHeadModel": _gpt2,
}  # fmt: skip


def shapes(layers: Sequence[nn.Module], batch: Any) -> tuple[list[tuple[int, ...]], list[float]]:
    """Return the shape of each layer's result, and the floating-point operations that it takes."""
    x, found, work = next(iter(flatten(batch).values())), [], []
    for layer in layers:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            x = layer(x)
        found.append(tuple(x.shape))
        work.append(float(counter.get_total_flops()))
    return found, work


def cut(work: Sequence[float], speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the first layer of each stage but the first: the slowest stage is as fast as can be.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    if len(work) < len(speeds):
        raise ValueError(f"{len(work)} layers are fewer than {len(speeds)} stages")
    total = [0.0, *itertools.accumulate(work)]

    def slowest(places: tuple[int, ...]) -> float:
        edges = (0, *places, len(work))
        return max(
            (total[b] - total[a]) / s
            for (a, b), s in zip(itertools.pairwise(edges), speeds, strict=True)
        )

    return min(itertools.combinations(range(1, len(work)), len(speeds) - 1), key=slowest)
