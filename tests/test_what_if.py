"""``hap what-if``: changed clusters and batches, crossovers, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from hap import api
from hap.capture.model_file import load_model_file
from hap.capture.user_optimizer import default_optimizer
from hap.cli.commands import main
from hap.cli.crossovers import CLOSE, Answer, crossovers, narrowed, roundest
from hap.cli.what_if import with_rows
from hap.cli.what_if_changes import (
    Changes,
    added,
    default_changes,
    linked,
    questions,
    reduced,
    swapped,
    with_memory,
)
from hap.cluster.cluster_file import load_cluster
from hap.cluster.link import Link, MeasuredSet
from hap.errors import ClusterError, InputError
from hap.files import cache_folder
from hap.ir.plan import Plan
from hap.plan_cache import PlanCache
from hap.synthesizer.plan_options import PlanOptions
from tests.small_plan import small_cluster
from tests.test_cli import CLUSTER, MODEL


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
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
    faster = linked(cluster, 5e9)
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


def test_devices_are_added_to_one_node_whose_file_has_the_link_between_nodes() -> None:
    one = "nodes: [{name: a, gpus: 2, type: T4}]"
    found = added(load_cluster(f"links: {{between: 10 Gbit/s}}\n{one}"), "1xP100")
    assert (found.nodes, found.inter.bandwidth_bytes_per_s) == (("a", "added"), 1.25e9)
    for text in (f"{one}\n", "a slots=2 type=T4\n", "local:2"):
        with pytest.raises(InputError, match="no link between nodes"):
            added(load_cluster(text), "1xP100")


def test_what_cannot_be_asked_is_refused() -> None:
    cluster = small_cluster()
    for text in ("2xA1000", "A100-40", "0xA100-40", "x", "-1xP100"):
        with pytest.raises(InputError, match="no number of devices of a known type"):
            added(cluster, text)
    with pytest.raises(ClusterError):
        added(cluster, "99999xP100")
    for text in ("fast", "10", "0 Gbit/s", "-1 Gbit/s"):
        with pytest.raises(InputError, match="--link"):
            list(questions(cluster, Changes(links=(text,))))
    for text in ("much", "0 GiB", "P100=", "absent=1 GiB"):
        with pytest.raises(InputError, match="--memory"):
            list(questions(cluster, Changes(memory=(text,))))
    for text in ("old", "old=P100", "absent=2xP100"):
        with pytest.raises(InputError, match="--replace"):
            swapped(cluster, text)
    with pytest.raises(InputError, match="no such node, device or kind"):
        reduced(cluster, "absent")
    with pytest.raises(InputError, match="the cluster is one node"):
        linked(reduced(cluster, "old"), 1e9)
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


def test_memory_and_replaced_devices_are_changes() -> None:
    cluster = small_cluster()
    assert [d.memory_bytes for d in with_memory(cluster, "", 5).devices] == [5] * 4
    mine = with_memory(cluster, "P100", 5)
    assert [d.memory_bytes for d in mine.devices] == [2**30, 2**30, 5, 5]
    assert [q.change for q in questions(cluster, Changes(memory=("P100=2 GiB", "1 GiB")))] == [
        "as it is", "2 GiB on P100", "1 GiB",
    ]  # fmt: skip
    other = swapped(cluster, "old=3xA100-40")
    assert [d.kind for d in other.devices] == ["A100", "A100", *["A100-40"] * 3]
    assert other.nodes == ("new", "added")


def test_added_devices_cost_what_their_kind_costs() -> None:
    cluster = small_cluster()
    devices = tuple(replace(d, price_per_hour=0.5) for d in cluster.devices)
    priced = added(replace(cluster, devices=devices), "2xP100")
    assert [d.price_per_hour for d in priced.devices] == [0.5] * 6
    assert added(cluster, "2xV100-16").devices[-1].price_per_hour == 0


def answer(
    sweep: str, value: float, used: str = "2xA100", program: str = "a", step_s: float = 1.0
) -> Answer:
    return Answer(
        sweep=sweep, change=f"{value:g} {sweep}", value=value, used=tuple(used.split()),
        program=program, step_s=step_s,
    )  # fmt: skip


@pytest.mark.parametrize(
    "before, after, text",
    [
        ("2xA100", "2xA100 2xP100", "2 P100 pay off from 16 rows on, not with 8 rows"),
        ("2xA100", "4xA100", "2 more A100 pay off from 16 rows on, not with 8 rows"),
        ("2xA100 2xP100", "2xA100", "2 P100 no longer pay off from 16 rows on, but with 8 rows"),
        ("1xA100", "4xP100", "4 P100 pay off instead of 1 A100 from 16 rows on, not with 8 rows"),
    ],
)
def test_crossovers_name_devices_and_the_turning_point(before: str, after: str, text: str) -> None:
    found = crossovers([answer("rows", 8, before), answer("rows", 16, after)])
    assert [c.text for c in found] == [text]
    assert crossovers([answer("now", 8, before), answer("rows", 16, after)]) == []
    assert crossovers([answer("devices", 8, before), answer("devices", 16, after)]) == []


def test_crossovers_name_devices_of_a_kind_that_others_have() -> None:
    before = replace(answer("rows", 8, "2xcpu"), left_out=("slow-0:0", "slow-1:0"))
    (turn,) = crossovers([before, answer("rows", 16, "4xcpu")])
    assert turn.text == "2 more cpu, slow-*:0 (2x), pay off from 16 rows on, not with 8 rows"


def test_crossovers_of_programs_and_of_memory() -> None:
    (turn,) = crossovers([answer("rows", 8), answer("rows", 16, program="b")])
    assert turn.text == "between 8 rows and 16 rows the collectives change, a -> b"
    (turn,) = crossovers([answer("rows", 8), answer("rows", 16, step_s=0.0)])
    assert turn.text == "no plan fits from 16 rows on, the last with 8 rows"
    (turn,) = crossovers([answer("memory", 8, step_s=0.0), answer("memory", 16)])
    assert turn.text == "a plan fits from 16 memory on, none with 8 memory"


@pytest.mark.parametrize("turn", [9, 64, 100, 255, 256])
def test_a_crossover_is_narrowed_down_to_its_turning_point(turn: int) -> None:
    asked = []

    def ask(value: float) -> Answer:
        asked.append(value)
        return answer("rows", value, "2xA100 2xP100" if value >= turn else "2xA100")

    few = narrowed([ask(8), ask(256)], ask, 3)
    assert len(asked) == 5
    assert [a.value for a in few] == sorted(a.value for a in few)
    asked.clear()
    found = narrowed([ask(8), ask(256)], ask, 50)
    (at,) = crossovers(found)
    low, high = float(at.before.split()[0]), float(at.after.split()[0])
    assert low < turn <= high
    assert high <= max(low * CLOSE, low + 1)
    assert len(asked) == len(set(asked)) <= 14


def test_every_turn_of_a_sweep_is_narrowed_down() -> None:
    """Devices that pay in the middle alone, between values that look alike to a bisection."""

    def ask(value: float) -> Answer:
        kinds = "2xA100" if value < 3e9 else "2xA100 2xP100" if value < 5e9 else "2xP100"
        return answer("link", value, kinds)

    found = crossovers(narrowed([ask(1e9), ask(8e9)], ask, 30))
    assert [c.text.split(" from")[0] for c in found] == [
        "2 P100 pay off",
        "2 A100 no longer pay off",
    ]


def test_values_in_between_are_round() -> None:
    assert roundest(256, 1024, whole=True) == 512
    assert roundest(8, 9.5, whole=True) == 9
    assert roundest(1e9, 4e9, whole=False) == 2e9
    for low, high in ((10, 11), (7, 9), (3, 1000)):
        assert low < roundest(low, high, whole=True) <= high
        assert low < roundest(low, high, whole=False) < high


@pytest.mark.slow
def test_answers_are_those_of_hap_plan(folder: Path) -> None:
    """Every answer equals a plan for the changed files; a batch that is too large has none."""
    result = what_if(
        "--rows", "12,3,1200000000", "--link", "40 Gbit/s", "--without", "slow", "--json",
        "--refine", "0",
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
    same = {**answers["as it is"], "sweep": "rows", "change": "12 rows", "value": 12}
    assert answers["12 rows"] == same
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
        (("--memory", "much"), "--memory: 'much' is not a quantity"),
        (("--replace", "slow"), "--replace slow: no `=`"),
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


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_table_has_a_line_per_change() -> None:
    result = what_if("--rows", "12,3", "--add", "1xA100-40", "--refine", "0")
    assert result.exit_code == 0, result.output
    for text in ("as it is", "12 rows", "3 rows", "with 1xA100-40", "samples/s", "Crossovers"):
        assert text in result.stdout


@pytest.mark.slow
def test_costs_are_those_of_the_devices_in_use(folder: Path) -> None:
    priced = CLUSTER.replace("V100}", "V100, price_per_hour: 3}")
    (folder / "cluster.yaml").write_text(priced.replace("P100}", "P100, price_per_hour: 0.5}"))
    command = (
        "--rows",
        "64,12",
        "--without",
        "fast",
        "--plot",
        "plot.svg",
        "--json",
        "--refine",
        "0",
    )
    answers = json.loads(what_if(*command).stdout)["answers"]
    for answer in answers:
        prices = {"V100-16": 3, "P100": 0.5}
        hourly = sum(int(n) * prices[k] for n, k in (u.split("x") for u in answer["used"]))
        hours = 1e6 / answer["samples_per_s"] / 3600
        assert answer["cost"] == pytest.approx(hourly * hours)
    drawn = (folder / "plot.svg").read_text()
    assert drawn.rstrip().endswith("</svg>")
    shown = what_if("--rows", "64,12", "--by", "cost", "--refine", "0").stdout
    assert "cost of 1M" in " ".join(shown.split())
    assert shown.index("64 rows") < shown.index("12 rows"), "more rows cost less each"


@pytest.mark.slow
def test_costs_need_prices_and_plots_a_known_format(folder: Path) -> None:
    result = what_if("--rows", "12", "--by", "cost", "--refine", "0")
    assert result.exit_code == 2
    assert "gives no prices" in result.stderr
    assert "as it is" not in result.stderr, "refused before the first plan"
    assert what_if("--plot", "plot.doc").exit_code == 2


@pytest.mark.slow
def test_kept_plans_give_the_same_answers(folder: Path) -> None:
    command = ("--rows", "12,24", "--without", "slow", "--json", "--refine", "0")
    first = what_if(*command)
    assert "are from this run or from the cache" in first.stderr  # 12 rows are the file's own
    kept = sorted((folder / "cache" / "hap" / "plans").glob("*.json"))
    assert len(kept) == 3
    again = what_if(*command)
    assert again.stdout == first.stdout
    assert "4 of 4 plans are from this run or from the cache" in again.stderr
    kept[0].write_text("{}")
    damaged = what_if(*command)
    assert damaged.stdout == first.stdout
    assert damaged.stderr.count("a cached plan is damaged") == 1


@pytest.mark.slow
def test_a_kept_plan_is_of_all_inputs(folder: Path) -> None:
    """A plan is known by its model, cluster, optimizer and options, and by nothing else."""
    cache = PlanCache()

    def made(text: str = MODEL, cluster: str = CLUSTER, **options: bool) -> int:
        (folder / "model.py").write_text(text)
        (folder / "cluster.yaml").write_text(cluster)
        before, file = cache.found, load_model_file("model.py")
        plan = api.plan(
            file.model(), file.batch(), "cluster.yaml", cache=cache,
            optimizer=file.optimizer or default_optimizer, options=PlanOptions(**options),
        )  # fmt: skip
        assert not plan.source.path
        return cache.found - before

    assert made() == 0
    assert made() == 1
    assert made(cluster=CLUSTER.replace("10 Gbit/s", "20 Gbit/s")) == 0
    assert made(MODEL.replace("48", "64")) == 0
    sgd = "\n\ndef optimizer(params):\n    return torch.optim.SGD(params, lr=0.1)\n"
    assert made(MODEL + sgd) == 0
    assert made(all_devices=True) == 0
    assert made(MODEL + "\n# the same model\n") == 1


def test_without_a_home_nothing_is_written_into_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert cache_folder().is_absolute() and cache_folder() == cache_folder()
    assert not list(tmp_path.iterdir())
