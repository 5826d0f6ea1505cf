"""The rule table against brute force: no row is wrong, and missing rows have a reason.

``python -m tests.test_rules`` prints what was checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from hap.errors import UnsupportedOpError
from hap.ir.graph import FREE, Graph, Input, Node, Output, Tensor
from hap.ir.graph_builder import RANDOM
from hap.ir.image_operators import ADAPTIVE_MAX_POOLS, MAX_POOLS
from hap.ir.mesh import is_mesh_op
from hap.ir.placement import P, R, S
from hap.rule_check import Case, cuts, missing
from hap.synthesizer.cost.operator_work import node_work
from hap.synthesizer.rules import RULES, Row
from hap.synthesizer.search.program_space import build_space
from tests.rule_samples import SAMPLES

OPS = [op for op in RULES if not is_mesh_op(op)]
"""All but the collectives between machines, which tests/test_two_axes.py runs on a mesh."""
DROPOUT = "aten.native_dropout.default"
COMPARABLE = [op for op in OPS if op not in RANDOM]


class Reason(NamedTuple):
    """Why valid rows are not in the table, and which rows of the operator this covers."""

    why: str
    covers: Callable[[Row, Node], bool]


def partial(*inputs: int) -> Callable[[Row, Node], bool]:
    return lambda row, _: any(row.ins[i] == P for i in inputs)


def itself(row: Row, node: Node) -> bool:
    return node.inputs[0] == node.inputs[1]


FINITE = Reason("terms of a sum may be infinite where it is not asked", partial(0))
ITSELF = Reason("a tensor less or over itself is no sum: no program writes that", itself)
SHAPE = Reason("only lends its shape, and the forward, not linear, reads no partial", partial(1))
VALUES = "one product makes queries, keys and values, and the scores need it whole"
WIDTH = "a part of the values' width repeats all the scores, outside the fused kernel"
PARAMETERS = "a norm's weight and bias are parameters, which are never partial"
STATISTICS = "a variance's root is not linear: statistics are whole, and weights are parameters"

EXPLAINED: dict[str, list[Reason]] = {
    "aten.isinf.default": [FINITE],
    "aten.isnan.default": [FINITE],
    "aten.sub.Tensor": [ITSELF],
    "aten.div.Tensor": [ITSELF],
    "aten.convolution_backward.default": [
        Reason("the forward, bilinear, reads no two partial tensors; it saves what it read",
               lambda row, _: row.ins.count(P) == 2),
    ],
    "hap.sdpa.default": [
        Reason(VALUES, partial(2)),
        Reason(WIDTH, lambda row, _: row.ins[2] == S(3)),
    ],
    "hap.sdpa_backward.default": [
        Reason(VALUES, partial(3)),
        Reason(WIDTH, lambda row, _: row.ins[3] == S(3)),
    ],
    "hap.recurrence_backward.default": [
        Reason("tanh and relu need no states; the forward, not linear, makes none partial",
               lambda row, node: "rnn" in str(node.args) and P in row.ins[1:]),
    ],
    **{f"aten.{op}_backward.default": [SHAPE] for op in (*MAX_POOLS, *ADAPTIVE_MAX_POOLS)},
    "aten.nll_loss_backward.default": [SHAPE],
    "aten.nll_loss_forward.default": [
        Reason("log-probabilities are never partial: a softmax is not linear", partial(0)),
        Reason("class weights are a buffer, which is whole",
               lambda row, _: len(row.ins) == 3 and row.ins[2] == P),
    ],
    "aten.native_layer_norm.default": [
        Reason(PARAMETERS, lambda row, _: P in row.ins[1:]),
    ],
    "hap.group_norm.default": [Reason(PARAMETERS, lambda row, _: P in row.ins[1:])],
    "hap.group_norm_backward.default": [
        Reason(PARAMETERS, lambda row, _: P in row.ins[4:]),
    ],
    "aten.native_layer_norm_backward.default": [
        Reason(PARAMETERS, lambda row, _: P in row.ins[4:]),
    ],
    "hap.by_mode.default": [
        Reason("which of the two is read is known when it runs", lambda row, _: P in row.ins),
    ],
    "hap.channel_variance.default": [
        Reason("the mean of the whole batch is not read, and is never partial", partial(1)),
    ],
    "hap.normalize.default": [Reason(STATISTICS, lambda row, _: P in row.ins[1:])],
    "hap.normalize_sums.default": [Reason(STATISTICS, lambda row, _: P in row.ins[2:])],
    "hap.normalize_backward.default": [Reason(STATISTICS, lambda row, _: P in row.ins[2:5])],
}  # fmt: skip
"""Operator -> why some valid rows, which no row of the table gives, are left out.

Rows that the table gives with free instructions around a row do not count as missing: a shard or
a masked term of a replicated result, and a replica where a row reads a shard or a term.
"""


@functools.cache
def cases(op: str) -> list[Case]:
    return [Case(sample) for sample in SAMPLES if sample.op == op]


@functools.cache
def missing_rows(op: str) -> list[tuple[Case, Row]]:
    return [(case, row) for case in cases(op) for row in missing(case)]


def test_every_operator_with_a_rule_has_a_sample() -> None:
    assert set(OPS) == {sample.op for sample in SAMPLES}


@pytest.mark.parametrize("op", COMPARABLE)
def test_no_row_is_wrong(op: str) -> None:
    for case in cases(op):
        for row in case.rows():
            assert not case.wrong(row), f"{case.sample}: {case.wrong(row)}"


@pytest.mark.parametrize("op", COMPARABLE)
def test_rows_that_are_missing_have_a_reason(op: str) -> None:
    reasons = EXPLAINED.get(op, [])
    used = set()
    for case, row in missing_rows(op):
        covering = [reason for reason in reasons if reason.covers(row, case.node)]
        assert covering, f"{case.sample}: {row} holds ({row.units} blocks); why is it left out?"
        used.add(covering[0].why)
    assert used == {reason.why for reason in reasons}, "a reason that explains nothing"


@pytest.mark.parametrize(
    ("op", "row"),
    [
        ("aten.mm.default", Row((P,), (S(0), R), 5)),
        ("aten.mm.default", Row((P,), (P, P))),
        ("aten.exp.default", Row((P,), (P,))),
        ("aten._softmax.default", Row((S(2),), (S(2),), 7)),
        ("aten.native_layer_norm.default", Row((S(2), R, R), (S(2), S(0), S(0)), 7)),
        ("aten.nll_loss_forward.default", Row((R, P), (S(0), S(0)), 7)),
    ],
)
def test_a_wrong_row_is_found(op: str, row: Row) -> None:
    assert cases(op)[0].wrong(row)


@pytest.mark.parametrize("op", ["aten.mm.default", "aten.view.default", "aten.cat.default"])
def test_a_row_left_out_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(cases(op)[0].sample)
    complete = case.rows()
    for left_out in complete[1:]:
        monkeypatch.setitem(RULES, op, lambda _, row=left_out: [r for r in complete if r != row])
        assert left_out in missing(case)


def test_dropout_masks_differ_between_shards_and_agree_between_replicas() -> None:
    (case,) = cases(DROPOUT)
    x, keep = next(iter(case.given.values())), 1 - 0.3
    for row in case.rows():
        for shares in cuts(row.units):
            parts = case.run(row, shares)
            for local in parts:
                kept = local["o1"]
                assert kept.dtype == torch.bool
                torch.testing.assert_close(local["o0"], kept.double() / keep)  # the input is ones
                assert kept.numel() < 100 or abs(kept.double().mean() - keep) < 0.1
            masks = [local["o1"] for local in parts if local["o1"].numel()]
            (place, again) = row.outs
            assert place == again == row.ins[0]
            if not row.units:
                assert all(torch.equal(mask, masks[0]) for mask in masks)
                continue
            assert torch.cat(masks, place.dim).shape == x.shape
            sizes = [min(s) for s in zip(*(mask.shape for mask in masks), strict=True)]
            corners = [mask[tuple(slice(s) for s in sizes)] for mask in masks]
            assert not any(torch.equal(corner, corners[0]) for corner in corners[1:])


@pytest.mark.parametrize("op", sorted(RANDOM - {DROPOUT}))
def test_random_numbers_differ_between_shards_and_agree_between_replicas(op: str) -> None:
    (case,) = cases(op)
    whole = case.whole["o0"]
    for row in case.rows():
        (place,) = row.outs
        assert place is not None
        for shares in cuts(row.units):
            parts = [local["o0"] for local in case.run(row, shares)]
            assert {part.dtype for part in parts} == {whole.dtype}
            if place == R:
                assert all(
                    torch.equal(part, parts[0]) and part.double().std() > 0 for part in parts
                )
                continue
            assert torch.cat(parts, place.dim).shape == whole.shape
            full = [part for part in parts if part.numel() > 4]
            corners = [part.flatten()[:4] for part in full]
            assert not any(torch.equal(corner, corners[0]) for corner in corners[1:])


@pytest.mark.parametrize("op", OPS)
def test_rows_cut_dims_into_equal_blocks_and_never_a_dim_of_size_1(op: str) -> None:
    for case in cases(op):
        for row in case.rows():
            placed = zip(
                (*case.node.inputs, *case.node.outputs), (*row.ins, *row.outs), strict=True
            )
            cut = [case.graph.tensors[t].shape[p.dim] for t, p in placed if t and p and p.sharded]
            assert bool(cut) == bool(row.units)
            assert all(size > 1 and size % row.units == 0 for size in cut), (case.sample, row)
            assert row.units != 1


@pytest.mark.parametrize("op", OPS)
def test_operators_cost_something_unless_they_only_look_at_their_input(op: str) -> None:
    for case in cases(op):
        work = node_work(case.node, case.graph)
        if op not in FREE:
            assert work.flops > 0 and work.bytes > 0
            continue
        assert work.flops == work.bytes == 0
        storages = {t.untyped_storage().data_ptr() for t in case.given.values()}
        assert {t.untyped_storage().data_ptr() for t in case.whole.values()} == storages


def test_free_operators_have_rules() -> None:
    assert set(RULES) >= FREE


def test_an_operator_without_a_rule_is_named_with_its_line_and_its_nearest() -> None:
    t = {name: Tensor(name=name, shape=(3,), dtype="float32") for name in ("x", "y")}
    node = Node(name="call", op="aten.exp3.default", args=(), outputs=("y",), source="model.py:7")
    graph = Graph(
        inputs=(Input(tensor="x", role="input", target="x"),),
        nodes=(node,),
        outputs=(Output(tensor="y", role="loss", target="loss"),),
        tensors=t,
    )
    with pytest.raises(UnsupportedOpError) as error:
        build_space(graph)
    assert "aten.exp3.default" in error.value.what
    assert error.value.where == "model.py:7"
    assert "aten.exp2.default" in error.value.hint or "aten.exp.default" in error.value.hint


def _summary() -> str:
    found = {op: missing_rows(op) for op in COMPARABLE}
    count = sum(len(case.rows()) for op in OPS for case in cases(op))
    lines = [
        f"{len(RULES)} operators, {len(SAMPLES)} samples, {count} rows checked,"
        f" {sum(map(len, found.values()))} more hold and are left out:"
    ]
    for op, rows in found.items():
        for reason in EXPLAINED.get(op, []):
            mine = [row for case, row in rows if reason.covers(row, case.node)]
            example = mine[0] if mine else "nothing"
            lines.append(f"  {op}: {len(mine)} such as {example}: {reason.why}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(_summary())
