"""Models that put features of an image into a text: rows replaced in turn, masks by vmap, microbatches."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import builtin

import hap
from hap.capture.masked_scatter import masked_scatter
from hap.capture.tracing import capture
from hap.errors import InfeasibleError
from hap.ir.microbatch import Phase, phases
from hap.ir.placement import S
from hap.ir.plan import Plan
from hap.synthesizer.plan_options import PlanOptions
from hap.synthesizer.search.program_space import build_space
from tests.random_plans import Case, make_case, random_plan, two_machines, verdict
from tests.random_stages import divided, random_groups, random_staged_plan

MASKS = {
    "rows": torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 1]], dtype=torch.bool).unsqueeze(-1),
    "rows, expanded": torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)
    .unsqueeze(-1).expand(3, 3, 4),
    "no row": torch.zeros(3, 3, 1, dtype=torch.bool),
    "elements": torch.arange(36).view(3, 3, 4) % 5 == 1,
    "columns": torch.tensor([True, False, False, True]),
    "sentences": torch.tensor([True, False, False]).view(3, 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("shape", [(9, 4), (3, 3, 4), (2, 5, 4), (36,)])
def test_rows_are_replaced_as_torch_does(mask: Tensor, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, source = (
        torch.randn(s, generator=generator, requires_grad=True) for s in ((3, 3, 4), shape)
    )
    weight = torch.randn(3, 3, 4, generator=generator)
    mine, theirs = (f(x, mask, source) for f in (masked_scatter, torch.masked_scatter))
    assert torch.equal(mine, theirs)
    found = (torch.autograd.grad((y * weight).sum(), (x, source)) for y in (mine, theirs))
    for gradient, expected in zip(*found, strict=True):
        assert torch.equal(gradient, expected)


class Described(nn.Module):
    """Features of images replace embeddings, of which each row of the batch has another number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.eye = nn.Embedding(11, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, text: Tensor, pixels: Tensor) -> Tensor:
        mask = (text == 10).unsqueeze(-1)
        features = self.eye(pixels)
        torch._check_tensor_all(mask.sum() * 8 == features.numel())
        x = self.words(text).masked_scatter(mask, features)
        order = torch.arange(text.shape[1])
        near = torch.vmap(torch.vmap(lambda a, b: a <= b, (None, 0)), (0, None))(order, order)
        scale = torch.tensor(0.1, dtype=x.dtype)
        return (
            nn.functional.cross_entropy((self.head(x) * scale).transpose(1, 2), text)
            + ((x @ x.transpose(1, 2)) * near).square().mean()
        )


def described() -> tuple[Described, dict[str, Tensor]]:
    torch.manual_seed(0)
    text = torch.randint(10, (4, 5))
    text[0, 1:3] = text[1, 0] = text[3, 2:] = 10
    return Described(), {"text": text, "pixels": torch.randn(int((text == 10).sum()), 6)}


@pytest.mark.slow
def test_rows_of_the_batch_are_split_beside_whole_features() -> None:
    case = make_case(*described())
    space = build_space(case.graph)
    chosen = next(n for n in case.graph.nodes if n.op == "aten.where.self")
    assert any(row.outs == (S(0),) for row in space.rows[chosen.name])
    for world in (2, 3):
        for seed in range(3):
            assert verdict(case, random_plan(case, world, seed)).ok


def test_the_first_operator_of_a_process_may_be_inside_of_vmap() -> None:
    builtin.BUILTIN_TO_TENSOR_FN_MAP.clear()  # torch looks them up at the first operator
    assert any(node.op == "aten.le.Tensor" for node in capture(*described()).nodes)


class Eye(nn.Module):
    """Features of pixels, of which the backward reads what the forward made."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, pixels: Tensor) -> Tensor:
        x = nn.functional.gelu(self.norm(self.first(pixels)))
        found: Tensor = self.second(self.dropout(x))
        return found


class Deep(nn.Module):
    """Layers of text, of which the first two add features of images to tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.eye = nn.Embedding(11, 8), Eye(dropout)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
            for _ in range(3)
        )
        self.head = nn.Linear(8, 11)

    def forward(self, text: Tensor, pixels: Tensor) -> Tensor:
        mask = (text == 10).unsqueeze(-1)
        features = self.eye(pixels)
        x = self.words(text).masked_scatter(mask, features)
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == 0:
                x = x + torch.zeros_like(x).masked_scatter(mask, features.tanh())
        return nn.functional.cross_entropy(self.head(x).transpose(1, 2), text)


def deep(dropout: float = 0.0) -> Case:
    torch.manual_seed(0)
    text = torch.randint(10, (6, 5))
    text[0, 1:3] = text[1, 0] = text[3, 2:] = text[5, 4] = 10
    pixels = torch.randn(int((text == 10).sum()), 6)
    return make_case(Deep(dropout), {"text": text, "pixels": pixels})


def test_images_run_once_before_the_microbatches_and_once_after_them() -> None:
    part = divided(deep()).part(3)
    found = phases(part)
    assert part.tensors[
        next(n for n in part.nodes if n.op == "aten.gelu.default").inputs[0]
    ].shape == (7, 16)
    of_eye = {
        side: {found[n.name] for n in part.nodes if "eye" in n.module and n.inputs
               and (n.name in part.backward) is side}
        for side in (False, True)
    }  # fmt: skip
    assert of_eye == {False: {Phase.ONCE}, True: {Phase.END}}
    of_layers = {found[n.name] for n in part.nodes if n.module.startswith("layers")}
    assert Phase.PART in of_layers


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_random_pipelines_with_images_compute_what_one_device_does(dropout: float) -> None:
    case, rng = deep(dropout), random.Random(0)
    for seed in range(8):
        groups = random_groups(rng) if seed % 2 else (rng.randrange(1, 4),)
        plan = random_staged_plan(case, groups, seed)
        assert verdict(case, plan).ok, (groups, seed)


@pytest.mark.slow
def test_microbatches_with_images_serve_memory() -> None:
    case = deep()

    def planned(memory: float, *, accumulate: bool) -> Plan:
        on = two_machines(2)
        devices = tuple(replace(d, memory_bytes=round(memory)) for d in on.devices)
        return hap.plan(
            case.model, case.batch, replace(on, devices=devices), optimizer=case.optimizer,
            options=PlanOptions(accumulate=accumulate, recompute=""),
        )  # fmt: skip

    peak = max(r.peak_bytes for r in planned(1e12, accumulate=False).prediction.ranks)
    for memory in np.linspace(peak, 0, 20, endpoint=False):
        try:
            planned(memory, accumulate=False)
        except InfeasibleError:
            plan = planned(memory, accumulate=True)
            break
    assert plan.microbatches > 1
    assert verdict(case, plan).ok
