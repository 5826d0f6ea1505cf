"""The page of ``hap report``: its figures, its timeline, a run beside it, and a real browser."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from hap.cli.commands import main
from hap.cli.report import timeline_data as timeline_module
from hap.cli.report.timeline_data import TICKS, timeline_data
from hap.errors import InputError
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan
from hap.run_log import LoggedStep, RankFigures, read_log
from hap.runtime.collectives import LocalComm
from hap.runtime.hap_module import HapModule
from hap.runtime.run_logger import RunLogger
from tests.random_plans import benchmark_case
from tests.small_plan import small_cluster, small_plan
from tests.test_checkpoint import small_files
from tests.test_cli import CLUSTER, MODEL
from tests.test_compiled import one_rank

STORED = Path(__file__).parent / "plans"
VOID = {"meta", "link", "wbr", "br"}
OPTIONAL_END = {"td", "th", "li", "dt", "dd", "tr", "thead", "tbody"}


class Page(HTMLParser):
    """The page as a browser's parser sees it, as far as the tests need it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: Counter[str] = Counter()
        self.scripts: dict[str, str] = {}
        self.summaries = 0
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if given.get("id"):
            self.ids.append(given["id"] or "")
        if tag == "data":
            self.figures.append((given["data-key"] or "", given["value"] or ""))
        self.summaries += tag == "summary"
        if tag not in VOID | OPTIONAL_END:
            self._open.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        if tag in OPTIONAL_END:
            return
        last, _ = self._open.pop()
        assert last == tag, f"<{last}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "script":
            key = self._open[-1][1].get("id") or "code"
            self.scripts[key] = self.scripts.get(key, "") + data
        elif data.strip():
            self.texts[data.strip()] += 1

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def hap(*words: str) -> Result:
    result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def done(*words: str) -> str:
    result = hap(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    """Return the message of a command that fails: one paragraph, and no page is left."""
    result = hap(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    message, hint = result.stderr.splitlines()
    assert message.startswith("error: ")
    assert hint.startswith("  hint: ")
    return message


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    small_plan().save("small.json")
    return tmp_path


@pytest.fixture(scope="session")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with every baseline and with bounds."""
    folder = tmp_path_factory.mktemp("compared")
    (folder / "model.py").write_text(MODEL)
    (folder / "cluster.yaml").write_text(CLUSTER)
    file = folder / "plan.json"
    done(
        "plan", str(folder / "model.py"), "--cluster", str(folder / "cluster.yaml"),
        "--all-devices", "--compare", "-o", str(file),
    )  # fmt: skip
    return file


def many_ranks(path: str) -> str:
    small_plan((2,) * 12 + (1,) * 8, small_cluster(12, 8)).save(path)
    return path


@pytest.fixture(params=["compared", "format4", "format4_two_axes", "format3", "many"])
def plan_file(request: pytest.FixtureRequest, compared: Path) -> str:
    if request.param == "compared":
        return str(compared)
    if request.param == "many":
        return many_ranks("many.json")
    return str(STORED / f"{request.param}.json")


def page_of(plan_file: str, *more: str) -> Page:
    done("report", plan_file, "-o", "plan.html", *more)
    return Page(Path("plan.html").read_text())


def at(figures: dict[str, Any], key: str) -> Any:
    value: Any = figures
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def numbers(value: Any, key: str) -> Iterator[str]:
    """Yield the keys of all numbers in plain data."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, f"{key}.{name}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key


def test_figures_are_those_of_show_and_simulate(plan_file: str) -> None:
    page = page_of(plan_file)
    figures = {
        "plan": json.loads(done("show", plan_file, "--json")),
        "simulation": json.loads(done("simulate", plan_file, "--json")),
    }
    assert page.figures
    for key, value in page.figures:
        expected = at(figures, key)
        assert (value if isinstance(expected, str) else json.loads(value)) == expected, key


def test_every_figure_is_on_the_page(plan_file: str) -> None:
    """All numbers of ranks, collectives, alternatives, bounds, memory and the simulation."""
    page = page_of(plan_file)
    plan = json.loads(done("show", plan_file, "--json"))
    simulation = json.loads(done("simulate", plan_file, "--json"))
    prediction, names = plan["prediction"], "\n".join(page.texts)
    for alternative in prediction["alternatives"]:
        assert alternative["name"] in names
        assert alternative["note"] in names
        if not alternative["step_s"]:
            alternative.clear()  # there is no such program, as its note says
    for collective in prediction["collectives"]:
        del collective["tensor"], collective["fused"]  # said in the words of the model
        if not collective["runner_up"]:
            del collective["runner_up"], collective["runner_up_s"]
    totals = {k: v for k, v in plan["totals"].items() if k != "undivided_operators"}
    expected = {
        *numbers(prediction, "plan.prediction"),
        *numbers(totals, "plan.totals"),
        *numbers(plan["memory_parts"], "plan.memory_parts"),
        *numbers(simulation["ranks"], "simulation.ranks"),
        *numbers(simulation["longest"], "simulation.longest"),
    }
    expected -= {f"simulation.ranks.{rank}.rank" for rank in range(len(simulation["ranks"]))}
    expected -= {
        f"simulation.ranks.{rank}.memory_bytes" for rank in range(len(simulation["ranks"]))
    }
    assert expected
    assert not expected - {key for key, _ in page.figures}


def test_the_parts_of_memory_sum_to_the_peak(plan_file: str) -> None:
    figures = json.loads(done("show", plan_file, "--json"))
    if "small" in plan_file or "many" in plan_file:
        return  # its predictions are written by hand
    for parts, rank in zip(figures["memory_parts"], figures["prediction"]["ranks"], strict=True):
        if "format" in plan_file:  # its prediction leaves out what the optimizer's step holds
            assert sum(parts.values()) >= rank["peak_bytes"] - len(parts)
        else:
            assert sum(parts.values()) == pytest.approx(rank["peak_bytes"], abs=len(parts))


def test_each_part_is_there_and_nothing_is_loaded(plan_file: str) -> None:
    page = page_of(plan_file)
    parts = ["devices", "timeline", "collectives", "model", "baselines"]
    assert [name for name in page.ids if name in parts] == parts
    assert len(set(page.ids)) == len(page.ids)
    for tag, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action"):
            assert value.startswith("#") or value == "data:,", (tag, name, value)
            assert not value.startswith("#") or value[1:] in page.ids
    text = Path("plan.html").read_text()
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)


def test_the_same_plan_gives_the_same_page(plan_file: str) -> None:
    done("report", plan_file, "-o", "one.html")
    done("report", plan_file, "-o", "two.html")
    assert Path("one.html").read_bytes() == Path("two.html").read_bytes()


def test_the_tree_has_every_parameter_and_operator(compared: Path) -> None:
    page = page_of(str(compared))
    plan = Plan.load(compared)
    shown = "\n".join(page.texts.elements())
    for node in plan.graph.nodes:
        assert node.op.removeprefix("aten.") in shown
    for name in ("up", "down", "weight", "bias"):
        assert page.texts[name]
    shapes = ["float32 [48, 20]", "float32 [20, 48]", "float32 [48]", "float32 [20]"]
    assert all(shape in shown for shape in shapes)
    assert page.summaries > 5


def test_collectives_have_reasons() -> None:
    page = page_of("small.json")
    reasons = [text for text in page.texts if "sum of terms" in text]
    assert any("the optimizer reads it whole" in text for text in reasons)


def blocks(flat: list[int]) -> list[dict[str, int]]:
    found, start = [], 0
    for k in range(0, len(flat), 6):
        waited, later, length, part, name, count = flat[k : k + 6]
        start += later
        block = {"waited": waited, "start": start, "end": start + length, "part": part}
        found.append({**block, "name": name, "count": count})
    return found


@pytest.mark.parametrize("events", [timeline_module.EVENTS, 0])
def test_the_timeline_has_all_spans(
    compared: Path, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined blocks count their spans; blocks do not overlap and end with the step."""
    monkeypatch.setattr(timeline_module, "EVENTS", events)
    monkeypatch.setattr(timeline_module, "COARSEST", 2)
    made = simulate_plan(Plan.load(compared))
    data = timeline_data(made)
    ranks = json.loads(done("simulate", str(compared), "--json"))["ranks"]
    assert data["step_s"] == made.run.step_s
    joined = 0
    for row in data["rows"]:
        first = int(row["ranks"].split()[0].split("-")[0])
        ends = []
        for stream in ("compute", "communication"):
            found = blocks(row[stream])
            real = [
                s for s in made.run.spans
                if s.stream == stream and s.end_s[first] > s.start_s[first]
            ]  # fmt: skip
            assert sum(b["count"] for b in found) == len(real)
            joined += len(real) - len(found)
            for before, after in itertools.pairwise(found):
                assert after["start"] >= before["end"] - 1
            ends += [b["end"] for b in found]
        assert max(ends) <= TICKS + 1
        assert max(row["memory"][1::2]) == ranks[first]["peak_bytes"]
        assert row["memory"][::2] == sorted(row["memory"][::2])
    assert (joined > 0) is (events == 0)


def test_names_are_escaped() -> None:
    small_plan(path="<img src=x onerror=alert(1)>&\"'.py").save("odd.json")
    page = page_of("odd.json")
    assert ("img", "src", "x") not in page.attributes
    assert any("<img src=x onerror=alert(1)>" in text for text in page.texts)
    assert "</script" not in page.scripts["timeline-data"]
    json.loads(page.scripts["timeline-data"])


def logged(steps: int = 3, ranks: int = 4) -> list[LoggedStep]:
    return [
        LoggedStep(
            step=n, loss=2.5 / n, seconds=0.5 / n,
            ranks=tuple(
                RankFigures(computing_s=0.1 * (r + n), communicating_s=0.01 * r, waiting_s=0.0)
                for r in range(ranks)
            ),
        )
        for n in range(1, steps + 1)
    ]  # fmt: skip


def write_log(*steps: LoggedStep) -> str:
    Path("run.jsonl").write_text("".join(step.line() for step in steps))
    return "run.jsonl"


def test_a_log_is_read_as_it_was_written() -> None:
    steps = logged()
    assert read_log(write_log(*steps)) == steps


def test_a_log_goes_on_after_a_line_that_is_cut_off() -> None:
    """Any other damaged line is an error, as when the log is read."""
    case = benchmark_case("mlp", "tiny")
    module = HapModule(one_rank(case), case.model, LocalComm(), torch.device("cpu"))
    path = Path(write_log(*logged()))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + lines[0][:20])
    RunLogger(str(path), module, done=2)
    assert path.read_text() == "".join(lines[:2])
    path.write_text(lines[0][:20] + "\n" + lines[1])
    with pytest.raises(InputError, match="damaged"):
        RunLogger(str(path), module, done=2)


def test_a_full_disk_costs_lines_of_the_log_and_not_the_run() -> None:
    case = benchmark_case("mlp", "tiny")
    module = HapModule(one_rank(case), case.model, LocalComm(), torch.device("cpu"))
    path = Path(write_log())
    log = RunLogger(str(path), module)
    log.step(1, 0.5, 0.1)
    with small_files(path.stat().st_size + 20):
        with pytest.warns(UserWarning, match="steps are missing in the log"):
            log.step(2, 0.5, 0.1)
        log.step(3, 0.5, 0.1)
    log.step(4, 0.5, 0.1)
    assert [step.step for step in read_log(str(path))] == [1, 4]


def test_a_run_is_laid_over_the_prediction() -> None:
    page = page_of("small.json", "--log", write_log(*logged()))
    figures = dict(page.figures)
    assert "run" in page.ids
    assert json.loads(figures["run.seconds"]) == pytest.approx((0.25 + 0.5 / 3) / 2)
    assert figures["run.counted"] == "2"
    simulation = json.loads(done("simulate", "small.json", "--json"))
    for rank, use in enumerate(simulation["ranks"]):
        measured = json.loads(figures[f"run.measured.{rank}.computing_s"])
        assert measured == pytest.approx(0.1 * (rank + 2.5))  # without the first step
        assert json.loads(figures[f"run.predicted.{rank}.computing_s"]) == use["compute_s"]
        assert json.loads(figures[f"run.predicted.{rank}.memory_bytes"]) == use["peak_bytes"]
        assert f"run.measured.{rank}.memory_bytes" not in figures
    assert "not measured" in page.text


def test_a_run_whose_plan_changed_is_read() -> None:
    """Figures are those of the plan's own steps; the course is that of the whole run."""
    other = [replace(s, step=s.step + 3, seconds=9.0) for s in logged(ranks=3)]
    again = [replace(s, step=s.step + 6, plan="of another cluster", seconds=9.0) for s in logged()]
    page = page_of("small.json", "--log", write_log(*logged(), *other, *again))
    figures = dict(page.figures)
    assert (figures["run.steps"], figures["run.own"], figures["run.counted"]) == ("9", "3", "2")
    assert json.loads(figures["run.seconds"]) == pytest.approx((0.25 + 0.5 / 3) / 2)
    message = refused("report", "small.json", "--log", write_log(*again))
    assert "no step of the log is by this plan: they are of another plan" in message


def test_files_for_tensorboard_hold_the_run() -> None:
    assert "without --log" in refused("report", "small.json", "--tensorboard", "events")
    if find_spec("tensorboard") is None:
        message = refused(
            "report", "small.json", "--log", write_log(*logged()), "--tensorboard", "events"
        )
        assert "files for TensorBoard need its package" in message
        assert not Path("plan.html").exists(), "nothing is written before"
        return
    done("report", "small.json", "--log", write_log(*logged()), "--tensorboard", "events")
    accumulator = import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator("events")
    accumulator.Reload()
    assert len(accumulator.Tags()["scalars"]) == 2 + 3 * 4
    found = {e.step: e.value for e in accumulator.Scalars("computing_s/rank 2")}
    assert found == pytest.approx({n: 0.1 * (2 + n) for n in (1, 2, 3)})


def test_a_run_that_diverges_has_a_page() -> None:
    steps = [
        *logged(2),
        LoggedStep(step=3, loss=float("nan"), seconds=0.2, ranks=logged()[0].ranks),
    ]
    assert "nan" not in Path(write_log(*steps)).read_text().lower()
    page_of("small.json", "--log", "run.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.jsonl: the log has no steps"),
        ("{", "run.jsonl:1: this is no line of a run's log"),
        ("[1]\n", "must be an object"),
        ('{"step": 1, "loss": 1, "ranks": []}\n', "no 'seconds'"),
        ('{"step": 1, "loss": 1, "seconds": -1, "ranks": []}\n', "seconds is -1"),
        ('{"step": 1, "loss": 1, "seconds": Infinity, "ranks": []}\n', "seconds is inf"),
        ('{"step": true, "loss": 1, "seconds": 1, "ranks": []}\n', "step is True"),
        ('{"step": 1, "loss": "x", "seconds": 1, "ranks": []}\n', "loss is 'x'"),
        ('{"step": 1, "loss": 1, "seconds": 1, "ranks": [7]}\n', "a rank is 7"),
        (
            '{"step": 1, "loss": 1, "seconds": 1, "ranks": [{}]}\n',
            "no step of the log is by this plan: they have 1 ranks, the plan has 4",
        ),
        ("\0\xff", "this is no line of a run's log"),
    ],
)
def test_logs_that_cannot_be_used(text: str, message: str) -> None:
    Path("run.jsonl").write_text(text)
    assert message in refused("report", "small.json", "--log", "run.jsonl")
    assert not Path("plan.html").exists()


def test_files_that_cannot_be_used(folder: Path) -> None:
    assert "no such plan file" in refused("report", "absent.json")
    assert "the log cannot be read" in refused("report", "small.json", "--log", "absent.jsonl")
    assert "it is a folder" in refused("report", "small.json", "-o", ".")
    assert "there is no folder" in refused("report", "small.json", "-o", "absent/plan.html")
    assert "own inputs" in refused("report", "small.json", "-o", "small.json")
    (folder / "broken.json").write_text("{")
    assert "damaged or cut off" in refused("report", "broken.json")
    assert not list(folder.glob("*.html"))


WIDE = """\
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8))

def batch():
    return torch.randn(16, 64)

def loss(output, batch):
    return output.square().mean()
"""


SLOW = """\
links: {between: {bandwidth: 1 GB/s, latency: 1 ns}}
nodes:
  - {name: slow, count: 2, gpus: 1, type: cpu, memory: 1 GiB, flops: 10 MFLOP/s,
     memory_bandwidth: 10 MB/s, launch: 1 us}
"""
"""Devices so slow that any collective is worth its time."""


@pytest.mark.slow
@pytest.mark.gloo
def test_a_real_run_writes_its_log(folder: Path) -> None:
    """Every step and rank is there; computing and waiting fill a step, as in the prediction."""
    (folder / "model.py").write_text(WIDE)
    (folder / "slow.yaml").write_text(SLOW)
    done("plan", "model.py", "--cluster", "slow.yaml", "--no-mesh")
    assert Plan.load("plan.json").program.collectives
    done("run", "plan.json", "--nproc", "2", "--steps", "4", "--log", "run.jsonl")
    steps = read_log("run.jsonl")
    assert [s.step for s in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step.loss > 0
        for rank in step.ranks:
            assert rank.computing_s is not None
            assert rank.waiting_s is not None
            assert rank.communicating_s
            assert rank.computing_s > 0
        first = step.ranks[0]
        assert first.computing_s is not None
        assert first.waiting_s is not None
        assert first.computing_s + first.waiting_s == pytest.approx(step.seconds)
    page = page_of("plan.json", "--log", "run.jsonl")
    assert {f"run.measured.{r}.waiting_s" for r in (0, 1)} <= {key for key, _ in page.figures}


@pytest.mark.usefixtures("folder")
def test_logs_that_cannot_be_written() -> None:
    assert "there is no folder" in refused("run", "small.json", "--log", "absent/run.jsonl")
    assert "own inputs" in refused("run", "small.json", "--log", "small.json")


PROBE = """
<script>
addEventListener("load", () => {
  const canvas = document.querySelector("canvas[data-row]");
  const colours = () => new Set(new Uint32Array(canvas.getContext("2d")
    .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
  let tries = 0;
  const before = canvas.toDataURL(), many = colours();
  document.querySelector("button[data-zoom=in]").click();
  const box = canvas.getBoundingClientRect();
  const tell = () => {
    if (canvas.toDataURL() === before && tries++ < 15) return void setTimeout(tell, 200);
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 70 }));
    document.title = JSON.stringify({
      drawn: document.documentElement.dataset.drawn, colours: many,
      zoomed: canvas.toDataURL() !== before, told: document.getElementById("block").textContent,
      ground: getComputedStyle(document.body).backgroundColor,
      overflow: document.documentElement.scrollWidth - innerWidth, width: innerWidth,
    });
  };
  setTimeout(tell, 200);
});
</script>
"""


def browse(chromium: str, *options: str) -> tuple[Page, dict[str, Any], list[str]]:
    """Open plan.html with a probe at its end: the final DOM, the probe's answers, the console."""
    text = Path("plan.html").read_text()
    Path("probe.html").write_text(text.replace("</body>", PROBE + "</body>"))
    run = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            f"--user-data-dir={Path('profile').absolute()}", "--virtual-time-budget=4000",
            *options, "--dump-dom", f"file://{Path('probe.html').absolute()}",
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", run.stdout, re.DOTALL)
    assert title, run.stdout[:500]
    answers = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<"))
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    return Page(run.stdout), answers, console


def test_a_browser_shows_the_page(compared: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no chromium on this machine: no page was opened in a browser")
    page_of(str(compared), "--log", write_log(*logged()))
    light, answers, console = browse(chromium, "--window-size=1280,900")
    assert not console
    rows = [value for tag, name, value in light.attributes if (tag, name) == ("canvas", "data-row")]
    assert answers["drawn"] == str(len(rows))
    assert answers["colours"] > 4
    assert answers["zoomed"]
    assert "in use at" in answers["told"]
    assert answers["overflow"] <= 0
    assert {"devices", "timeline", "collectives", "model", "baselines", "run"} <= set(light.ids)
    assert dict(light.figures) == dict(Page(Path("plan.html").read_text()).figures)
    _, dark, console = browse(
        chromium, "--window-size=500,900", "--blink-settings=preferredColorScheme=0"
    )
    assert not console
    assert dark["ground"] != answers["ground"]
    assert dark["width"] < answers["width"]
    assert dark["overflow"] <= 0
