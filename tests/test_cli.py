"""The command line: its options, exit codes, errors with their place, and no partial files."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from hap.cli.answers import answered
from hap.cli.commands import main
from hap.cli.terminal import emit
from hap.ir.plan import FORMAT, Plan
from tests.small_plan import small_plan

MODEL = """\
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(20, 48)
        self.down = nn.Linear(48, 20)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def model():
    return Net()

def batch():
    return torch.randn(12, 20)
"""

CLUSTER = """\
name: mine
links:
  between: {bandwidth: 10 Gbit/s, latency: 50 us}
nodes:
  - {name: fast, gpus: 2, type: V100}
  - {name: slow, gpus: 2, type: P100}
"""

HELP = {
    "": [
        "--help",
        "--version",
        "explain",
        "export",
        "import",
        "init",
        "plan",
        "profile",
        "report",
        "rules",
        "run",
        "show",
        "simulate",
        "testbed",
        "verify",
        "what-if",
    ],
    "plan": [
        "--accumulate",
        "--all-devices",
        "--allow",
        "--allow-idle",
        "--cluster",
        "--compare",
        "--engine",
        "--help",
        "--json",
        "--keep",
        "--mesh",
        "--output",
        "--pin",
        "--prove",
        "--recompute",
        "--stages",
        "--strict-rules",
        "--time-limit",
        "--verbose",
    ],
    "verify": ["--backend", "--device", "--dtype", "--help", "--processes", "--seed", "--verbose"],
    "run": [
        "--adapt",
        "--backend",
        "--checkpoint",
        "--elastic",
        "--every",
        "--help",
        "--keep",
        "--log",
        "--max-restarts",
        "--nproc",
        "--resume",
        "--steps",
        "--verbose",
    ],
    "explain": ["--cluster", "--help", "--json", "--verbose"],
    "export": ["--help", "--to", "--verbose"],
    "import": ["--help", "--to", "--verbose"],
    "simulate": ["--cudagraphs", "--help", "--in-turn", "--json", "--trace", "--verbose"],
    "profile": [
        "--help",
        "--nodes",
        "--nproc",
        "--output",
        "--quick",
        "--resume",
        "--testbed",
        "--verbose",
    ],
    "testbed": ["--clean", "--cores", "--help", "--links", "--verbose"],
    "show": ["--backward", "--code", "--forward", "--help", "--json", "--rank", "--verbose"],
    "what-if": [
        "--add",
        "--all-devices",
        "--allow-idle",
        "--by",
        "--cache",
        "--cluster",
        "--help",
        "--json",
        "--link",
        "--memory",
        "--plot",
        "--refine",
        "--replace",
        "--rows",
        "--verbose",
        "--without",
    ],
    "report": ["--help", "--log", "--output", "--tensorboard", "--verbose"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with a model file, a cluster file and a plan, and enter it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    small_plan().save(tmp_path / "small.json")
    return tmp_path


def hap(*words: str) -> Result:
    """Run a command; any exception but an exit fails the test."""
    result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def refused(code: int, *words: str) -> str:
    """Return the error of a command that must fail with this exit code and without a traceback."""
    result = hap(*words)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ") or "\nerror: " in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize("command", HELP)
def test_the_commands_and_options_are_these(command: str) -> None:
    text = hap(*filter(None, [command]), "--help").stdout
    found = re.findall(
        r"^  (?:-\w, )?(--[a-z-]+|[a-z][a-z-]*)", text.partition("Options:")[2], re.M
    )
    assert sorted(found) == HELP[command]


def test_no_such_option_or_command_is_bad_input() -> None:
    assert hap("plan", "model.py").exit_code == 2  # --cluster is missing
    assert hap("explode").exit_code == 2


# --- bad input found before planning ---


def test_plan_files_that_cannot_be_read(folder: Path) -> None:
    assert "absent.json: no such plan file" in refused(2, "show", "absent.json")
    whole = (folder / "small.json").read_text()
    (folder / "cut.json").write_text(whole[: len(whole) // 2])
    assert "cut.json: the plan file is damaged or cut off" in refused(2, "show", "cut.json")
    newer = json.loads(whole) | {"format": FORMAT + 1}
    (folder / "newer.json").write_text(json.dumps(newer))
    assert f"the plan has format {FORMAT + 1}" in refused(2, "show", "newer.json")
    other = json.loads(whole) | {"cluster_digest": "0"}
    (folder / "other.json").write_text(json.dumps(other))
    assert "don't match its digests" in refused(2, "show", "other.json")
    assert "this is no plan file" in refused(2, "show", str(_write(folder / "list.json", "[]")))


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_verbose_shows_the_traceback_and_the_same_error() -> None:
    result = hap("show", "absent.json", "--verbose")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: absent.json: no such plan file\n  hint: hap plan makes one\n" in result.stderr


BUG = (
    "error: {}:{}: this is a bug of hap or of the model: KeyError: 'x'\n  hint: if the model runs "
)


@pytest.mark.parametrize("asked", ["", "1"])
def test_an_error_that_nobody_expects_is_told_as_a_bug(
    asked: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise KeyError("x")

    monkeypatch.setenv("HAP_TRACEBACK", asked)
    with pytest.raises(SystemExit) as ended:
        answered(fail)(verbose=False)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert BUG.format(__file__, fail.__code__.co_firstlineno + 1) in told
    assert ("Traceback" in told) == bool(asked)


@pytest.mark.parametrize(
    "error", [click.UsageError("wrong"), click.exceptions.Exit(3), click.Abort(), SystemExit(4)]
)
def test_other_ends_of_a_command_are_left_to_click(error: BaseException) -> None:
    def end() -> None:
        raise error

    with pytest.raises(type(error)):
        answered(end)(verbose=False)


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_command_ends_quietly_when_nobody_reads_it(
    lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            answered(lambda: print("line\n" * lines))(verbose=False)
    assert ended.value.code == 128 + signal.SIGPIPE
    assert capsys.readouterr().err == ""


def test_other_broken_pipes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with (
        tempfile.TemporaryFile("w") as out,
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit, match="2"),
    ):
        answered(fail)(verbose=False)
    assert "Broken pipe" in capsys.readouterr().err


def test_a_closed_stdout_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    answered(lambda: emit("text"))(verbose=False)
    assert sys.stdout.name == os.devnull


def test_a_terminal_without_utf_8_shows_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    answered(lambda: emit("größe:0"))(verbose=False)
    assert out.getvalue() == b"gr\\xf6\\xdfe:0\n"


def test_numbers_beyond_their_range(folder: Path) -> None:
    for seed in (str(2**64), str(-(2**63) - 1)):
        result = hap("verify", "small.json", "--seed", seed)
        assert result.exit_code == 2 and "64 bits" in result.stderr
    result = hap("plan", "model.py", "--cluster", "cluster.yaml", "--time-limit", "nan")
    assert result.exit_code == 2 and "nan is no time" in result.stderr


def test_a_name_that_is_no_text() -> None:
    assert "plan_file is no text in UTF-8" in refused(2, "show", "\udcff.json")


def test_show(folder: Path) -> None:
    plan = small_plan()
    assert hap("show", "small.json").stdout.splitlines() == list(plan.program.lines(plan.graph))
    rank = hap("show", "small.json", "--rank", "3", "--forward").stdout.splitlines()
    assert rank[0] == "fwd  y0@S0 = aten.mm.default(x@S0, w0@R)  # (1, 6)"
    assert all(line.startswith("fwd") for line in rank)
    assert "there is no rank 4" in refused(2, "show", "small.json", "--rank", "4")


def test_a_plan_is_for_so_many_ranks() -> None:
    message = refused(2, "run", "small.json", "--nproc", "3")
    assert "the plan is for 4 ranks, this run has 3" in message


def test_run_for_several_machines_prints_their_lines() -> None:
    text = hap("run", "small.json", "--steps", "3", "--", "--lr", "1").stdout
    assert "torchrun --nnodes=2 --node-rank=1 --nproc-per-node=2 --master-addr=new" in text
    assert "hap run small.json --steps 3 -- --lr 1\n" in text
    assert "srun --distribution=arbitrary --nodes=2 --ntasks=4" in text


def test_torchrun_starts_no_rank_again_on_several_machines() -> None:
    message = refused(2, "run", "small.json", "--checkpoint", "new", "--max-restarts", "2")
    assert "--max-restarts without --elastic" in message and "--elastic" in message


PARSED = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
width = parser.parse_args().width

def model():
    return torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 2))

def batch():
    return torch.randn(12, 8)

def loss(output, batch):
    return output.square().mean()

def batches():
    yield from torch.randn(30, 8).split(12)
"""


@pytest.mark.gloo
@pytest.mark.slow
def test_a_model_file_may_parse_arguments(folder: Path) -> None:
    """Those of hap plan are kept for verify and run, those of hap run come first."""
    (folder / "parsed.py").write_text(PARSED)
    argv = [*sys.argv]
    assert hap("plan", "parsed.py", "--cluster", "local:1", "--", "--width", "6").exit_code == 0
    assert Plan.load("plan.json").source.argv == ["parsed.py", "--width", "6"]
    assert hap("verify", "plan.json").exit_code == 0
    answers = hap(
        "what-if", "parsed.py", "--cluster", "local:1", "--rows", "24", "--", "--width", "3"
    )
    assert answers.exit_code == 0, answers.output
    assert sys.argv == argv
    message = refused(2, "run", "plan.json", "--steps", "1", "--", "--width", "5")
    assert "float32[5, 8]" in message
    message = hap("run", "plan.json", "--steps", "3").stderr
    assert "the batch has shape (6, 8), the plan (12, 8)" in message and "drop_last" in message


def test_ctrl_c_has_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "load", stop)
    stopped = hap("show", "small.json")
    assert (stopped.exit_code, stopped.stderr) == (130, "stopped by Ctrl-C\n")


def test_a_plan_made_in_python_names_no_model_file(folder: Path) -> None:
    small_plan(path="").save(folder / "python.json")
    assert "the plan names no model file" in refused(2, "verify", "python.json")


def test_nothing_is_planned_that_cannot_be_written(folder: Path) -> None:
    words = ("plan", "model.py", "--cluster", "cluster.yaml", "-o")
    assert "absent/plan.json: cannot write there" in refused(2, *words, "absent/plan.json")
    assert "cannot write there" in refused(2, *words, str(folder))


# --- through the planner ---


@pytest.fixture
def unchanged(folder: Path) -> Iterator[None]:
    """Check that a failing command leaves no new file in the folder, not even a partial one."""
    names = sorted(p.name for p in folder.iterdir() if p.name != "__pycache__")
    yield
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == names


def change(folder: Path, old: str, new: str, file: str = "model.py") -> None:
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))


WORDS = ("plan", "model.py", "--cluster", "cluster.yaml", "--all-devices")
KEPT: list[str] = []
"""The text of the plan that :data:`WORDS` make, once a test has asked for it."""


def planned() -> None:
    """Write the plan of the unchanged model file to plan.json."""
    if not KEPT:
        result = hap(*WORDS)
        assert result.exit_code == 0, result.output
        KEPT.append(Path("plan.json").read_text())
    Path("plan.json").write_text(KEPT[0])


FORWARD = "return self.down(self.up(x).relu()).square().mean()"


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (FORWARD, "return self.down(self.up(x))", ["the loss has shape (12, 20), not a scalar"]),
        (FORWARD, "return {'x': self.up(x)}", ["the forward returns no loss"]),
        (
            "return self.down",
            "if x.sum() > 0:\n            x = -x\n        return self.down",
            ["model.py:11: ", "can't be captured as one graph"],
        ),
        (
            "self.down(self.up(x).relu()).square()",
            "torch.poisson(self.up(x).exp())",
            ["model.py:11: ", "aten.poisson.", "random numbers"],
        ),
        ("    return Net()", "    return Nett()", ["model.py:14: ", "model() raised NameError"]),
        ("def model", "def made", ["model.py: no function `model`"]),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_models_that_cannot_be_planned(
    folder: Path, old: str, new: str, messages: list[str]
) -> None:
    change(folder, old, new)
    error = refused(2, "plan", "model.py", "--cluster", "cluster.yaml")
    for message in messages:
        assert message in error


@pytest.mark.usefixtures("unchanged")
def test_clusters_that_cannot_be_used(folder: Path) -> None:
    assert "cannot read the cluster" in refused(2, "plan", "model.py", "--cluster", "absent.yaml")
    change(folder, "type: P100", "type: P1000", "cluster.yaml")
    assert "cluster.yaml:6: " in refused(2, "plan", "model.py", "--cluster", "cluster.yaml")


@pytest.mark.usefixtures("unchanged")
def test_no_program_fits_the_memory(folder: Path) -> None:
    change(folder, "type: V100", "type: V100, memory: 1 KiB", "cluster.yaml")
    change(folder, "type: P100", "type: P100, memory: 1 KiB", "cluster.yaml")
    error = refused(3, "plan", "model.py", "--cluster", "cluster.yaml")
    assert "memory" in error and "KiB" in error


@pytest.mark.slow
def test_the_screen_is_the_same_each_time_and_time_goes_to_stderr(folder: Path) -> None:
    first = hap(*WORDS)
    saved = (folder / "plan.json").read_bytes()
    assert first.exit_code == 0 and "planned in" in first.stderr
    assert first.stdout == hap(*WORDS).stdout and (folder / "plan.json").read_bytes() == saved
    assert "hap verify plan.json" in first.stdout


def test_plan_as_json(folder: Path) -> None:
    result = hap("plan", "model.py", "--cluster", "cluster.yaml", "--json", "-o", "other.json")
    data = json.loads(result.stdout)
    assert data["totals"]["parameters"] == 20 * 48 + 48 + 48 * 20 + 20
    assert data["graph_digest"] == json.loads((folder / "other.json").read_text())["graph_digest"]
    assert Plan.load(folder / "other.json").recipe.recompute == ""


@pytest.mark.parametrize(("said", "meant"), [("blocks", "blocks"), ("none", "")])
def test_the_recompute_option_is_kept_in_the_plan(folder: Path, said: str, meant: str) -> None:
    words = ("plan", "model.py", "--cluster", "local:1", "--recompute", said)
    assert hap(*words).exit_code == 0
    assert Plan.load(folder / "plan.json").recipe.recompute == meant


def test_simulate_shows_the_step_that_the_plan_predicts(folder: Path) -> None:
    planned()
    result = hap("simulate", "plan.json", "--json", "--trace", "trace.json")
    found, said = json.loads(result.stdout), json.loads((folder / "plan.json").read_text())
    prediction = said["prediction"]
    assert found["step_s"] == pytest.approx(prediction["step_s"], rel=1e-12)
    for rank, expected in zip(found["ranks"], prediction["ranks"], strict=True):
        assert rank["peak_bytes"] == expected["peak_bytes"]
        assert rank["compute_s"] == pytest.approx(expected["compute_s"], rel=1e-9)
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert result.stderr == "written to trace.json\n"
    in_turn = json.loads(hap("simulate", "plan.json", "--json", "--in-turn").stdout)
    assert found["overlap"] and not in_turn["overlap"] and in_turn["step_s"] >= found["step_s"]
    screen = hap("simulate", "plan.json").stdout
    assert screen == hap("simulate", "plan.json").stdout
    assert "communication beside computing" in screen and "V100-16 fast:0" in screen


def test_simulations_that_cannot_be_made_or_written(folder: Path) -> None:
    planned()
    before = sorted(folder.iterdir())
    for path in ("absent/trace.json", str(folder)):
        error = refused(2, "simulate", "plan.json", "--trace", path)
        assert f"{path}: cannot write there" in error and "--trace" in error
    assert sorted(folder.iterdir()) == before


def test_a_plan_verifies_and_shows_its_code() -> None:
    planned()
    result = hap("verify", "plan.json")
    assert result.exit_code == 0, result.output
    assert "as on one device" in result.stdout and "DIFFERS" not in result.stdout
    assert "torch.ops" in hap("show", "plan.json", "--code", "--rank", "1").stdout


def test_a_plan_of_another_model_says_what_differs(folder: Path) -> None:
    planned()
    change(folder, "48", "64")
    error = refused(2, "verify", "plan.json")
    assert "the model is not the one that was planned" in error and "64" in error


@pytest.mark.slow
def test_a_batch_with_fewer_rows_than_devices(folder: Path) -> None:
    """The batch is refused, or planned on request: other axes are split, or devices idle."""
    change(folder, "(12, 20)", "(2, 20)")
    error = refused(2, "plan", "model.py", "--cluster", "cluster.yaml")
    assert "the global batch has 2 rows, fewer than the 4 devices" in error
    assert "--allow-idle" in error
    result = hap("plan", "model.py", "--cluster", "cluster.yaml", "--allow-idle")
    assert result.exit_code == 0, result.output
    assert hap("verify", "plan.json").exit_code == 0


@pytest.mark.slow
@pytest.mark.gloo
def test_run_trains_on_this_machine() -> None:
    assert hap("plan", "model.py", "--cluster", "local:2", "--all-devices").exit_code == 0
    words = [sys.executable, "-m", "hap.cli", "run", "plan.json", "--nproc", "2", "--steps", "2"]
    run = subprocess.run(words, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"^step (\d)  loss [\d.]+  ", run.stdout, re.M) == ["1", "2"]


def test_python_runs_the_commands_by_the_name_of_the_package() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hap", "show", "-h"], capture_output=True, text=True
    )
    assert run.returncode == 0 and run.stdout.startswith("Usage: hap show")


def test_the_shell_completes_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"_HAP_COMPLETE": "bash_complete", "COMP_WORDS": "hap p", "COMP_CWORD": "1"}
    shown = CliRunner().invoke(main, [], env=words, prog_name="hap", complete_var="_HAP_COMPLETE")
    assert shown.output.split() == ["plain,plan", "plain,profile"]


def test_version_names_hap_torch_and_the_backends() -> None:
    shown = CliRunner().invoke(main, ["--version"])
    assert shown.exit_code == 0
    lines = dict(line.split(None, 1) for line in shown.output.splitlines())
    assert list(lines) == ["hap", "torch", "gloo", "cuda", "nccl"]
    assert lines["hap"] == metadata.version("hap")
    assert lines["torch"] == torch.__version__
    assert lines["gloo"] == "in this torch"
    assert (lines["cuda"] == "not in this torch") == (torch.version.cuda is None)
