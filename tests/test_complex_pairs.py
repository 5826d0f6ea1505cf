"""Complex tensors of a step become pairs of real ones: rotary embeddings plan as they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hap.capture.complex_pairs import FORMS, real_pairs
from hap.errors import ModelError
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule
from tests.random_plans import make_case, random_plan, verdict

aten = torch.ops.aten

FORWARDS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x * y,
    lambda x, y: x[:1] * y,
    lambda x, y: x * torch.view_as_real(y)[..., 0],
    lambda x, y: aten._conj(x).clone() * y,
    lambda x, y: torch.polar(torch.view_as_real(x)[..., 0], torch.view_as_real(y)[..., 1]),
    lambda x, y: torch.complex(torch.view_as_real(x)[..., 0], torch.view_as_real(y)[..., 1]),
    lambda x, y: aten.alias(-x).to(torch.complex64) * y,
    lambda x, y: torch.view_as_real(x)[..., 0].to(torch.complex128) * y,
    lambda x, y: x[..., 1:, -1] * y.select(1, 0)[..., :1],
    lambda x, y: x.transpose(-1, 0).permute(2, 0, 1) * y.sum((-1, 0)).view(1, 1, 4).expand(3, 2, 4),
    lambda x, y: x.unsqueeze(-1).view(3, 8).unsqueeze(1) * y.sum([1]).sum([-1]).view(3, 1, 1),
    lambda x, y: x * torch.sum(y, ()),
    lambda x, y: torch.complex(torch.view_as_real(x)[..., 0], torch.view_as_real(y)[0, 0, :, 1]),
    lambda x, y: aten.slice_backward(x, [3, 9, 2], -2, 2, 6, 1),
    lambda x, y: aten.select_backward(x, [3, 4, 5, 2], -2, 3),
]


def traced(forward: Callable[[Tensor, Tensor], Tensor], *given: Tensor) -> fx.GraphModule:
    def run(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(forward(torch.view_as_complex(x), torch.view_as_complex(y)))

    return make_fx(run, tracing_mode="fake")(*given)


@pytest.mark.parametrize("number", range(len(FORWARDS)))
def test_pairs_compute_what_complex_numbers_do(number: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(3, 4, 2, 2, dtype=torch.float64) for _ in range(2)]
    made = traced(FORWARDS[number], *given)
    wanted = made(*given)
    real_pairs(made.graph, str)
    made.graph.lint()
    made.recompile()
    assert not any(
        v.is_complex() for n in made.graph.nodes for v in [n.meta.get("val")] if v is not None
    )
    torch.testing.assert_close(made(*given), wanted)


def test_every_operator_of_the_table_is_tried() -> None:
    given = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    seen = {n.target for forward in FORWARDS for n in traced(forward, given, given).graph.nodes}
    assert FORMS.keys() <= seen


@pytest.mark.parametrize(
    "forward", [lambda x, y: torch.fft.fft(x), lambda x, y: x.exp(), lambda x, y: x * 1j]
)
def test_other_operators_are_refused_by_name(forward: Any) -> None:
    given = torch.randn(3, 4, 2, 2)
    with pytest.raises(ModelError, match=r"complex64 \(aten\.(_fft_c2c|exp|mul)") as caught:
        real_pairs(traced(forward, given, given).graph, lambda node: "model.py:7")
    assert caught.value.where == "model.py:7"


class Rotary(nn.Module):
    """Attention whose queries and keys are rotated by complex numbers, from a buffer or computed."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.words, self.both, self.head = (
            nn.Embedding(61, 16),
            nn.Linear(16, 32),
            nn.Linear(16, 61),
        )
        angle = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.01]))
        self.buffer = buffer
        self.register_buffer(
            "turn", torch.polar(torch.ones_like(angle), angle) if buffer else angle
        )

    def forward(self, text: Tensor) -> Tensor:
        turn = self.turn if self.buffer else torch.polar(torch.ones_like(self.turn), self.turn)  # type: ignore[arg-type]
        x = self.words(text)
        pairs = self.both(x).view(*text.shape, 8, 2, 2)
        turned = torch.view_as_complex(pairs) * turn[: text.shape[1]].unsqueeze(1)  # type: ignore[index]
        q, k = torch.view_as_real(turned).flatten(3).transpose(1, 2).chunk(2, 1)
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        logits = self.head(out.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), text.flatten())


@pytest.mark.parametrize("buffer", [False, True])
def test_rotary_embeddings_compute_what_one_device_does(buffer: bool) -> None:
    torch.manual_seed(0)
    case = make_case(Rotary(buffer), torch.randint(61, (6, 8)))
    for seed in range(2):
        assert verdict(case, random_plan(case, 3, seed)).ok


def test_a_state_dict_has_the_complex_buffer() -> None:
    torch.manual_seed(0)
    model = Rotary(buffer=True)
    plan = random_plan(make_case(model, torch.randint(61, (6, 8))), 1, 0)
    module = HapModule(plan, model, LocalComm(), torch.device("cpu"))
    state = module.full_state_dict()
    assert torch.equal(state["turn"], model.turn)  # type: ignore[arg-type]
    module.load_full_state_dict({**state, "turn": 2 * state["turn"]})
    assert torch.equal(module.full_state_dict()["turn"], 2 * model.turn)  # type: ignore[operator]
