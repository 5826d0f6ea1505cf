"""The search changes plans where the prices say so: crossovers worked out by hand.

Each test builds a tiny step in which two ways of splitting compete. It derives from the table of
prices (docs/how-a-plan-is-chosen.md) the size at which they cost the same, and checks the plans
one size below and one above. Four equal ranks are on one machine, whose link moves a byte in a
nanosecond and has no latency. Sizes are multiples of four, so that all shards are equal. A tensor
of b bytes then takes, in nanoseconds,

    gather, reduce-scatter    3/4 b
    all-reduce                6/4 b
    all-to-all               3/16 b

Computing takes no time, unless a test says so. Where computing everything on every rank would be
free, results of products may not be held whole (``no_repeated_products``). Batches arrive in
rows, as from an earlier layer. All elements are float32, of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hap.capture.tracing import capture
from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.graph import Graph
from hap.ir.placement import L, P, Placement, R, S
from hap.ir.program import Compute, Value
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.cost.operator_work import FLOPS
from hap.synthesizer.search.cost_tables import Allowed
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.synthesize import Synthesizer, proportional_shares

WORLD = 4
NANO = 1e-9


def cluster(flops_per_s: float) -> Cluster:
    devices = tuple(
        Device(
            name=f"m:{k}", kind="gpu", node="m", memory_bytes=1 << 40, launch_s=0.0,
            flops_per_s={"float32": flops_per_s}, memory_bytes_per_s=1e30,
            efficiency={"memory": 1e30},
        )
        for k in range(WORLD)
    )  # fmt: skip
    link = Link(1e9, 0.0)
    return Cluster("equal", devices, {"m": link}, link)


class Step(nn.Module):
    """Weights, with a forward that the test defines."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self._forward = forward

    def forward(self, *batch: Tensor) -> Tensor:
        return self._forward(self, *batch)


def space_of(forward: Callable[..., Tensor], *batch: Tensor, **shapes: tuple[int, ...]) -> Space:
    with torch.device("meta"):
        step = Step(forward, **shapes)
    return build_space(capture(step, batch))


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def numbers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def cheapest(space: Space, *rules: Allowed, flops_per_s: float = 1e30) -> Candidate:
    """Return the cheapest program on equal shares that all the ``rules`` allow."""

    def allowed(tensor: str, p: Placement, stored: bool) -> bool:
        return all(rule(tensor, p, stored) for rule in rules)

    search = Synthesizer(space, cluster(flops_per_s), 0, allowed)
    return search.cheapest(proportional_shares(space.axes, search.hardware.speed))


def in_rows(graph: Graph) -> Allowed:
    """Forbid batches that are stored whole."""
    batch = {i.tensor for i in graph.role("input")}
    return lambda t, p, stored: not (stored and t in batch and p == R)


def no_repeated_products(graph: Graph) -> Allowed:
    """Forbid whole results of products, except gradients of parameters."""
    gradients = set(graph.gradients.values())
    made = {o for n in graph.nodes if n.op in FLOPS for o in n.outputs if o} - gradients
    return lambda t, p, stored: not (t in made and p == R)


def rows(graph: Graph, found: Candidate, op: str) -> list[tuple[tuple[Placement, ...], Placement]]:
    """Return (inputs, first output) of each operator of a kind, in order."""
    return [
        (step.ins, step.outs[0])  # type: ignore[misc]
        for step in found.program.instructions
        if isinstance(step, Compute) and graph.by_name[step.node].op == op
    ]


def squares(out: Tensor, y: Tensor) -> Tensor:
    """Return a loss whose gradient 2 (out - y) is split like both. It costs an all-reduce: 4 B."""
    return (out - y).square().sum()


LOSS = 6 / 4 * 4
"""Nanoseconds of the all-reduce of a loss."""


def only(graph: Graph, target: str, *placements: Placement) -> Allowed:
    """Allow only these placements of a parameter, stored or held."""
    (tensor,) = (i.tensor for i in graph.role("parameter") if i.target == target)
    return lambda t, p, stored: t != tensor or p in placements


def took(found: Candidate, nanoseconds: float) -> bool:
    return found.serial.step_s == pytest.approx(nanoseconds * NANO, rel=1e-9)


# --- one linear layer: x (B, K), w (K, N), y (B, N) ------------------------------------------


def linear(batch: int, k: int, n: int) -> Space:
    return space_of(
        lambda m, x, y: squares(torch.mm(x, m.w), y), floats(batch, k), floats(batch, n), w=(k, n)
    )


@pytest.mark.parametrize("batch", [76, 80])
def test_factors_are_gathered_until_their_product_is_smaller(batch: int) -> None:
    """Sufficient-factor broadcasting against data parallel, w and its gradient replicated.

    Factors: gather x and the gradient of y, the difference out - y: 3/4 (4 B K + 4 B N); the loss
    needs nothing more. Data parallel: all-reduce dw and the loss, 6/4 (4 K N + 4). Equal at
    B (K + N) = 2 K N + 2; for K = 64 and N = 96 at B = 76.8.
    """
    k, n = 64, 96
    space = linear(batch, k, n)
    graph = space.graph
    found = cheapest(space, in_rows(graph), no_repeated_products(graph), only(graph, "w", R))
    forward, backward = rows(graph, found, "aten.mm.default")
    assert forward == ((S(0), R), S(0))
    factors, reduced = 3 * batch * (k + n), 6 * k * n + LOSS
    assert (factors < reduced) == (batch == 76)
    assert backward == (((R, R), R) if batch == 76 else ((S(1), S(0)), P))
    assert took(found, min(factors, reduced))


@pytest.mark.parametrize("batch", [168, 172])
def test_a_layer_with_many_columns_is_cut_by_columns(batch: int) -> None:
    """Column-parallel against data parallel, with w stored and held whole or in columns.

    Column-parallel: gather x, exchange y to columns, where the loss and its gradient stay:
    3 B K + 3/4 B N, and the loss. Data parallel: 6 K N, and the loss. Equal at
    B = 6 K N / (3 K + 3/4 N); for K = 32 and N = 256 at B = 170.7.
    """
    k, n = 32, 256
    space = linear(batch, k, n)
    graph = space.graph
    found = cheapest(space, in_rows(graph), no_repeated_products(graph), only(graph, "w", R, S(1)))
    columns, whole = 3 * batch * k + 0.75 * batch * n + LOSS, 6 * k * n + LOSS
    assert (columns < whole) == (batch == 168)
    assert rows(graph, found, "aten.mm.default") == (
        [((R, S(1)), S(1)), ((R, S(1)), S(1))] if batch == 168 else DATA_PARALLEL
    )
    assert took(found, min(columns, whole))


@pytest.mark.parametrize("batch", [128, 132])
def test_a_layer_with_many_rows_is_cut_by_rows(batch: int) -> None:
    """Row-parallel against data parallel, with w stored and held whole or in rows.

    Row-parallel: exchange x to its columns, reduce-scatter the partial product, gather the
    difference out - y, which gives every rank the loss: 3/4 B K + 3 B N + 3 B N. Data parallel:
    6 K N + 6. Equal at B = (6 K N + 6) / (3/4 K + 6 N); for K = 256 and N = 32 at B = 128.02.
    """
    k, n = 256, 32
    space = linear(batch, k, n)
    graph = space.graph
    found = cheapest(space, in_rows(graph), no_repeated_products(graph), only(graph, "w", R, S(0)))
    cut, whole = 0.75 * batch * k + 6 * batch * n, 6 * k * n + LOSS
    assert (cut < whole) == (batch == 128)
    assert rows(graph, found, "aten.mm.default") == (
        [((S(1), S(0)), P), ((S(0), R), S(0))] if batch == 128 else DATA_PARALLEL
    )
    assert took(found, min(cut, whole))


DATA_PARALLEL = [((S(0), R), S(0)), ((S(1), S(0)), P)]
"""Forward and weight gradient of a linear layer."""


@pytest.mark.parametrize("size", [100, 104])
@pytest.mark.parametrize("lead", [(), (1,)], ids=["batch", "sequence"])
def test_work_is_split_once_it_takes_longer_than_reducing_the_gradient(
    lead: tuple[int, ...], size: int
) -> None:
    """Data parallel with an all-reduce, and its equivalent along the sequence of a batch of one.

    x (1, L, K) and y are given whole; a device runs 51 operations in a nanosecond. Everything on
    every rank: 4 L K N operations, in the product and in dw. Split along L: a quarter of them,
    and all-reduces of dw and the loss, 6 K N + 6. Equal at 3 L K N / 51 = 6 K N + 6; for K = 8
    and N = 12 at L = 103.06.
    """
    k, n, rate = 8, 12, 51
    space = space_of(
        lambda m, x, y: squares(x @ m.w, y), floats(*lead, size, k), floats(*lead, size, n),
        w=(k, n),
    )  # fmt: skip
    graph = space.graph
    lengths = {name for name, axis in space.axes.axes.items() if axis.units == size}

    def only_lengths(tensor: str, p: Placement, stored: bool) -> bool:
        if stored:
            return p == R
        return not p.sharded or space.axes.of[tensor, p.dim] in lengths

    found = cheapest(space, only_lengths, flops_per_s=rate / NANO)
    alone = 4 * size * k * n / rate
    split = alone / WORLD + 6 * k * n + LOSS
    assert (alone < split) == (size == 100)
    everywhere = [((R, R), R), ((R, R), R)]
    along = len(lead)
    parallel = [((S(along), R), S(along)), ((S(1), S(along)), P)]
    ops = [f"aten.{op}.default" for op in ("mm", "matmul", "tensordot")]
    made = [row for op in ops for row in rows(graph, found, op)]
    assert made == (everywhere if size == 100 else parallel)
    # The formulas have no overlap; a program with overlap may be faster.
    assert found.timeline.step_s <= min(alone, split) * NANO * (1 + 1e-9)


# --- attention, experts ----------------------------------------------------------------------


HEADS, LENGTH, WIDTH = 4, 3, 20


def attention(m: Step, x: Tensor, y: Tensor) -> Tensor:
    """Self-attention without biases on x (B, 3, 20), with 4 heads."""
    b = x.shape[0]
    q, k, v = (
        (x @ w).reshape(b, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for w in (m.q, m.k, m.v)
    )
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return squares(out.reshape(b, LENGTH, WIDTH) @ m.o, y)


@pytest.mark.parametrize("batch", [8, 12, 24, 28])
def test_attention_is_cut_by_heads_until_its_weights_are_smaller(batch: int) -> None:
    """Head-parallel, then its mixture with data parallel, then data parallel.

    x has X = 60 B elements, D = 20. By heads: gather x, reduce-scatter the partial result, gather
    the difference out - y: 9 X (or, at the same cost, gather the attention's result and the factors
    of the last gradient). Mixed: gather x, exchange heads for rows after the attention and back
    before its backward, all-reduce the last gradient and the loss: 4.5 X + 6 D^2 + 6. Data
    parallel: all-reduce four gradients and the loss: 24 D^2 + 6. The first two are equal at
    B = 8.9, the others at B = 26.7.
    """
    x, d = batch * LENGTH * WIDTH, WIDTH
    weights = dict.fromkeys("qkvo", (d, d))
    space = space_of(attention, *(floats(batch, LENGTH, d) for _ in "xy"), **weights)
    graph = space.graph
    found = cheapest(space, in_rows(graph), no_repeated_products(graph))
    times = (9 * x, 4.5 * x + 6 * d**2 + LOSS, 24 * d**2 + LOSS)
    best = {8: 0, 12: 1, 24: 1, 28: 2}[batch]
    assert min(times) == times[best]
    assert took(found, times[best])
    ((ins, _),) = rows(graph, found, "hap.sdpa.default")
    assert ins == (S(0 if best == 2 else 1),) * 3
    gradients = set(graph.gradients.values())
    reduced = [c for c in found.program.collectives if c.tensor in gradients]
    assert len(reduced) == (0, 1, 4)[best]


@pytest.mark.parametrize("rows_", [52, 56])
def test_experts_stay_on_their_ranks_until_their_weights_are_smaller(rows_: int) -> None:
    """Expert-parallel, by all-to-alls, against data parallel.

    x (C, E, D) and y (C, E, F) arrive in rows; every expert has a weight (D, F). By experts:
    exchange rows of x and y for experts, 3/4 C E (D + F). Data parallel: all-reduce the
    gradients, 6 E D F. The loss is reduced in both. Equal at C = 8 D F / (D + F); for D = 12 and
    F = 16 at C = 54.9.
    """
    e, d, f = 8, 12, 16
    space = space_of(
        lambda m, x, y: squares(torch.bmm(x.transpose(0, 1), m.w), y.transpose(0, 1)),
        floats(rows_, e, d), floats(rows_, e, f), w=(e, d, f),
    )  # fmt: skip
    graph = space.graph
    found = cheapest(space, in_rows(graph), no_repeated_products(graph))
    experts, whole = 0.75 * rows_ * e * (d + f) + LOSS, 6 * e * d * f + LOSS
    assert (experts < whole) == (rows_ == 52)
    assert took(found, min(experts, whole))
    forward, backward = rows(graph, found, "aten.bmm.default")
    assert forward == (((S(0), S(0)), S(0)) if rows_ == 52 else ((S(1), R), S(1)))
    assert backward == (((S(0), S(0)), S(0)) if rows_ == 52 else ((S(2), S(1)), P))
    kinds = {c.kind for c in found.program.collectives}
    assert kinds == ({"all_to_all", "all_reduce"} if rows_ == 52 else {"all_reduce"})


# --- the vocabulary --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [56, 60])
def test_the_loss_is_cut_by_classes_until_their_weights_are_smaller(batch: int) -> None:
    """Vocabulary-parallel loss against data parallel.

    x (B, D), targets (B) of 8 bytes, V classes. By classes: gather x and the targets, combine the
    log-sum-exps (gather four terms of 4 B bytes, or reduce a maximum and a sum), all-reduce the
    loss; every rank knows the count: 3 B D + 6 B + 12 B + 6. Data parallel: all-reduce dw, the loss
    and the count: 6 V D + 6 + 6. Equal at B = (6 V D + 6) / (3 D + 18); for V = 40 and D = 16 at
    B = 58.3.
    """
    v, d = 40, 16
    space = space_of(
        lambda m, x, t: F.cross_entropy(F.linear(x, m.w), t), floats(batch, d), numbers(batch),
        w=(v, d),
    )  # fmt: skip
    graph = space.graph
    found = cheapest(space, in_rows(graph), no_repeated_products(graph))
    classes, whole = batch * (3 * d + 18) + LOSS, 6 * v * d + 2 * LOSS
    assert (classes < whole) == (batch == 56)
    assert took(found, min(classes, whole))
    ((ins, out),) = rows(graph, found, "hap.cross_entropy.default")
    assert (ins, out) == (((S(1), R), L) if batch == 56 else ((S(0), S(0)), S(0)))
    *_, (ins, out) = rows(graph, found, "aten.mm.default")
    assert out == (S(0) if batch == 56 else P)


@pytest.mark.parametrize("batch", [64, 68])
def test_a_table_stays_sharded_until_it_is_smaller_than_its_lookups(batch: int) -> None:
    """Vocabulary-parallel embedding against gathering the table, which is stored in shards.

    B indices of 8 bytes, V words, width D, which may not be split. By words: gather the indices,
    reduce-scatter the lookups, gather the difference: 6 B + 3 B D + 3 B D. Gathered: gather
    the table, reduce-scatter its gradient, all-reduce the loss: 3 V D + 3 V D + 6. (Gathering the
    table and the difference, 3 V D + 3 B D + 6 B, is never the cheapest.) Equal at
    B = (V D + 1) / (D + 1); for V = 72 and D = 16 at B = 67.8.
    """
    v, d = 72, 16
    space = space_of(
        lambda m, t, y: squares(F.embedding(t, m.w), y), numbers(batch), floats(batch, d), w=(v, d)
    )
    graph = space.graph
    found = cheapest(
        space, in_rows(graph), only(graph, "w", R, S(0)),
        lambda t, p, stored: not (stored and t == graph.role("parameter")[0].tensor and p == R),
        lambda t, p, stored: p != S(1),
    )  # fmt: skip
    words, whole = 6 * batch * (d + 1), 6 * v * d + LOSS
    assert (words < whole) == (batch == 64)
    assert took(found, min(words, whole))
    ((ins, out),) = rows(graph, found, "aten.embedding.default")
    assert (ins, out) == (((S(0), R), P) if batch == 64 else ((R, S(0)), S(0)))
    ((ins, out),) = rows(graph, found, "aten.embedding_dense_backward.default")
    # From all rows of the gradient, a rank computes its own words or all words, both in no time.
    assert ins == ((R, R) if batch == 64 else (S(0), S(0)))


# --- several placements at once --------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1], ids=["by rows", "by columns"])
def test_a_tensor_is_held_in_all_the_placements_that_its_readers_need(cut: int) -> None:
    """x is multiplied by w, which is whole, and by z, which is sharded.

    The first product is cheapest by rows, from x@S0, which is given. A z split by rows needs x@S1:
    an exchange, 3/4 B K, instead of a gather, 3 B K. A z split by columns needs x@R: the gather;
    the first product moves nothing more.
    """
    b, k, n = 64, 32, 16
    space = space_of(
        lambda m, x: squares(x @ m.w, 1.0) + squares(x @ m.z, 1.0),  # type: ignore[arg-type]
        floats(b, k), w=(k, n), z=(k, n),
    )  # fmt: skip
    graph = space.graph
    found = cheapest(
        space, in_rows(graph), no_repeated_products(graph), only(graph, "w", R),
        only(graph, "z", S(cut)),
    )  # fmt: skip
    (x,) = (i.tensor for i in graph.role("input"))
    moved = [c for c in found.program.collectives if c.tensor == x]
    assert [(c.kind, c.src, c.dst) for c in moved] == (
        [("all_to_all", S(0), S(1))] if cut == 0 else [("all_gather", S(0), R)]
    )
    first, second = rows(graph, found, "aten.mm.default")[:2]
    assert first == ((S(0), R), S(0))
    assert second == (((S(1), S(0)), P) if cut == 0 else ((R, S(1)), S(1)))
    read = [
        Value(name, p)
        for step in found.program.instructions if isinstance(step, Compute)
        for name, p in zip(graph.by_name[step.node].inputs, step.ins, strict=True)
    ]  # fmt: skip
    assert {Value(x, S(0)), Value(x, S(1) if cut == 0 else R)} <= set(read)
