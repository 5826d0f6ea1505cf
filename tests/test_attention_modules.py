"""Attention however a model asks for it: modules and functions of torch, kernels by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.attention import scaled_dot_product_attention
from hap.capture.attention_kernels import KERNELS
from hap.capture.tracing import capture
from hap.errors import UnsupportedOpError
from hap.rule_sources import with_rules
from hap.synthesizer.rules import RULES
from tests.random_plans import make_case, random_plan, verdict

ROWS, LENGTH, WIDTH, HEADS = 6, 5, 12, 3
X = torch.linspace(-2, 2, ROWS * LENGTH * WIDTH).sin().view(ROWS, LENGTH, WIDTH)
FUTURE = torch.ones(LENGTH, LENGTH).triu(1).bool()
PADDED = (torch.arange(ROWS)[:, None] + torch.arange(LENGTH)) % 7 == 6


class Net(nn.Module):
    """A layer, ``part`` called on its output, and a loss."""

    def __init__(self, part: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.part, self.call = nn.Linear(WIDTH, WIDTH), part, call
        self.register_buffer("future", FUTURE)
        self.register_buffer("padded", PADDED)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, self.first(x)).square().mean()


def attention(dropout: float) -> nn.Module:
    return nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)


def encoder(dropout: float, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def decoder(dropout: float) -> nn.Module:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 16, dropout, batch_first=True)
    return nn.TransformerDecoder(layer, 1)


def with_weights(net: Net, x: Tensor) -> Tensor:
    out, weights = net.part(x, x, x)
    return torch.cat([out, weights], -1)


def per_head(net: Net, x: Tensor) -> Tensor:
    out, weights = net.part(x, x, x, average_attn_weights=False)
    return torch.cat([out, weights.flatten(1, 2).transpose(1, 2)], -1)


MODULES: dict[str, tuple[Callable[[float], nn.Module], Callable[..., Tensor]]] = {
    "attention with weights": (attention, with_weights),
    "attention with weights per head": (attention, per_head),
    "attention": (attention, lambda net, x: net.part(x, x, x, need_weights=False)[0]),
    "attention, causal": (
        attention,
        lambda net, x: net.part(
            x, x, x, need_weights=False, attn_mask=net.future, is_causal=True
        )[0],
    ),
    "attention, mask of the file": (
        attention, lambda net, x: net.part(x, x, x, need_weights=False, attn_mask=FUTURE)[0],
    ),
    "attention, padded": (
        attention,
        lambda net, x: net.part(x, x, x, need_weights=False, key_padding_mask=net.padded)[0],
    ),
    "cross attention": (
        attention, lambda net, x: net.part(x[:, :3], x, x * 2, need_weights=False)[0],
    ),
    "encoder": (encoder, lambda net, x: net.part(x)),
    "encoder, norm first": (
        lambda dropout: encoder(dropout, norm_first=True, activation="gelu"),
        lambda net, x: net.part(x, mask=net.future, is_causal=True),
    ),
    "encoder, padded": (
        encoder, lambda net, x: net.part(x, src_key_padding_mask=net.padded),
    ),
    "decoder": (decoder, lambda net, x: net.part(x, x.flip(1), tgt_mask=net.future)),
    "transformer": (
        lambda dropout: nn.Transformer(WIDTH, HEADS, 1, 1, 16, dropout, batch_first=True),
        lambda net, x: net.part(x, x.flip(1)),
    ),
}  # fmt: skip


DROPPED = (
    "attention with weights", "attention with weights per head", "attention, causal", "attention, padded",
    "cross attention", "encoder, norm first", "transformer",
)  # fmt: skip
"""Modules that are also tested with dropout, which is written out."""
TRAINED = ("attention", "attention with weights", "encoder", "decoder")
"""Modules that are also tested in training mode without dropout."""


@pytest.mark.parametrize(
    ("name", "dropout", "train"),
    [
        *(
            pytest.param(name, 0.2, True, id=f"{name}-dropout", marks=pytest.mark.slow)
            for name in DROPPED
        ),
        *(pytest.param(name, 0.2, False, id=f"{name}-eval") for name in MODULES),
        *(
            pytest.param(name, 0.0, True, id=f"{name}-train", marks=pytest.mark.slow)
            for name in TRAINED
        ),
    ],
)
def test_modules_with_attention_compute_what_one_device_does(
    name: str, dropout: float, train: bool
) -> None:
    make, call = MODULES[name]
    torch.manual_seed(0)
    model = Net(make(dropout), call).train(train)
    case = make_case(model, (X,))
    ops = {node.op for node in case.graph.nodes}
    assert ops <= RULES.keys(), "all of it is in the rule table"
    fused = "weights" not in name and not (train and dropout)
    assert ("hap.sdpa_backward.default" in ops) == fused
    world = 3 if train and dropout else 4
    found = verdict(case, random_plan(case, world, seed=world))
    assert found.ok, found.first_bad


@pytest.mark.slow
def test_a_frozen_encoder_is_not_one_operator() -> None:
    """Torch runs it as one where nothing in it is trained."""
    torch.manual_seed(0)
    model = Net(encoder(0.0), lambda net, x: x + net.part(x.detach())).eval()
    model.part.requires_grad_(False)
    before = torch.backends.mha.get_fastpath_enabled()
    case = make_case(model, (X,))
    assert torch.backends.mha.get_fastpath_enabled() == before
    ops = {node.op for node in case.graph.nodes}
    assert "hap.sdpa.default" in ops
    assert ops <= RULES.keys()
    assert verdict(case, random_plan(case, 3, seed=1)).ok


def split(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


aten = torch.ops.aten
CALLS: dict[str, Callable[..., Tensor]] = {
    "cpu": lambda q, p: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, p, True)[0],
    "flash": lambda q, p: aten._scaled_dot_product_flash_attention(q, q, q, p, True)[0],
    "efficient": lambda q, p: aten._scaled_dot_product_efficient_attention(
        q, q, q, None, True, p, True
    )[0],
    "cudnn": lambda q, p: aten._scaled_dot_product_cudnn_attention(
        q, q, q, None, True, p, True
    )[0],
    "overrideable": lambda q, p: aten._scaled_dot_product_fused_attention_overrideable(
        q, q, q, None, p, True
    )[0],
    "math": lambda q, p: aten._scaled_dot_product_attention_math(q, q, q, None, p, True)[0],
}  # fmt: skip


@pytest.mark.parametrize("kernel", CALLS)
def test_kernels_by_their_names_are_the_function(kernel: str) -> None:
    """Those of CUDA cannot run here; in the graph they are the operator that can."""
    torch.manual_seed(0)
    call = CALLS[kernel]

    def model(f: Callable[[Tensor], Tensor]) -> Net:
        torch.manual_seed(0)
        return Net(nn.Identity(), lambda net, x: f(split(x)))

    graph = capture(model(lambda q: call(q, 0.0)), (X,))
    ops = {node.op for node in graph.nodes}
    assert ops <= RULES.keys()
    if kernel == "math":
        return
    assert {"hap.sdpa.default", "hap.sdpa_backward.default"} <= ops
    plain = model(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    case = make_case(plain, (X,), graph=graph)
    for world in (2, 3, 4):
        assert verdict(case, random_plan(case, world, seed=world)).ok


@pytest.mark.parametrize("kernel", [k for k in CALLS if k != "math"])
def test_a_kernel_that_drops_weights_itself_is_refused_by_name(kernel: str) -> None:
    model = Net(nn.Identity(), lambda net, x: CALLS[kernel](split(x), 0.2))
    with pytest.raises(UnsupportedOpError, match=r"aten\._scaled_dot_product_.*random numbers"):
        with_rules(capture(model, (X,)), {})


@pytest.mark.parametrize("mask", ["boolean", "added", "trained"])
@pytest.mark.parametrize("width", [WIDTH // HEADS, 3], ids=["kernel", "math"])
def test_rows_that_are_wholly_masked_give_zeros(width: int, mask: str) -> None:
    """So are their gradients; with a trained mask, attention is decomposed."""
    seen = ~PADDED[:, None, :, None] & ~PADDED[:, None, None, :]
    bias = torch.zeros(LENGTH, LENGTH, requires_grad=mask == "trained")
    x = X.clone().requires_grad_()

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        q = split(x)
        added = (
            seen if mask == "boolean" else bias.expand(seen.shape).masked_fill(~seen, -torch.inf)
        )
        out = function(q, q.sin(), q[..., :width].cos(), attn_mask=added)
        return out, *torch.autograd.grad(out.square().sum(), x)

    wanted = run(F.scaled_dot_product_attention)
    assert not wanted[0].transpose(1, 2)[PADDED].any()
    for mine, theirs in zip(run(scaled_dot_product_attention), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_kernels_have_the_arguments_of_their_operators() -> None:
    for op, function in KERNELS.items():
        code = function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        assert count == len(op._schema.arguments), op
        assert code.co_kwonlyargcount == sum(a.kwarg_only for a in op._schema.arguments), op
