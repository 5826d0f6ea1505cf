"""Models that put features of an image into a text: rows replaced in turn, masks by vmap, checks of data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import builtin

from hap.capture.masked_scatter import masked_scatter
from hap.capture.tracing import capture
from hap.ir.placement import S
from hap.synthesizer.search.program_space import build_space
from tests.random_plans import make_case, random_plan, verdict

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
