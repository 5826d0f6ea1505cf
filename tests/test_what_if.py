"""``hap what-if``: changed clusters and batches, crossovers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from hap.cli.commands import main
from hap.cli.what_if import (
    Answer,
    Changes,
    added,
    default_changes,
    linked,
    questions,
    reduced,
    turns,
    with_rows,
)
from hap.cluster.link import Link, MeasuredSet
from hap.errors import ClusterError, InputError
from hap.ir.plan import Plan
from tests.small_plan import small_cluster
from tests.test_cli import CLUSTER, MODEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def what_if(*words: str) -> Result:
    result = CliRunner().invoke(main, ["what-if", "model.py", "--cluster", "cluster.yaml", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_a_link_changes_alone_and_measured_collectives_follow() -> None:
    measured = {"all_reduce": {"two step": {"between": Link(5e8, 2e-5), "inside": Link(8e9, 1e-6)}}}
    few = MeasuredSet(frozenset(("new:0", "old:0")), measured)
    cluster = replace(small_cluster(), collectives=measured, among=(few,))  # 1 GB/s between nodes
    faster = linked(cluster, "40 Gbit/s")
    assert faster.inter == replace(cluster.inter, bandwidth_bytes_per_s=5e9)
    assert faster.intra == cluster.intra
    levels = faster.collectives["all_reduce"]["two step"]
    assert levels["between"].bandwidth_bytes_per_s == pytest.approx(2.5e9)
    assert faster.among == (MeasuredSet(few.devices, faster.collectives),)
    assert levels["inside"] == measured["all_reduce"]["two step"]["inside"]


def test_devices_are_added_as_a_node_of_their_own() -> None:
    cluster = added(added(small_cluster(), "2xA100-40"), "1xP100")
    assert cluster.nodes == ("new", "old", "added", "added1")
    assert [d.kind for d in cluster.devices[4:]] == ["A100-40", "A100-40", "P100"]
    assert set(cluster.intra) == set(cluster.nodes)


@pytest.mark.parametrize(
    ("name", "left"), [("old", 2), ("P100", 2), ("new:1", 3)]
)  # a node, a kind, a device
def test_devices_are_left_out_by_name(name: str, left: int) -> None:
    assert reduced(small_cluster(), name).world_size == left


def test_what_cannot_be_asked_is_refused() -> None:
    cluster = small_cluster()
    for text in ("2xA1000", "A100-40", "0xA100-40", "x", "-1xP100"):
        with pytest.raises(InputError, match="no number of devices of a known type"):
            added(cluster, text)
    with pytest.raises(ClusterError):
        added(cluster, "99999xP100")
    for text in ("fast", "10", "0 Gbit/s", "-1 Gbit/s"):
        with pytest.raises(InputError, match="--link"):
            linked(cluster, text)
    with pytest.raises(InputError, match="no such node, device or kind"):
        reduced(cluster, "absent")
    with pytest.raises(InputError, match="the cluster is one node"):
        linked(reduced(cluster, "old"), "1 Gbit/s")
    with pytest.raises(ClusterError, match="no device is left"):
        reduced(reduced(cluster, "old"), "new")


def test_the_batch_is_repeated_or_cut() -> None:
    batch = {"x": torch.arange(12).reshape(4, 3), "pair": [torch.ones(4), 7], "t": torch.ones(2, 4)}
    for rows in (1, 4, 6, 13):
        changed = with_rows(batch, rows)
        assert changed["x"].shape == (rows, 3)
        assert changed["pair"][0].shape == (rows,)
        assert changed["pair"][1] == 7
        assert changed["t"].shape == (2, 4)  # its first dim is not the rows
        assert (changed["x"] == batch["x"][torch.arange(rows) % 4]).all()


def test_without_a_change_there_are_sweeps() -> None:
    cluster = small_cluster()
    changes = default_changes(cluster, 32)
    assert changes.rows == (16, 32, 64)
    assert changes.links == ("2 Gbit/s", "8 Gbit/s", "32 Gbit/s")
    assert changes.without == ("A100", "P100")
    assert len(list(questions(cluster, changes))) == 9
    alone = default_changes(reduced(cluster, "old"), 1)
    assert alone == Changes(rows=(1, 1, 2))


def answer(
    sweep: str, change: str, used: str = "2xA100", program: str = "a", step_s: float = 1.0
) -> Answer:
    return Answer(sweep=sweep, change=change, used=(used,), program=program, step_s=step_s)


def test_crossovers_lie_between_neighbours_of_a_sweep() -> None:
    assert turns([answer("now", "as it is"), answer("rows", "8 rows", "1xP100")]) == []
    assert turns([answer("devices", "a"), answer("devices", "b", "1xP100")]) == []
    rows = [answer("rows", "8 rows"), answer("rows", "16 rows", "2xA100 2xP100")]
    assert turns(rows) == [
        "between 8 rows and 16 rows: the devices in use change, 2xA100 -> 2xA100 2xP100"
    ]
    rows = [answer("rows", "8 rows"), answer("rows", "16 rows", program="b")]
    assert turns(rows) == ["between 8 rows and 16 rows: the collectives change, a -> b"]
    rows = [answer("rows", "8 rows"), answer("rows", "16 rows", step_s=0.0)]
    assert turns(rows) == ["between 8 rows and 16 rows: no plan fits from there on"]


def test_answers_are_those_of_hap_plan(folder: Path) -> None:
    """Every answer equals a plan for the changed files; a batch that is too large has none."""
    result = what_if(
        "--rows", "12,3,1200000000", "--link", "40 Gbit/s", "--without", "slow", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    answers = {a["change"]: a for a in data["answers"]}
    assert list(answers) == [
        "as it is", "3 rows", "12 rows", "1200000000 rows", "40 Gbit/s", "without slow",
    ]  # fmt: skip
    assert "fewer rows than the 4 devices" in answers["3 rows"]["note"]
    assert answers["1200000000 rows"]["step_s"] == 0
    assert answers["1200000000 rows"]["note"]
    assert answers["12 rows"] == {**answers["as it is"], "sweep": "rows", "change": "12 rows"}
    assert len(data["crossovers"]) == 2  # a plan fits at 12 rows alone
    faster = CLUSTER.replace("10 Gbit/s", "40 Gbit/s")
    alone = CLUSTER[: CLUSTER.index("  - {name: slow")]
    for change, text in (("as it is", CLUSTER), ("40 Gbit/s", faster), ("without slow", alone)):
        (folder / "other.yaml").write_text(text)
        CliRunner().invoke(main, ["plan", "model.py", "--cluster", "other.yaml"])
        plan = Plan.load("plan.json")
        assert answers[change]["step_s"] == plan.prediction.step_s
        assert tuple(answers[change]["left_out"]) == plan.left_out
        assert answers[change]["samples_per_s"] == pytest.approx(12 / plan.prediction.step_s)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "12,x"), "--rows: 'x' is no number of rows"),
        (("--rows", "0"), "--rows: '0' is no number of rows"),
        (("--link", "quick"), "--link: 'quick' is not a quantity"),
        (("--add", "2xA1000"), "no number of devices of a known type"),
        (("--without", "absent"), "there is no such node"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_mistakes_are_told(words: tuple[str, ...], message: str) -> None:
    result = what_if(*words)
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()[-2:]
    assert message in error
    assert hint.startswith("  hint: ")


@pytest.mark.usefixtures("folder")
def test_the_table_has_a_line_per_change() -> None:
    result = what_if("--rows", "12,3", "--add", "1xA100-40")
    assert result.exit_code == 0, result.output
    for text in ("as it is", "12 rows", "3 rows", "with 1xA100-40", "samples/s", "Crossovers"):
        assert text in result.stdout


def test_costs_are_those_of_the_devices_in_use(folder: Path) -> None:
    priced = CLUSTER.replace("V100}", "V100, price_per_hour: 3}")
    (folder / "cluster.yaml").write_text(priced.replace("P100}", "P100, price_per_hour: 0.5}"))
    command = ("--rows", "64,12", "--without", "fast", "--plot", "plot.svg", "--json")
    answers = json.loads(what_if(*command).stdout)["answers"]
    for answer in answers:
        prices = {"V100-16": 3, "P100": 0.5}
        hourly = sum(int(n) * prices[k] for n, k in (u.split("x") for u in answer["used"]))
        hours = 1e6 / answer["samples_per_s"] / 3600
        assert answer["cost"] == pytest.approx(hourly * hours)
    drawn = (folder / "plot.svg").read_text()
    assert drawn.rstrip().endswith("</svg>")
    shown = what_if("--rows", "64,12", "--by", "cost").stdout
    assert "cost of 1M" in " ".join(shown.split())
    assert shown.index("64 rows") < shown.index("12 rows"), "more rows cost less each"


def test_costs_need_prices_and_plots_a_known_format(folder: Path) -> None:
    result = what_if("--rows", "12", "--by", "cost")
    assert result.exit_code == 2
    assert "gives no prices" in result.stderr
    assert what_if("--plot", "plot.doc").exit_code == 2
