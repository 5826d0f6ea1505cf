"""Rows that a mask chooses are all rows with padding in a program, with the results of torch's own."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from hap.capture import dynamo_private, torch_private
from hap.capture.padding import functions, keep_all_rows
from hap.capture.padding.dims import name_of
from hap.capture.padding.entries import ACTIVATIONS, CONVERSIONS, SMOOTH, is_entrywise
from hap.capture.padding.row_indexing import INDEXING
from hap.capture.padding.rules import RULES
from hap.capture.read_numbers import numbers_as_tensors
from hap.capture.tracing import capture
from hap.errors import ModelError
from tests.random_plans import make_case, random_plan, verdict

# r: chosen rows (rows, 6); k: their class numbers, below 6; w: (6, 6); m: the mask (4, 5); x: (4, 5, 6)
Case = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]


def _added(m: Tensor, r: Tensor) -> Tensor:
    (at,) = m.flatten().nonzero(as_tuple=True)
    return torch.zeros(20, 6, dtype=r.dtype).index_add_(0, at, r, alpha=2)


def _largest(r: Tensor, k: Tensor, w: Tensor) -> Tensor:
    at = k[:, None].expand(-1, 6)
    found = torch.zeros_like(w).scatter_reduce_(0, at, r, reduce="amax", include_self=False)
    return found.square() + w.scatter_reduce(0, at, r, "mean") * w[0]


def _joined(r: Tensor, k: Tensor, w: Tensor) -> Tensor:
    other = r[k > 1]
    labels = torch.cat([torch.ones(len(r)), torch.zeros(len(other)), torch.zeros(6)])
    rows = torch.concat([r, other.square(), w], 0)
    return F.binary_cross_entropy_with_logits(rows[:, 0], labels.to(r.dtype)) + rows.var(0)


def _written(m: Tensor, r: Tensor, x: Tensor) -> Tensor:
    out = x.detach().nan_to_num(0, 0, 0).clone()
    out[m] = r
    return out


CASES: dict[str, Case] = {
    "view": lambda r, k, w, m, x: r.view(-1, 2, 3).square(),
    "reshape": lambda r, k, w, m, x: r.reshape(len(r), 3, 2)[:, 1],
    "flatten": lambda r, k, w, m, x: r.view(-1, 2, 3).flatten(1) * w[0],
    "unsqueeze": lambda r, k, w, m, x: (r.unsqueeze(1) * w).square(),
    "squeeze": lambda r, k, w, m, x: r[:, :1].squeeze(1).square(),
    "unflatten": lambda r, k, w, m, x: r.unflatten(1, (2, 3)).sum(1).square(),
    "view_as": lambda r, k, w, m, x: r.view(-1, 6, 1).view_as(r) * w[0],
    "expand": lambda r, k, w, m, x: w[0].expand(len(r), -1) * r,
    "expand_as": lambda r, k, w, m, x: w[0].expand_as(r) * r,
    "broadcast_to": lambda r, k, w, m, x: torch.broadcast_to(w[1], r.shape) * r,
    "transpose": lambda r, k, w, m, x: r.transpose(0, 1).square().sum(1),
    "permute": lambda r, k, w, m, x: r.view(-1, 2, 3).permute(2, 0, 1).square().mean(1),
    "t": lambda r, k, w, m, x: (r.t() @ r).square(),
    "swapaxes": lambda r, k, w, m, x: r.swapaxes(0, 1) * w[:, :1],
    "movedim": lambda r, k, w, m, x: r.movedim(0, 1) * w[:, :1],
    "getattr": lambda r, k, w, m, x: (r.T @ r).square(),
    "zeros": lambda r, k, w, m, x: (torch.zeros(len(r), 6) + w[0]) * r,
    "ones": lambda r, k, w, m, x: torch.ones(len(r), 6, dtype=r.dtype) * r,
    "empty": lambda r, k, w, m, x: torch.empty(len(r), 6).zero_() + r,
    "full": lambda r, k, w, m, x: torch.full((len(r), 6), 3.0) * r,
    "new_zeros": lambda r, k, w, m, x: r.new_zeros(len(r), 6) + r,
    "new_ones": lambda r, k, w, m, x: r.new_ones(r.shape) * r,
    "new_empty": lambda r, k, w, m, x: r.new_empty(r.shape).fill_(2) * r,
    "new_full": lambda r, k, w, m, x: r.new_full((len(r), 6), 2.0) * r,
    "dropout": lambda r, k, w, m, x: F.dropout(r, 0.5, training=False).square(),
    "dropout1d": lambda r, k, w, m, x: F.dropout1d(r.unsqueeze(2), 0.5, training=False),
    "dropout2d": lambda r, k, w, m, x: F.dropout2d(r.view(-1, 2, 3, 1), 0.0),
    "alpha_dropout": lambda r, k, w, m, x: F.alpha_dropout(r, 0.5, training=False),
    "softmax": lambda r, k, w, m, x: r.softmax(0).square() + r.softmax(-1),
    "log_softmax": lambda r, k, w, m, x: F.log_softmax(r, 0)[:, 1:] + r.log_softmax(1)[:, 1:],
    "argmax": lambda r, k, w, m, x: w[r.argmax(-1)],
    "argmin": lambda r, k, w, m, x: w[r.argmin(1)].square(),
    "cumsum": lambda r, k, w, m, x: r.cumsum(1).square(),
    "narrow": lambda r, k, w, m, x: r.narrow(1, 2, 3).square(),
    "select": lambda r, k, w, m, x: r.select(1, 2).square(),
    "flip": lambda r, k, w, m, x: r.flip(1) * w[0],
    "normalize": lambda r, k, w, m, x: F.normalize(r, dim=-1),
    "cosine_similarity": lambda r, k, w, m, x: F.cosine_similarity(r, r.exp()),
    "topk": lambda r, k, w, m, x: r.topk(2, -1).values.square(),
    "sort": lambda r, k, w, m, x: r.sort(-1).values * w[0],
    "argsort": lambda r, k, w, m, x: w[r.argsort(1)[:, 0]],
    "glu": lambda r, k, w, m, x: F.glu(r),
    "chunk": lambda r, k, w, m, x: r.chunk(2, -1)[0] * r.chunk(2, -1)[1],
    "split": lambda r, k, w, m, x: r.split(2, 1)[0].square(),
    "unbind": lambda r, k, w, m, x: r.unbind(1)[3].square(),
    "layer_norm": lambda r, k, w, m, x: F.layer_norm(r, (6,), w[0], w[1]).square(),
    "rms_norm": lambda r, k, w, m, x: F.rms_norm(r, (6,), w[0]).square(),
    "linear": lambda r, k, w, m, x: F.linear(r, w, w[0]).square(),
    "conv1d": lambda r, k, w, m, x: F.conv1d(r.view(-1, 1, 6), w.view(6, 1, 6)[:, :, :3]).square(),
    "conv2d": lambda r, k, w, m, x: F.conv2d(r.view(-1, 1, 2, 3), w.view(6, 1, 2, 3)).square(),
    "conv3d": lambda r, k, w, m, x: F.conv3d(r.view(-1, 1, 2, 3, 1), w.view(6, 1, 2, 3, 1)).square(),
    "max_pool1d": lambda r, k, w, m, x: F.max_pool1d(r.view(-1, 1, 6), 2).square(),
    "max_pool2d": lambda r, k, w, m, x: F.max_pool2d(r.view(-1, 1, 2, 3), 2).square(),
    "avg_pool1d": lambda r, k, w, m, x: F.avg_pool1d(r.view(-1, 1, 6), 2).square(),
    "avg_pool2d": lambda r, k, w, m, x: F.avg_pool2d(r.view(-1, 1, 2, 3), 2).square(),
    "adaptive_avg_pool1d": lambda r, k, w, m, x: F.adaptive_avg_pool1d(r.view(-1, 1, 6), 2).square(),
    "adaptive_avg_pool2d": lambda r, k, w, m, x: F.adaptive_avg_pool2d(r.view(-1, 1, 2, 3), 1).square(),
    "interpolate": lambda r, k, w, m, x: F.interpolate(r.view(-1, 1, 6), scale_factor=2).square(),
    "pad": lambda r, k, w, m, x: F.pad(r, (1, 1), value=0.5).square(),
    "matmul": lambda r, k, w, m, x: (r @ w).square().sum() + torch.matmul(r.mT, r),
    "mm": lambda r, k, w, m, x: torch.mm(r, w).square(),
    "bmm": lambda r, k, w, m, x: torch.bmm(r.view(-1, 2, 3), r.view(-1, 3, 2)),
    "cat": lambda r, k, w, m, x: torch.cat([r, r.square()], 1),
    "concat": lambda r, k, w, m, x: _joined(r, k, w),
    "stack": lambda r, k, w, m, x: torch.stack([r, r.square()], 1),
    "embedding": lambda r, k, w, m, x: F.embedding(k, w).square(),
    "gather": lambda r, k, w, m, x: r.gather(1, k.unsqueeze(1)).square(),
    "one_hot": lambda r, k, w, m, x: F.one_hot(k, 6) * r,
    "sum": lambda r, k, w, m, x: r.sum() * r.sum(0).square() + r.sum(-1).exp().sum(),
    "mean": lambda r, k, w, m, x: r.mean() * r.mean(0, keepdim=True).square() + r.half().mean(),
    "var": lambda r, k, w, m, x: r.var() + r.var(0) + r.var(0, correction=0) + r.var(unbiased=False),
    "std": lambda r, k, w, m, x: r.std() + r.std(0) + r.std(1).square().mean(),
    "amax": lambda r, k, w, m, x: r.amax() * r.amax(0),
    "amin": lambda r, k, w, m, x: torch.amin(r, 0),
    "max": lambda r, k, w, m, x: r.max() * torch.max(r, w[0]).mean() + k.max() + r.max(1).values.sum(),
    "min": lambda r, k, w, m, x: r.min() + torch.min(r, r.square()).sum(),
    "prod": lambda r, k, w, m, x: r.sum(-1).prod(0),
    "any": lambda r, k, w, m, x: (r > 9).any() * w + (r < -9).any(0),
    "all": lambda r, k, w, m, x: (r > -9).all() * w,
    "norm": lambda r, k, w, m, x: r.norm() + r.norm(p=2, dim=0),
    "linalg_vector_norm": lambda r, k, w, m, x: torch.linalg.vector_norm(r, 2, 0),
    "count_nonzero": lambda r, k, w, m, x: r.relu().count_nonzero() * w,
    "mse_loss": lambda r, k, w, m, x: F.mse_loss(r, r.square()) + F.mse_loss(r[:, 0], k.to(r.dtype)),
    "l1_loss": lambda r, k, w, m, x: F.l1_loss(r, w[0].expand_as(r), reduction="sum"),
    "smooth_l1_loss": lambda r, k, w, m, x: F.smooth_l1_loss(r, r.detach() + 1, beta=0.5),
    "huber_loss": lambda r, k, w, m, x: F.huber_loss(r, r.exp().detach(), reduction="none").sum(0),
    "binary_cross_entropy": lambda r, k, w, m, x: F.binary_cross_entropy(r.sigmoid(), (r > 0).to(r.dtype)),
    "binary_cross_entropy_with_logits": lambda r, k, w, m, x: F.binary_cross_entropy_with_logits(
        r, F.one_hot(k, 6).to(r.dtype), pos_weight=w[0].exp().detach()
    ),
    "kl_div": lambda r, k, w, m, x: F.kl_div(r.log_softmax(1), (r * 2).softmax(1), reduction="batchmean"),
    "soft_margin_loss": lambda r, k, w, m, x: F.soft_margin_loss(r, r.detach().sign()),
    "hinge_embedding_loss": lambda r, k, w, m, x: F.hinge_embedding_loss(r, r.detach().sign()),
    "poisson_nll_loss": lambda r, k, w, m, x: F.poisson_nll_loss(r, r.detach().square()),
    "margin_ranking_loss": lambda r, k, w, m, x: F.margin_ranking_loss(
        r[:, 0], r[:, 1], r[:, 2].detach().sign(), reduction="sum"
    ),
    "cosine_embedding_loss": lambda r, k, w, m, x: F.cosine_embedding_loss(r, r * w[0], (k > 2) * 2 - 1),
    "triplet_margin_loss": lambda r, k, w, m, x: F.triplet_margin_loss(r, r * w[0], r * w[1]),
    "multi_margin_loss": lambda r, k, w, m, x: F.multi_margin_loss(r, k),
    "multilabel_soft_margin_loss": lambda r, k, w, m, x: F.multilabel_soft_margin_loss(
        r, F.one_hot(k, 6).to(r.dtype), reduction="sum"
    ),
    "cross_entropy": lambda r, k, w, m, x: F.cross_entropy(r, k, label_smoothing=0.1)
    + F.cross_entropy(r, k, weight=w[0].exp().detach()),
    "nll_loss": lambda r, k, w, m, x: F.nll_loss(r, k, ignore_index=2, reduction="none"),
    "getitem": lambda r, k, w, m, x: x[m][..., 1:3].sum(1) * w[k, k] + x[m, 0] + w[:, k].sum(0),
    "setitem": lambda r, k, w, m, x: _written(m, r, x),
    "nonzero": lambda r, k, w, m, x: x[m.nonzero()[:, 0], m.nonzero()[:, 1]] * r,
    "argwhere": lambda r, k, w, m, x: x.flatten(0, 1)[torch.argwhere(m.flatten()).squeeze(1)].exp(),
    "where": lambda r, k, w, m, x: torch.where(r > 0, r, 0).square().sum() + x[torch.where(m)],
    "masked_select": lambda r, k, w, m, x: x[..., 2].masked_select(m).exp(),
    "index_select": lambda r, k, w, m, x: x.flatten(0, 1).index_select(0, m.flatten().nonzero().flatten()),
    "index_add": lambda r, k, w, m, x: _added(m, r).square(),
    "arange": lambda r, k, w, m, x: r[torch.arange(len(r)), k].exp(),
    "scatter_add": lambda r, k, w, m, x: w.scatter_add(0, k[:, None].expand(-1, 6), r).square(),
    "scatter_reduce": lambda r, k, w, m, x: _largest(r, k, w),
    "group_norm": lambda r, k, w, m, x: F.group_norm(r, 2, w[0], w[1]).square(),
    "logsumexp": lambda r, k, w, m, x: r.sum(-1).logsumexp(0) + r.logsumexp(1).sum(),
    "unfold": lambda r, k, w, m, x: r.unfold(1, 2, 2).prod(-1) + F.unfold(r.view(-1, 1, 2, 3), (2, 1)).prod(1),
    "batch_norm": lambda r, k, w, m, x: F.batch_norm(r, w[0].detach(), w[1].detach().exp(), w[2]).square(),
    "scaled_dot_product_attention": lambda r, k, w, m, x: F.scaled_dot_product_attention(
        r.view(-1, 3, 2), r.view(-1, 3, 2), r.view(-1, 3, 2)
    ).square(),
    "size": lambda r, k, w, m, x: r.new_ones(r.size()) * r / r.size(0),
    "unique_consecutive": lambda r, k, w, m, x: _checked(m, r),
    "type_as": lambda r, k, w, m, x: (k.type_as(r).sqrt() + k.to(r.dtype)) * r[:, 0],
}  # fmt: skip
"""Functions of the tables -> a call of each."""

OTHERS: dict[str, Case] = {
    "probabilities": lambda r, k, w, m, x: F.cross_entropy(r, r.detach().softmax(1), reduction="sum"),
    "quotients": lambda r, k, w, m, x: 1 / r + r / r.square() + r.exp().rsqrt() + (r - 0.5).reciprocal(),
    "numbers of rows": lambda r, k, w, m, x: r.sum() / len(r) + r.numel() / 7 * w + max(1, len(k)),
    "rows of rows": lambda r, k, w, m, x: F.cross_entropy(r[k > 1], k[k > 1]) + r[k > 1].mean(),
    "a second dim": lambda r, k, w, m, x: x.movedim(-1, 0)[:, m].square().mean(1),
    "in place": lambda r, k, w, m, x: (r * 2).add_(1).mul_(w[0]).div_(r.exp()).relu_(),
    "a part in place": lambda r, k, w, m, x: _part(r),
    "one row for many": lambda r, k, w, m, x: _written(m, w[:1], x).square(),
    "a number for many": lambda r, k, w, m, x: _written(m, w[0, 0], x).square(),
    "a new dim before": lambda r, k, w, m, x: x.flatten(0, 1)[None, m.flatten()].reshape(-1, 6).square(),
    "after an ellipsis": lambda r, k, w, m, x: x.movedim(-1, 0)[..., m].square().mean(-1),
    "after a number": lambda r, k, w, m, x: x.movedim(-1, 0)[2, m].exp(),
    "a part of a dim before": lambda r, k, w, m, x: x.movedim(-1, 0)[1:3, m].exp(),
    "two equal masks in a loss": lambda r, k, w, m, x: F.mse_loss(x[~(m == 0)], x[~(m == 0)].exp().detach()),
    "a mask that changes": lambda r, k, w, m, x: _changed(m, x),
    "rows of booleans": lambda r, k, w, m, x: torch.where((x > 0)[m], r, 0).sum() + (m & m)[m].sum(),
    "places that are looked up": lambda r, k, w, m, x: w.index_select(1, k).exp() @ r,
    "rows added at numbers": lambda r, k, w, m, x: w.index_add(0, k, r, alpha=0.5).square(),
    "names of numpy": lambda r, k, w, m, x: r.sum(axis=0, keepdims=True).square(),
    "experts": lambda r, k, w, m, x: _experts(x, w),
    "gathered at places": lambda r, k, w, m, x: _gathered(m, x),
    "equal masks": lambda r, k, w, m, x: F.cross_entropy(x[~(m == 0)], torch.ones_like(m).long()[~(m == 0)]),
}  # fmt: skip


def _checked(m: Tensor, r: Tensor) -> Tensor:
    torch._check(torch.unique_consecutive(m.sum(1)).numel() < 9)
    return r.square()


def _gathered(m: Tensor, x: Tensor) -> Tensor:
    at = m.flatten().nonzero()
    rows = torch.gather(x.flatten(0, 1), 0, at.expand(at.size(0), x.size(-1)))
    return F.cross_entropy(rows, torch.gather(torch.arange(20) % 6, 0, at.view(-1)))


def _changed(m: Tensor, x: Tensor) -> Tensor:
    m = m.clone()
    before, means = x.detach()[m], x.detach()[m].mean(0)
    m.view(-1)[:7] = False
    return means * before.square().mean(0) + x[m].mean(0)


def _part(r: Tensor) -> Tensor:
    r = r.clone()
    r[:, 1] = r[:, 0] * 2
    return r


def _experts(x: Tensor, w: Tensor) -> Tensor:
    """Return a mixture of three experts, each of which takes its rows out and writes them back."""
    x = x.nan_to_num(0, 0, 0).clamp(-9, 9).flatten(0, 1)
    weights, chosen = (x @ w[:3].T).softmax(-1).topk(2)
    out, written = torch.zeros_like(x), torch.zeros_like(x)
    for expert in range(3):
        rows, slot = torch.where(chosen == expert)
        out.index_add_(0, rows, (x[rows] @ w) * weights[rows, slot, None] * (expert + 1))
        slot, rows = torch.where((chosen == expert).T)
        written[rows] += x[rows] * weights[rows, slot].unsqueeze(1)
    return out.square() + written


class Rows(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = (case,)

    def forward(self, x: Tensor, m: Tensor, k: Tensor, w: Tensor) -> Tensor:
        found = self.case[0](x[m], k[m], w, m, x)
        return found.float().sum() if found.dtype == torch.float16 else found.sum()


def _results(function: Callable[..., Any], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 5, 6, generator=generator, dtype=torch.float64)
    m = torch.rand(4, 5, generator=generator) < 0.4
    k = torch.randint(6, (4, 5), generator=generator)
    w = torch.randn(6, 6, generator=generator, dtype=torch.float64).requires_grad_()
    for row, poison in enumerate([math.nan, math.inf, 0.0, 1e300]):  # where no row is chosen
        x[row].masked_fill_(~m[row].unsqueeze(1), poison)
    x.requires_grad_()
    found = function(x, m, k, w)
    (found,) = found if isinstance(found, tuple) else (found,)
    return [found, *torch.autograd.grad(found, [x, w], allow_unused=True, materialize_grads=True)]


def _replaced(module: nn.Module) -> Any:
    with torch_private.fake_mode():
        shapes = (torch.empty(4, 5, 6, dtype=torch.float64), torch.empty(4, 5, dtype=torch.bool),
                  torch.empty(4, 5, dtype=torch.int64), torch.empty(6, 6, dtype=torch.float64))  # fmt: skip
        graph = dynamo_private.dynamo_graph(module, shapes)
    called = {name_of(n) for n in graph.graph.nodes if n.op.startswith("call_")}
    keep_all_rows(graph)
    numbers_as_tensors(graph)
    graph.recompile()
    return graph, called


def test_each_function_has_a_case() -> None:
    elsewhere = {"ctc_loss"}  # tests/test_ctc.py
    assert {*CASES} - {"type_as"} == {*RULES, *INDEXING} - elsewhere
    assert {*functions.FILLS} <= {*RULES}
    assert all(map(is_entrywise, CONVERSIONS | ACTIVATIONS | SMOOTH))


def test_a_comparison_has_one_name_however_the_tracer_calls_it() -> None:
    graph = fx.Graph()
    x, y = map(graph.placeholder, "xy")
    calls = (
        graph.call_function(operator.eq, (x, y)),
        graph.call_function(torch.eq, (x, y)),
        graph.call_method("eq_", (x, y)),
        graph.call_method("__eq__", (x, y)),  # torch 2.11
    )
    assert {*map(name_of, calls)} == {"eq"}


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_rows_that_are_not_chosen_change_nothing(name: str) -> None:
    if name == "probabilities" and torch.__version__.startswith(("2.11.", "2.12.")):
        pytest.skip("torch 2.11 and 2.12 ask how many rows there are")
    module = Rows({**CASES, **OTHERS}[name])
    graph, called = _replaced(module)
    assert name in called or name in OTHERS
    for seed in range(3):
        for found, wanted in zip(_results(graph, seed), _results(module, seed), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


class Net(nn.Module):
    """A model of words whose loss is computed by ``case`` from it, the text and labels."""

    def __init__(self, case: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(3)
        )
        self.router, self.mask_token = nn.Linear(8, 3), nn.Parameter(torch.randn(8))
        self.images = nn.Parameter(torch.randn(4, 8))
        self.case = (case,)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        return self.case[0](self, text, labels)


def _masked_words(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    chosen = labels != -100
    scores = net.head(net.words(text)[chosen])
    right = (scores.argmax(-1) == labels[chosen]).sum() / chosen.sum()
    return F.cross_entropy(scores, labels[chosen]) + scores.sum() / len(scores) + right


def _missing_targets(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    found = net.head(net.words(text)).mean(-1)
    wanted = torch.where(labels > 0, 1.0 / labels, math.nan).to(found.dtype)
    there = ~torch.isnan(wanted)
    return F.mse_loss(found[there], wanted[there])


def _mixture(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    x = net.words(text).flatten(0, 1)
    weights, chosen = net.router(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        rows, place = torch.where(chosen == number)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
    return F.cross_entropy(net.head(out), labels.flatten())


def _masked_by_a_parameter(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    x = net.words(text).clone()
    x[labels == -100] = net.mask_token
    return F.cross_entropy(net.head(x).flatten(0, 1), text.flatten())


def _rows_in_turn(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    x = net.words(text).clone()
    x[labels == -100] = net.images
    return F.cross_entropy(net.head(x).flatten(0, 1), text.flatten())


def _if_labelled(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    scores = net.head(net.words(text)).flatten(0, 1)
    places = (labels.flatten() >= 0).nonzero()
    if places.size(0) == 0:
        return torch.tensor(0).to(scores)
    chosen = torch.gather(scores, 0, places.expand(places.size(0), scores.size(1)))
    return F.cross_entropy(chosen, torch.gather(labels.flatten(), 0, places.view(-1)))


def _last_and_first_of_each(net: Any, text: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.argsort(1) < 2
    torch._check(torch.unique_consecutive(chosen.sum(1)).numel() == 1)
    rows = net.words(text)[chosen, :].view(len(text), -1, 8)
    return F.cross_entropy(net.head(rows[:, -1, :] * rows[:, 0].exp()), text[:, 0])


MODELS = (
    _masked_words, _missing_targets, _mixture, _masked_by_a_parameter, _rows_in_turn, _if_labelled,
    _last_and_first_of_each,
)  # fmt: skip


def _batch() -> dict[str, Tensor]:
    labels = torch.randint(1, 30, (6, 5))
    labels[[0, 0, 2, 5], [1, 2, 4, 0]] = -100
    return {"text": torch.randint(30, (6, 5)), "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_ranks_compute_what_one_device_does(case: Any) -> None:
    torch.manual_seed(0)
    made = make_case(Net(case), _batch())
    for world in (2, 3):
        seen = verdict(made, random_plan(made, world, 0))
        assert seen.ok, seen.first_bad


def test_groups_of_different_numbers_of_rows_are_not_mixed() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    x = torch.randn(2, 3, 4)
    for last, places in ((True, [2, 2]), (False, [0, 1])):
        torch.testing.assert_close(functions.one_of_each(x, mask, last), x[[0, 1], places])
        assert functions.one_of_each(x, mask.logical_or(mask.flip(0)), last).isfinite().all()
        mask[0, 1] = True
        assert functions.one_of_each(x, mask, last).isnan().all()
        mask[0, 1] = False


REFUSED: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], str]] = {
    "a row by its number": (lambda n, t, y: n.words(t)[y > 3][0].sum(), "'getitem' .* is data"),
    "sums over the rows before": (lambda n, t, y: n.words(t)[y > 3].cumsum(0).sum(), "'cumsum' .* is data"),
    "dropout": (lambda n, t, y: F.dropout(n.words(t)[y > 3]).sum(), "'dropout' .* draws a random number"),
    "statistics": (
        lambda n, t, y: F.batch_norm(n.words(t)[y > 3], None, None, training=True).sum(), "'batch_norm' .* is data"
    ),
    "numbers of rows": (lambda n, t, y: (n.words(t)[y > 3] * torch.arange((y > 3).sum())[:, None]).sum(), "data"),
    "rows of two masks": (lambda n, t, y: F.mse_loss(n.words(t)[y > 3], n.words(t)[y > 4]), "two numbers|other rows"),
    "two masks compared": (
        lambda n, t, y: n.words(t).sum() * (2 if len(t[y > 3]) == len(t[y > 4]) else 1), "two numbers that are data"
    ),
    "a number of rows that is known": (
        lambda n, t, y: F.cross_entropy(n.head(n.words(t)[y == -100]), y[0, :4].clamp(min=0)), "must choose 4 rows|number that is data"
    ),
    "training either way": (lambda n, t, y: n.words(t[y > 3] if len(t[y > 3]) else t).sum(), "decides by a number that"),
    "a branch on a sum": (
        lambda n, t, y: n.words(t).sum() if y.sum().item() > 0 else y.sum().to(torch.float32), "Data-dependent branching|is data"
    ),
    "branches of two masks": (
        lambda n, t, y: n.words(t[y > 3]).sum() if len(t[y > 3]) and len(t[y > 4]) else y.sum() * 1.0, "decides by a number"
    ),
    "the second row of each": (
        lambda n, t, y: n.words(t)[y.argsort(1) < 2].view(6, -1, 8)[:, 1].sum(), "'getitem' .* is data"
    ),
    "rows divided by others": (
        lambda n, t, y: n.words(t)[y.argsort(1) < 2].view(-1, 6, 8).sum(), "'view' .* divided or joined|is data"
    ),
    "different values in order": (lambda n, t, y: n.words(torch.unique_consecutive(y)).sum(), "'unique_consecutive' .* is data"),
    "a branch": (lambda n, t, y: n.words(t).sum() * (1 if len(t[y > 3]) else 2), "decides by a number that is data"),
    "a loop": (lambda n, t, y: sum(n.words(e).sum() for e in (y > 3).nonzero()), "decides by a number that is data"),
    "two numbers compared": (
        lambda n, t, y: n.words(t).sum() * (2 if t.max().item() == y.max().item() else 1), "two numbers that are data"
    ),
    "rows in another order": (lambda n, t, y: n.words(t)[y > 3].flip(1, 0).sum(), "'flip' .* is data"),
    "a row before": (lambda n, t, y: F.pad(n.words(t)[y > 3], (0, 0, 1, 0)).sum(), "'pad' .* is data"),
    "different values": (lambda n, t, y: n.words(torch.unique(y)).sum(), "'unique' .* is data"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_by_name(name: str) -> None:
    case, message = REFUSED[name]
    with pytest.raises(ModelError, match=message) as raised:
        capture(Net(case), _batch())
    assert raised.value.hint
    assert "compared" in name or "test_padding.py:" in str(raised.value)
