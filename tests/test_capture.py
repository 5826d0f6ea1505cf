"""nn.Module -> Graph: the models that are captured, and refusals that name a line."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from hap.capture import attention, tensor_constants, torch_private
from hap.capture.source_lines import line_of, raised_at
from hap.capture.tracing import capture
from hap.errors import ModelError
from hap.ir.graph import Graph
from hap.synthesizer.rules import RULES
from tests.random_plans import benchmark_case, make_case, random_plan, verdict
from tests.test_models import VARIANTS

ROOT = Path(__file__).parents[1]
DROPOUT = ("bert", "mlp", "segmenter", "vit")
"""Models that are captured with dropout too: in attention, between layers, of images."""
TINY = [
    (file, variant)
    for file, variants in VARIANTS.items() for variant in variants
    if variant.startswith("tiny") and (variant != "tiny_dropout" or file in DROPOUT)
]  # fmt: skip


class Net(nn.Module):
    """A linear layer, with a forward that the test defines."""

    def __init__(self, forward: Callable[..., Any], **tensors: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        for name, value in tensors.items():
            self.register_buffer(name, value)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


@dataclass
class Output:
    """An output object like those of transformers."""

    loss: Any


def squared(net: Net, x: Tensor) -> Tensor:
    return net.linear(x).square().mean()


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


# --- whole models --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("file", "variant"), TINY)
def test_every_model_is_captured(file: str, variant: str) -> None:
    case = benchmark_case(file, variant)
    graph, model = case.graph, case.model
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(graph.gradients) == trained
    assert {i.target for i in graph.role("parameter")} == trained
    assert graph.tensors[graph.loss].shape == ()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for target, gradient in graph.gradients.items():
        assert graph.tensors[gradient].shape == shapes[target]
    assert {node.op for node in graph.nodes} <= set(RULES)
    assert Graph.from_json(graph.to_json()).digest == graph.digest
    dropout = any(node.op == "aten.native_dropout.default" for node in graph.nodes)
    assert dropout == (variant == "tiny_dropout")
    assert graph.backward
    assert graph.producer[graph.loss].name not in graph.backward


DIGEST = """
import torch
from hap.capture.source_lines import line_of, raised_at
from hap.capture.tracing import capture
from hap.capture.torch_private import fake_mode
from benchmarks.models import vit
with fake_mode():
    model, batch = vit.tiny(), vit.tiny_batch()
print(capture(model, batch).digest)
"""


@pytest.mark.slow
def test_the_digest_depends_on_neither_process_nor_hash_seed_nor_data() -> None:
    """A process can therefore check a plan that another one made."""
    here = benchmark_case("vit", "tiny").graph.digest
    out = subprocess.run(
        [sys.executable, "-c", DIGEST], env=os.environ | {"PYTHONHASHSEED": "4711"}, cwd=ROOT,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.strip() == here


@pytest.mark.parametrize("device", ["meta", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_digest_does_not_depend_on_the_device(device: str) -> None:
    expected = capture(Net(squared), X).digest
    if device == "fake":
        with torch_private.fake_mode():
            model, batch = Net(squared), torch.randn(4, 6)
    else:
        model, batch = Net(squared).to(device), X.to(device)
    assert capture(model, batch).digest == expected


def test_the_digest_tells_programs_apart() -> None:
    def doubled(net: Net, x: Tensor) -> Tensor:
        return (net.linear(x) * 2).square().mean()

    digests = {
        capture(Net(squared), X).digest,
        capture(Net(doubled), X).digest,
        capture(Net(squared), X[:3]).digest,
        capture(Net(squared).double(), X.double()).digest,
    }
    assert len(digests) == 4


def test_capture_leaves_the_model_alone() -> None:
    net = Net(squared, running=torch.zeros(8))
    before = {name: t.clone() for name, t in net.state_dict().items()}
    capture(net, X)
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert net.training


# --- losses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [lambda loss: loss, lambda loss: Output(loss=loss), lambda loss: {"loss": loss}],
    ids=["scalar", "object", "dict"],
)
def test_a_loss_comes_bare_or_in_an_object(wrap: Callable[[Tensor], Any]) -> None:
    graph = capture(Net(lambda net, x: wrap(squared(net, x))), X)
    assert graph.digest == capture(Net(squared), X).digest


def test_a_loss_may_stand_outside_of_the_module() -> None:
    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean() + batch.sum()

    graph = capture(Net(lambda net, x: net.linear(x)), X, loss)
    assert graph.tensors[graph.loss].shape == ()
    assert "x" not in [i.target for i in graph.role("input")]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda net, x: net.linear(x), r"shape \(4, 8\), not a scalar"),
        (lambda net, x: net.linear(x).mean(0, keepdim=True), r"shape \(1, 8\), not a scalar"),
        (lambda net, x: net, "no loss"),
        (lambda net, x: {"logits": net.linear(x)}, "no loss"),
        (lambda net, x: Output(loss=3.0), "a float, not a tensor"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        capture(Net(forward), X)
    assert "loss(output, batch)" in error.value.hint


def test_a_batch_of_another_kind_is_refused() -> None:
    with pytest.raises(ModelError, match="batch\\(\\) returned str"):
        capture(Net(squared), "rows")


# --- batches -------------------------------------------------------------------------------


def test_a_batch_is_a_tensor_a_tuple_or_a_dict() -> None:
    def two(net: Net, x: Tensor, y: Tensor) -> Tensor:
        return (net.linear(x) - y).square().mean()

    y = torch.randn(4, 8)
    alone = capture(Net(squared), X)
    assert [i.target for i in alone.role("input")] == ["*"]
    pair = capture(Net(two), (X, y))
    assert [i.target for i in pair.role("input")] == ["0", "1"]
    named = capture(Net(two), {"y": y, "x": X})
    assert [i.target for i in named.role("input")] == ["y", "x"]
    shapes = {i.target: named.tensors[i.tensor].shape for i in named.role("input")}
    assert shapes == {"y": (4, 8), "x": (4, 6)}


def test_constants_in_a_batch_are_part_of_the_program() -> None:
    def scaled(net: Net, x: Tensor, factor: float) -> Tensor:
        return (net.linear(x) * factor).square().mean()

    two, three = (capture(Net(scaled), {"x": X, "factor": f}) for f in (2.0, 3.0))
    assert [i.target for i in two.role("input")] == ["x"]
    assert two.digest != three.digest


# --- parameters and buffers ----------------------------------------------------------------


def test_frozen_and_unused_parameters() -> None:
    net = Net(squared)
    net.linear.bias.requires_grad_(False)
    net.spare = nn.Linear(3, 3)
    graph = capture(net, X)
    assert {i.target for i in graph.role("parameter")} == {"linear.weight", "linear.bias"}
    assert set(graph.gradients) == {"linear.weight"}


def test_tied_weights_are_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens)).logsumexp(-1).mean()

    graph = capture(Tied(), torch.randint(11, (4, 5)))
    assert [i.target for i in graph.role("parameter")] == ["embed.weight"]
    assert list(graph.gradients) == ["embed.weight"]
    for file in ("gpt2", "bert"):
        case = benchmark_case(file, "tiny")
        names = [i.target for i in case.graph.role("parameter")]
        assert len(names) == len(set(names)) == len(list(case.model.parameters()))


def test_a_buffer_that_the_forward_updates_is_an_output() -> None:
    def tracked(net: Net, x: Tensor) -> Tensor:
        y = net.linear(x)
        net.running.mul_(0.9).add_(0.1 * y.detach().sum(0))
        return (y - net.running).square().mean()

    graph = capture(Net(tracked, running=torch.zeros(8), spare=torch.zeros(2)), X)
    assert [(o.role, o.target) for o in graph.outputs if o.role == "buffer"] == [
        ("buffer", "running")
    ]
    assert [i.target for i in graph.role("buffer")] == ["running"]


def test_the_gradient_of_a_bias_is_one_sum() -> None:
    graph = capture(nn.Linear(4, 3), (torch.zeros(2, 5, 4),), lambda out, batch: out.square().sum())
    (bias,) = (o.tensor for o in graph.outputs if o.target == "bias")
    (node,) = (n for n in graph.nodes if bias in n.outputs)
    assert (node.op, node.args[1:]) == ("aten.sum.dim_IntList", ((0, 1),))


def test_a_sum_whose_kept_dims_are_read_stays() -> None:
    def loss(x: Tensor, batch: object) -> Tensor:
        total = x.sum(0, keepdim=True)
        return (x * total).sum() + total.squeeze(0).sum()

    graph = capture(nn.Linear(4, 3), (torch.zeros(2, 4),), loss)
    kept = [n for n in graph.nodes if n.op == "aten.sum.dim_IntList" and n.args[2:] == (True,)]
    assert kept


def test_a_tensor_kept_as_an_attribute_is_an_input() -> None:
    net = Net(lambda net, x: (net.linear(x) * net.scales).square().mean())
    net.scales = torch.arange(8.0)
    graph = capture(net, X)
    assert "scales" in [i.target for i in graph.inputs]


# --- models that cannot be captured ----------------------------------------------------------


def branches(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    if y.sum() > 0:
        y = -y
    return y.square().mean()


def reads(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    return y[: int(y.max().item())].square().mean()


def counts(net: Net, x: Tensor) -> Tensor:
    y = net.linear(x)
    return y[y > 0][0].square()


@pytest.mark.parametrize(("forward", "line"), [(branches, 2), (reads, 2), (counts, 2)])
def test_control_flow_on_data_names_its_line(forward: Callable[..., Tensor], line: int) -> None:
    with pytest.raises(ModelError) as error:
        capture(Net(forward), X)
    file, _, number = error.value.where.rpartition(":")
    assert Path(file).name == Path(__file__).name
    assert int(number) == forward.__code__.co_firstlineno + line
    assert "torch.where" in (error.value.hint or "")


def test_a_large_tensor_made_from_python_data_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_constants, "LARGEST", 100)  # more entries would take a minute
    many = [1.0] * (tensor_constants.LARGEST + 1)

    def literal(net: Net, x: Tensor) -> Tensor:
        return (net.linear(x) * torch.tensor(many).sum()).square().mean()

    with pytest.raises(ModelError, match=f"{len(many)} elements from Python data") as error:
        capture(Net(literal), X)
    assert "register_buffer" in error.value.hint


# --- attention -----------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 36)
        self.options = options

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (batch, length, 12); three heads of size four."""
        b, length, _ = x.shape
        q, k, v = self.linear(x).view(b, length, 3, 3, 4).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return out.square().mean()


def masks(kind: str, length: int = 7) -> Tensor | None:
    keep = torch.ones(length, length, dtype=torch.bool).tril()
    generator = torch.Generator().manual_seed(1)
    return {
        "none": None,
        "boolean": keep,
        "per row": torch.rand(5, 1, length, length, generator=generator) + 0.1 > 0.2,
        "added": torch.randn(length, length, generator=generator),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "causal"), [("none", False), ("none", True), ("boolean", False), ("added", False)]
)
def test_attention_is_one_operator(kind: str, causal: bool) -> None:
    batch = {"x": torch.randn(5, 7, 12)}
    if (mask := masks(kind)) is not None:
        batch["mask"] = mask
    case = make_case(Attention(is_causal=causal), batch)
    names = [node.op for node in case.graph.nodes]
    assert names.count("hap.sdpa.default") == 1
    assert names.count("hap.sdpa_backward.default") == 1
    assert not any("softmax" in name for name in names)
    for seed in range(3):
        assert verdict(case, random_plan(case, 2 + seed, seed)).ok


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_dropout_is_written_out(causal: bool) -> None:
    graph = capture(Attention(dropout_p=0.5, is_causal=causal), torch.randn(5, 7, 12))
    names = [node.op for node in graph.nodes]
    assert not any("sdpa" in name for name in names)
    assert names.count("aten.native_dropout.default") == 1


def test_a_trained_mask_is_written_out() -> None:
    class Biased(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(7, 7))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x, self.bias)

    case = make_case(Biased(), torch.randn(5, 7, 12))
    assert "bias" in case.graph.gradients
    assert not any("sdpa" in node.op for node in case.graph.nodes)
    assert verdict(case, random_plan(case, 3, 0)).ok


def heads(dtype: torch.dtype, *, batch: int = 5, v_dim: int = 4, length: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(batch, 3, length, 4), (batch, 3, length, 4), (batch, 3, length, v_dim)]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v_dim", [4, 6])
@pytest.mark.parametrize(("kind", "causal"), [("none", False), ("none", True), ("boolean", False), ("per row", False), ("added", False)])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_is_torchs(
    device: str, kind: str, causal: bool, v_dim: int, dtype: torch.dtype
) -> None:
    mask = masks(kind)
    if mask is not None:
        mask = mask.to(device) if mask.dtype == torch.bool else mask.to(device, dtype)
    q, k, v = (t.detach().to(device).requires_grad_() for t in heads(dtype, v_dim=v_dim))
    out, lse = torch.ops.hap.sdpa(q, k, v, mask, causal, 0.5)
    expected = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=0.5)
    torch.testing.assert_close(out, expected)
    weight = torch.randn_like(expected)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    scores = (q @ k.transpose(-2, -1)) * 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if kind != "added" else scores + mask
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", ["nothing", "by a mask", "the future"])
@pytest.mark.parametrize(("length", "keys", "width"), [(40, 40, 16), (7, 33, 64), (33, 9, 24), (5, 5, 6)])  # fmt: skip
def test_attention_in_half_precision_on_cuda(
    length: int, keys: int, width: int, hidden: str, dtype: torch.dtype
) -> None:
    """All kernels that torch may choose from give what double precision gives, to their rounding."""
    masked, causal = hidden == "by a mask", hidden == "the future"
    generator = torch.Generator().manual_seed(3)
    whole = [
        torch.randn(2, 3, n, width, generator=generator, dtype=torch.float64)
        for n in (length, keys, keys)
    ]
    mask = torch.rand(length, keys, generator=generator) < 0.8 if masked else None
    if mask is not None:
        mask[:, 0] = True
    exact = [x.clone().requires_grad_() for x in whole]
    half = [x.to("cuda", dtype).requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*exact, mask, is_causal=causal)
    found = torch.ops.hap.sdpa(
        *half, None if mask is None else mask.cuda(), causal, width**-0.5
    )[0]  # fmt: skip
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weight).sum(), exact)
    given = torch.autograd.grad((found * weight.to("cuda", dtype)).sum(), half)
    for one, other in ((found, expected), *zip(given, wanted, strict=True)):
        apart = (one.cpu().double() - other).norm() / other.norm()
        assert apart < (2e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("batch_and_heads", [(0, 3), (5, 0)])
def test_attention_of_an_empty_shard(batch_and_heads: tuple[int, int]) -> None:
    b, h = batch_and_heads
    for mask, causal in itertools.product(
        (None, torch.ones(7, 7, dtype=torch.bool)), (False, True)
    ):
        q, k, v = (torch.zeros(b, h, 7, d, requires_grad=True) for d in (4, 4, 6))
        out, lse = torch.ops.hap.sdpa(q, k, v, mask, causal, 0.5)
        assert out.shape == (b, h, 7, 6)
        assert lse.shape == (b, h, 7)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_shared_heads_are_repeated() -> None:
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.float64) for h in (6, 2, 2))
    found = attention.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["none", "boolean", "added"])
def test_the_written_out_attention_equals_torchs(kind: str) -> None:
    """The written-out attention handles inputs of three dims, without dropout."""
    q, k, v = (t[:, 0] for t in heads(torch.float64))
    found = attention.scaled_dot_product_attention(q, k, v, mask_of(kind), is_causal=kind == "none")
    expected = F.scaled_dot_product_attention(q, k, v, mask_of(kind), is_causal=kind == "none")
    torch.testing.assert_close(found, expected)


def mask_of(kind: str) -> Tensor | None:
    mask = masks(kind)
    return mask.double() if mask is not None and mask.is_floating_point() else mask


def test_an_ordinary_mistake_in_the_forward_is_told_with_its_line() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ x * self.weight).sum()

    with pytest.raises(ModelError, match="the forward fails: RuntimeError") as caught:
        capture(Wrong(), torch.zeros(3, 5))
    assert "test_capture.py:" in caught.value.where


def test_flexible_attention_is_refused_with_another_function() -> None:
    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return flex_attention(x * self.weight, x, x).sum()  # type: ignore[union-attr]

    with pytest.raises(ModelError, match="FlexAttention does not support backward") as caught:
        capture(Flexible(), torch.zeros(2, 3, 4, 8))
    assert "scaled_dot_product_attention" in caught.value.hint


def test_a_dtype_that_no_rule_prices_is_refused_by_name() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(x * self.weight).exp().abs().sum()

    with pytest.raises(ModelError, match="complex64"):
        capture(Spectrum(), torch.zeros(3, 6))


# --- source lines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, users",
    [
        (str(ROOT / "hap" / "ir" / "batch.py"), False),
        (torch.nn.modules.container.__file__, False),
        ("/home/me/torch/model.py", True),
    ],
)
def test_lines_of_torch_and_of_this_package_are_not_the_users(file: str, users: bool) -> None:
    trace = f'File "/model.py", line 3, in forward\n  File "{file}", line 7, in call'
    assert line_of(trace) == (f"{file}:7" if users else "/model.py:3")
    error = ValueError()
    code = compile("def fail(error): raise error", file, "exec")
    with pytest.raises(ValueError) as raised:
        exec(code, names := {})
        names["fail"](error)
    assert raised_at(raised.value) == (f"{file}:1" if users else f"{__file__}:{_line(error)}")


def _line(error: Exception) -> int:
    """The line of this file that an error came through last."""
    frames = traceback.extract_tb(error.__traceback__)
    return next(f.lineno for f in reversed(frames) if f.filename == __file__) or 0
