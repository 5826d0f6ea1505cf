"""Complex tensors of a step become pairs of real ones: rotary embeddings plan as they are written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hap
from hap.capture.complex_pairs import FORMS, real_pairs
from hap.errors import ModelError
from hap.runtime.checkpoints.checkpoint_weights import export, import_
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule
from tests.random_plans import make_case, random_plan, verdict
from tests.random_stages import random_staged_plan

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
    lambda x, y: torch.bmm(x, y.transpose(1, 2)) * 2,
    lambda x, y: torch.mm(aten.t(x[:, :, 0]), y[..., 1]),
    lambda x, y: torch.add(x, y, alpha=-3) - y[0] / 2,
    lambda x, y: x / y.abs() + (x - x).sgn() + y.sgn(),
    lambda x, y: (
        torch.fft.fftn(x, dim=(0, 1), norm="ortho") * torch.fft.ifft(y, n=6, dim=-1)[..., -2:]
    ),
    lambda x, y: torch.fft.fft(y.abs(), dim=1) * torch.fft.irfft(x, n=5, dim=1)[:, :4],
    lambda x, y: torch.fft.rfft(torch.view_as_real(x), n=4, dim=-1)[..., :2, 1] * y,
    lambda x, y: aten.slice_scatter(x, y[:, :2] * 1, -2, 2) + torch.cat([x, y], -1)[..., 1:3],
    lambda x, y: torch.roll(x, 5) - aten.div.Scalar(y, 3),
    lambda x, y: torch.roll(x, (1, 2), (0, -1)) * torch.flip(y, [-2]).unsqueeze(-1).squeeze(-1),
    lambda x, y: aten.squeeze.dims(x.unsqueeze(1).unsqueeze(-1), [1, -1]) + aten.copy(x, y[:1]),
    lambda x, y: F.pad(x, (1, 0, 0, 2)) * aten._unsafe_view(y.clone(), [24])[0],
    lambda x, y: x.new_zeros(3, 4, 2) + torch.zeros_like(x) + torch.zeros(2, dtype=x.dtype) - y,
    lambda x, y: aten.copy(x.new_empty_strided((3, 4, 2), (8, 2, 1)), aten.mul.Scalar(x, 3)) - y,
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
    "forward",
    [
        lambda x, y: x.exp(), lambda x, y: x * 1j, lambda x, y: x / y, lambda x, y: x + 1,
        lambda x, y: x + y.abs(),
    ],
)  # fmt: skip
def test_other_operators_are_refused_by_name(forward: Any) -> None:
    given = torch.randn(3, 4, 2, 2)
    with pytest.raises(ModelError, match=r"complex64 \(aten\.(exp|mul|div|add)") as caught:
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


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [False, True])
def test_rotary_embeddings_compute_what_one_device_does(buffer: bool) -> None:
    torch.manual_seed(0)
    case = make_case(Rotary(buffer), torch.randint(61, (6, 8)))
    for seed in range(2):
        assert verdict(case, random_plan(case, 3, seed)).ok


class Spectral(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], *weight: int) -> None:
        super().__init__()
        self.run, self.lift = forward, nn.Linear(8, 8)
        self.weights = nn.ParameterList([torch.randn(weight)] if weight else [])

    def forward(self, x: Tensor) -> Tensor:
        out = self.run(self.lift(x), *map(torch.view_as_complex, self.weights))
        return (torch.view_as_real(out) if out.is_complex() else out).square().mean()


def operator_layer(x: Tensor, weight: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    out = torch.zeros(len(x), 3, 5, dtype=spectrum.dtype)
    out[..., :2] = torch.einsum("bix,iox->box", spectrum[..., :2], weight)
    return torch.fft.irfft(out, n=8)


SPECTRAL: dict[str, tuple[Any, ...]] = {
    "mixing": (lambda x: torch.fft.fftn(x, dim=(1, 2)).real, (4, 5, 8)),
    "a global filter": (
        lambda x, w: torch.fft.irfft2(torch.fft.rfft2(x, norm="ortho") * w, s=(6, 8), norm="ortho"),
        (4, 6, 8), 6, 5, 2,
    ),
    "an operator layer": (operator_layer, (4, 3, 8), 3, 3, 2, 2),
    "a spectral loss": (lambda x: torch.fft.rfft(x).abs().log1p(), (4, 6, 8)),
    "a centred spectrum": (lambda x: torch.fft.fftshift(torch.fft.fft2(x)), (4, 6, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECTRAL)
def test_spectra_compute_what_one_device_does(name: str) -> None:
    torch.manual_seed(0)
    forward, shape, *weight = SPECTRAL[name]
    case = make_case(Spectral(forward, *weight), torch.randn(shape))
    for world in (2, 3):
        for seed in range(2):
            assert verdict(case, random_plan(case, world, seed)).ok


class Operator(nn.Module):
    """Complex parameters, of which one is frozen and one unused, and a complex buffer."""

    def __init__(self, last: bool = True) -> None:
        super().__init__()
        self.lift, self.last = nn.Linear(8, 8), last
        self.weight, self.bias, self.spare = (
            nn.Parameter(torch.randn(shape, dtype=torch.cfloat))
            for shape in ((3, 3, 2), (3, 1), (2,))
        )
        self.bias.requires_grad_(False)
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.arange(2.0)))

    def forward(self, x: Tensor) -> Tensor:
        out = operator_layer(self.lift(x), self.weight * self.turn + self.bias)  # type: ignore[operator]
        return out.square().mean() if self.last else out.relu()


class Measured(nn.Module):
    """An image from measured frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, spectrum: Tensor, image: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.layer(torch.fft.ifft(spectrum).abs()).relu()), image)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_complex_parameters_train_as_on_one_device(dtype: str) -> None:
    torch.manual_seed(0)
    case = make_case(Operator(), torch.randn(4, 3, 8))
    for seed in range(2):
        seen = verdict(case, random_plan(case, 3, seed), dtype=dtype)
        assert seen.ok, seen.first_bad


def test_a_complex_batch_is_cut_as_it_is() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, 8, dtype=torch.cfloat)
    case = make_case(Measured(), {"spectrum": x, "image": torch.randn(6, 5, 8)})
    for world in (2, 3):
        plan = random_plan(case, world, 1)
        assert plan.local_batch({"spectrum": x, "image": x.real}, 0)["spectrum"].is_complex()
        assert verdict(case, plan).ok


@pytest.mark.slow
def test_stages_exchange_pairs() -> None:
    """Of complex parameters and a complex batch, in microbatches."""
    torch.manual_seed(0)
    x = torch.randn(12, 3, 8)
    layers = make_case(nn.Sequential(Operator(False), Operator(True)), x)
    measured = make_case(Measured(), {"spectrum": x.to(torch.cfloat), "image": x})
    for case in (layers, measured):
        assert verdict(case, random_staged_plan(case, (1, 2), 0)).ok


@pytest.mark.parametrize("kind", [torch.optim.AdamW, hap.optim.Lamb, hap.optim.Lars])
def test_complex_parameters_are_saved_and_exported(kind: Any, tmp_path: Path) -> None:
    """By a plan, whose ranks hold pairs, and in one process, which holds complex numbers."""
    torch.manual_seed(0)
    model, x = Operator(), torch.randn(4, 3, 8)
    plan = random_plan(make_case(model, x), 1, 0)
    planned = HapModule(plan, model, LocalComm(), torch.device("cpu"))

    def trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(module(x))
            losses[-1].backward()
            optimizer.step()
        return [loss.detach() for loss in losses]

    first, second = (
        kind([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (planned, model)
    )
    torch.testing.assert_close(trained(planned, first), trained(model, second))
    for name, tensor in planned.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])
    hap.save(planned, first, str(tmp_path / "planned"), step=2, block=True)
    hap.save(model, second, str(tmp_path / "plain"), step=2, block=True)
    other = copy.deepcopy(model)
    others = kind([p for p in other.parameters() if p.requires_grad], lr=0.01)
    hap.load(other, others, str(tmp_path / "planned"))
    hap.load(planned, first, str(tmp_path / "plain"))
    torch.testing.assert_close(trained(planned, first), trained(other, others))
    export(str(tmp_path / "plain"), str(tmp_path / "weights"))
    model.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    import_(str(tmp_path / "weights"), str(tmp_path / "start"))
    hap.load(planned, None, str(tmp_path / "start"))
    for name, tensor in planned.full_state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])


def test_a_state_dict_has_the_complex_buffer() -> None:
    torch.manual_seed(0)
    model = Rotary(buffer=True)
    plan = random_plan(make_case(model, torch.randint(61, (6, 8))), 1, 0)
    module = HapModule(plan, model, LocalComm(), torch.device("cpu"))
    state = module.full_state_dict()
    assert torch.equal(state["turn"], model.turn)  # type: ignore[arg-type]
    module.load_full_state_dict({**state, "turn": 2 * state["turn"]})
    assert torch.equal(module.full_state_dict()["turn"], 2 * model.turn)  # type: ignore[operator]
