"""The screen of a plan: its contents, its determinism, and how long lists are shortened."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from hap.cli.plan_screen import plan_json, plan_screen, program_lines
from hap.cli.terminal import alike, emit
from hap.cli.verdict_screen import agreement, verdict_table
from hap.ir.plan import Plan
from hap.runtime.verify import ComparisonRow, Verdict
from tests.small_plan import small_cluster, small_plan


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[[RenderableType], str]:
    def show(screen: RenderableType) -> str:
        emit(screen)
        return capsys.readouterr().out

    return show


def rows(text: str, start: str) -> list[str]:
    """Return the lines that start with ``start``, with one blank between cells."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip().startswith(start)]


def test_screen_says_what_a_person_asks(shown: Callable[[RenderableType], str]) -> None:
    text = shown(plan_screen(small_plan(), "my plan.json"))
    assert "mine: 2 A100 + 2 P100 on 2 nodes, 1 GB/s between" in text
    assert rows(text, "2 P100") == ["2 P100, rank 2-3 memory 1 GiB mine.yaml:9"]
    assert rows(text, "between") == ["between nodes link 1 GB/s, 30 us mine.yaml:2"]
    assert "48 parameters (192 B), 10 operators, optimizer Adam" in text
    assert rows(text, "batch") == ["batch 8 -> 3 3 1 1"]
    assert rows(text, "0  ") == ["0 A100 new:0 37.5% 25.0% 4 MiB of 1 GiB 0% 7 ms 0 ns"]
    assert "7 ms computing + 4 ms communicating, 1 ms of it overlapped" in text
    assert rows(text, "even data parallel")[0].endswith(" 1.50x")
    assert rows(text, "without") == ["without the slowest 9 ms 0.90x does not fit the memory"]
    assert rows(text, "ZeRO") == ["ZeRO - - the batch can't be split"]
    assert rows(text, "grad") == [
        "grad layers.*.weight (2x) all_reduce 96 B one shot 4 ms tree 8 ms"
    ]
    assert rows(text, "hap") == [
        "hap verify 'my plan.json'",
        "hap run 'my plan.json' # prints the command for each machine",
        "hap run 'my plan.json' --nproc 4 # runs all ranks on this machine",
    ]


def test_the_rate_of_the_products_is_shown(shown: Callable[[RenderableType], str]) -> None:
    plan = small_plan()
    tensors = {name: replace(t, dtype="bfloat16") for name, t in plan.graph.tensors.items()}
    text = shown(plan_screen(replace(plan, graph=replace(plan.graph, tensors=tensors))))
    found = rows(text, "bfloat16")
    assert len(found) == len(plan.cluster.types())
    assert all("no figure for bfloat16: the rate of another dtype" in row for row in found)


def test_screen_is_plain_and_the_same_for_the_same_plan(
    shown: Callable[[RenderableType], str],
) -> None:
    first, second = (shown(plan_screen(small_plan())) for _ in range(2))
    assert first == second
    assert first.isascii() and "\x1b" not in first
    assert max(map(len, first.splitlines())) <= 100
    assert not any(line.endswith(" ") for line in first.splitlines())


def test_screen_has_colour_on_a_terminal() -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard").print(plan_screen(small_plan()))
    assert "\x1b[1mCluster" in out.getvalue()


def test_many_alike_ranks_share_a_line(shown: Callable[[RenderableType], str]) -> None:
    text = shown(plan_screen(small_plan((3,) * 9 + (2,) * 11, small_cluster(9, 11))))
    assert rows(text, "batch") == ["batch 49 -> 9x3 11x2"]
    assert rows(text, "0-8")[0].startswith("0-8 A100 6.1%")
    assert rows(text, "9-19")[0].startswith("9-19 P100 4.1%")


def test_idle_devices_are_named_with_advice(shown: Callable[[RenderableType], str]) -> None:
    text = shown(plan_screen(small_plan((3, 3, 2, 0), idle=(3,))))
    assert "idle, without a share: old:1; remove them from the cluster file" in text
    assert rows(text, "3  ")[0].endswith(" idle")
    assert "idle" not in shown(plan_screen(small_plan()))


def predicted(plan: Plan, **figures: object) -> Plan:
    return replace(plan, prediction=replace(plan.prediction, **figures))  # type: ignore[arg-type]


def test_devices_that_are_left_out_are_named_with_the_reasons(
    shown: Callable[[RenderableType], str],
) -> None:
    text = " ".join(shown(plan_screen(replace(small_plan(), left_out=("v:0", "v:1")))).split())
    reason = "no plan found with them is over 1 % faster"
    assert f"unused: v:* (2x); {reason}; start no processes there" in text


def test_the_step_says_how_long_the_busiest_rank_waits_and_no_rounding_errors(
    shown: Callable[[RenderableType], str],
) -> None:
    waits = tuple(replace(r, wait_s=0.001) for r in small_plan().prediction.ranks)
    screen = plan_screen(predicted(small_plan(), step_s=0.011, ranks=waits))
    text = " ".join(shown(screen).split())
    assert "7 ms computing + 1 ms waiting + 4 ms communicating, 1 ms of it overlapped" in text
    late = tuple(replace(r, wait_s=1e-10) for r in small_plan().prediction.ranks)
    text = shown(plan_screen(predicted(small_plan(), hidden_s=1e-19, ranks=late)))
    assert "overlapped" not in text and rows(text, "0  ")[0].endswith(" 7 ms 0 ns")


def test_undivided_operators_are_named(shown: Callable[[RenderableType], str]) -> None:
    """A sum that every rank repeats is listed; the addition of scalars is too small to list."""
    plan = small_plan()
    data = plan.to_json()
    whole = [
        ["compute", name, ["R"] * len(ins), ["R"], backward]
        for _, name, ins, _, backward in (i for i in data["program"]["instructions"] if i[0] == "compute")
    ]  # fmt: skip
    data["program"] |= {"instructions": whole, "axes": {}}
    data["program"]["inputs"] = dict.fromkeys(data["program"]["inputs"], "R")
    data["shares"] = {}
    plan = Plan.from_json(data)
    assert plan_json(plan)["totals"]["undivided_operators"] == {
        "aten.mm.default": 4, "aten.sum.default": 2,
    }  # fmt: skip
    text = shown(plan_screen(plan))
    assert "run in full by every rank: mm.default (4x), sum.default (2x)" in text
    assert "nothing is split: every rank does the whole step" in text


def test_axes_of_alike_layers_are_one_line(shown: Callable[[RenderableType], str]) -> None:
    data = small_plan().to_json()
    names = {"y0:0": "layer.0 rows", "y1:0": "layer.1 rows"}
    data["program"]["axes"] |= {dim: [name, 8] for dim, name in names.items()}
    data["shares"] |= {"layer.0 rows": [3, 3, 1, 1], "layer.1 rows": [3, 3, 1, 1]}
    assert rows(shown(plan_screen(Plan.from_json(data))), "layer") == [
        "layer.* rows (2x) 8 -> 3 3 1 1"
    ]
    data["shares"]["layer.1 rows"] = [2, 2, 2, 2]  # no longer equal
    assert rows(shown(plan_screen(Plan.from_json(data))), "layer") == [
        "layer.0 rows 8 -> 3 3 1 1",
        "layer.1 rows 8 -> 2 2 2 2",
    ]


def test_bounds_are_on_the_screen_and_in_the_file(shown: Callable[[RenderableType], str]) -> None:
    data = small_plan().to_json()
    assert "bounds" not in data["prediction"], "there are none"
    assert "lower bound" not in shown(plan_screen(Plan.from_json(data)))
    bound = {"covers": "all programs", "step_s": 0.0096, "gap": 0.04, "searches": 2}
    data["prediction"]["bounds"] = [bound]
    plan = Plan.from_json(data)
    assert plan_json(plan)["prediction"]["bounds"] == (bound,)
    line = "predicted step 10 ms, lower bound 9.6 ms (all programs), gap 4.0%"
    assert line in shown(plan_screen(plan))


def test_json_leaves_out_graph_and_program() -> None:
    data = json.loads(json.dumps(plan_json(small_plan())))
    assert data["totals"]["parameters"] == 48
    assert data["totals"]["collective_bytes"] == 196
    assert data["shares"] == {"batch": [3, 3, 1, 1]}
    assert data["prediction"]["step_s"] == 0.010
    assert "graph" not in data and "program" not in data


def test_program_lines_with_the_shapes_of_a_rank() -> None:
    plan = small_plan()
    whole = list(program_lines(plan))
    assert whole == list(plan.program.lines(plan.graph))
    assert "fwd  y0@S0 = aten.mm.default(x@S0, w0@R)  # (3, 6)" in program_lines(plan, rank=0)
    assert "bwd  xt@S1 = aten.t.default(x@S0)  # (4, 1)" in program_lines(plan, rank=3)
    forward, backward = (list(program_lines(plan, side=side)) for side in ("fwd", "bwd"))
    assert len(forward) + len(backward) == len(plan.program.instructions)
    assert backward[0] == "bwd  xt@S1 = aten.t.default(x@S0)"


def test_verdict_has_the_worst_first_and_counts_the_rest(
    shown: Callable[[RenderableType], str],
) -> None:
    rows = [
        ComparisonRow(tensor=f"t{k}", what="gradient", error=k * 1e-16, ok=True) for k in range(30)
    ]
    rows += [
        ComparisonRow(tensor=name, what="gradient", error=error, ok=False)
        for name, error in (("small", 1e-3), ("lost", float("inf")))
    ]
    lines = shown(verdict_table(Verdict(rows=tuple(rows), tolerance=1e-9, first_bad="small")))
    shown_rows = lines.splitlines()
    assert [line.split()[0] for line in shown_rows[1:4]] == ["lost", "small", "t29"]
    assert shown_rows[1].split() == ["lost", "gradient", "inf", "DIFFERS"]
    assert shown_rows[-1] == "and 12 more, none of which differ"
    assert len(shown_rows) == 22


def test_the_agreement_tells_errors_above_the_tolerance() -> None:
    close = ComparisonRow(tensor="t", what="loss", error=1e-12, ok=True)
    amplified = ComparisonRow(tensor="w", what="after 3 steps", error=2e-8, ok=True)
    exact = Verdict(rows=(close,), tolerance=1e-9, first_bad=None)
    assert agreement(exact) == "the only tensor as on one device, to 1e-09"
    more = agreement(Verdict(rows=(close, amplified), tolerance=1e-9, first_bad=None))
    assert more.splitlines()[1].startswith("except for errors up to 2e-08")


def test_a_comparison_says_what_each_alternative_moves_and_needs(
    shown: Callable[[RenderableType], str],
) -> None:
    text = shown(plan_screen(small_plan(), compare=True))
    assert rows(text, "this plan") == ["this plan 10 ms 1.00x 4 ms 196 B 4 MiB yes"]
    assert rows(text, "even data parallel")[0].startswith("even data parallel 15 ms 1.50x")
    assert rows(text, "without")[0].endswith("lacks 0 B")
    assert rows(text, "ZeRO") == ["ZeRO - - - - - -", "ZeRO the batch can't be split"]
    assert max(map(len, text.splitlines())) <= 100


def test_merged_names_keep_the_numbers_that_they_share() -> None:
    names = [f"v100-1:{k}" for k in range(8)] + [f"p100-{i}:{k}" for i in range(2) for k in (0, 1)]
    assert alike(names) == ["v100-1:* (8x)", "p100-*:* (4x)"]
    assert alike(["layer.3.out", "layer.3.out", "fc1"]) == ["layer.3.out (2x)", "fc1"]
