"""Seconds and memory of planning.

    python -m benchmarks.plan_time                 the real models, all tables
    python -m benchmarks.plan_time --only whole    one table: whole, alone, search
    python -m benchmarks.plan_time --model t5      rows with this text in the model's name
    python -m benchmarks.plan_time --quick         tiny models, to test the benchmark

*whole*: the command ``hap plan`` in its own process, by the kernel's accounts. *alone*: from
the model to the plan inside one process, without imports and without writing anything.
*search*: one exact search of the joint graph (tables, elimination, program), the median of three.

Targets are compared with wall time, which other work on a shared machine increases;
processor seconds of all processes of a case are shown as well. A case whose programs do not
fit the devices counts like any other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hap.errors import InfeasibleError
from hap.units import format_bytes, format_seconds

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a model on a cluster, and its limits of seconds and bytes.

    ``mesh``: planned over two axes, between machines and inside them; for *alone*. ``stages``: with
    ``--stages``; for *whole*.
    """

    kind: str
    model: str
    cluster: str = "unlike8"
    limit_s: float | None = None
    limit_bytes: float | None = None
    mesh: bool = False
    stages: bool = False


CASES = (
    Case("whole", "bert.py", "unlike8", 15),
    Case("whole", "bert.py", "three_types64", 15, 2e9),
    Case("whole", "bert.py", "hap_testbed", 15, 2e9),
    Case("whole", "llama.py:batch_64", "three_types64", 45, 4e9),
    Case("whole", "bert.py:batch_1024", "three_types8"),
    Case("whole", "bert.py:batch_1024", "three_types1024"),
    Case("alone", "gpt2.py", "unlike8", 6),
    Case("alone", "bert.py:batch_64", "unlike8", 7),
    Case("alone", "vit.py:batch_64", "unlike8", 6),
    Case("alone", "llama.py:llama_3_8b", "unlike8", 20, 4e9),
    Case("alone", "gpt2.py", "unlike8", 12, mesh=True),
    Case("alone", "bert.py:batch_64", "unlike8", 15, mesh=True),
    Case("alone", "vit.py:batch_64", "unlike8", 12, mesh=True),
    Case("alone", "llama.py:llama_3_8b_small", "unlike8", 45, 4e9, mesh=True),
    Case("alone", "vgg19.py", "unlike8"),
    Case("search", "bert.py", "unlike8", 0.5),
    Case("search", "bert.py:layers_24", "unlike8"),
    Case("search", "bert.py:layers_48", "unlike8"),
    Case("search", "bert_moe.py", "unlike8", 1),
    Case("search", "llama.py:llama_7b", "lab_mixed", 3),
    Case("search", "t5.py", "unlike8", 5),
    # Equal devices: the setting in which planners for equal devices are measured.
    Case("alone", "gpt2.py", "even8", 6),
    Case("alone", "bert.py:batch_64", "even8", 7),
    Case("alone", "vit.py:batch_64", "even8", 6),
    Case("whole", "bert.py", "unlike8", stages=True),
    Case("whole", "bert.py", "three_types64", 45, stages=True),
    Case("whole", "llama.py:batch_64", "three_types64", stages=True),
)
QUICK = (
    Case("whole", "vit.py:tiny", "unlike8"),
    Case("alone", "mlp.py:tiny", "unlike8"),
    Case("alone", "mlp.py:tiny", "unlike8", mesh=True),
    Case("search", "vit.py:tiny", "unlike8"),
    Case("search", "t5.py:tiny", "unlike8"),
)
RATIOS = (
    ("four times the layers, one search", CASES[15], CASES[17], 4.5),
    ("8 -> 1,024 devices, the whole command", CASES[4], CASES[5], 1.5),
    ("with stages, BERT on 8 devices", CASES[0], CASES[-3], 2.0),
    ("with stages, BERT on 64 devices", CASES[1], CASES[-2], 2.0),
    ("with stages, Llama on 64 devices", CASES[3], CASES[-1], 2.0),
)
"""(growing quantity, from, to, largest factor of the seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Costs of a case: seconds, bytes, and for some kinds the seconds of each phase."""

    case: Case
    wall_s: float
    cpu_s: float
    peak_bytes: int
    fits: bool | None = None
    nodes: int | None = None
    phases_cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def verdicts(self) -> str:
        """Return the targets, met or missed."""
        found = []
        if self.case.limit_s is not None:
            met = self.wall_s <= self.case.limit_s
            found.append(f"{format_seconds(self.case.limit_s)}: {_verdict(met)}")
        if self.case.limit_bytes is not None:
            met = self.peak_bytes <= self.case.limit_bytes
            found.append(f"{self.case.limit_bytes / 1e9:g} GB: {_verdict(met)}")
        return ", ".join(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models only")
    parser.add_argument("--only", choices=sorted({case.kind for case in CASES}))
    parser.add_argument("--model", default="", help="rows whose model's name holds this text")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    chosen = [
        case
        for case in (QUICK if options.quick else CASES)
        if options.only in (None, case.kind) and options.model in case.model
    ]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    seen: list[Seen] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{case.kind}: {case.model} on {case.cluster}")
            seen.append(whole(case) if case.kind == "whole" else phases(case))
            progress.advance(task)
    for kind, title in TITLES.items():
        if rows := [row for row in seen if row.case.kind == kind]:
            console.print(table(title, rows))
    if found := ratios(seen):
        console.print(found)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in seen], indent=1))


def _paths(case: Case) -> tuple[str, str]:
    return str(HERE / "models" / case.model), str(HERE / "clusters" / f"{case.cluster}.yaml")


def whole(case: Case) -> Seen:
    """Run ``hap plan`` in its own process: wall and processor seconds, peak resident bytes."""
    spec, path = _paths(case)
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "plan.json")
        start = time.perf_counter()
        words = [sys.executable, "-m", "hap.cli", "plan", spec, "--cluster", path, "-o", output]
        words += ["--stages"] * case.stages
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
            assert child.stderr is not None
            said = child.stderr.read().decode()
            _, status, used = os.wait4(child.pid, 0)  # includes the children that it waited for
            child.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - start
    if child.returncode not in (0, InfeasibleError.exit_code):
        sys.exit(f"hap plan {case.model} failed:\n{said}")
    unit = 1 if sys.platform == "darwin" else 1024
    return Seen(
        case=case, wall_s=wall_s, cpu_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * unit, fits=child.returncode == 0,
    )  # fmt: skip


def phases(case: Case) -> Seen:
    """Return the output of :mod:`benchmarks.plan_phases`, run in its own process."""
    from benchmarks.plan_phases import PLANNING, SEARCH

    words = [sys.executable, "-m", "benchmarks.plan_phases", *_paths(case)]
    names: tuple[str, ...] = PLANNING
    if case.kind == "search":
        words, names = [*words, "--search"], SEARCH
    if case.mesh:
        words = [*words, "--mesh"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode:
        sys.exit(f"planning {case.model} phase by phase failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    cpu = {name: found["phases_cpu_s"][name] for name in names}
    return Seen(
        case=case, wall_s=sum(found["phases_s"][name] for name in names),
        cpu_s=sum(cpu.values()), peak_bytes=found["peak_bytes"], fits=found["fits"], nodes=found["nodes"], phases_cpu_s=cpu,
    )  # fmt: skip


TITLES = {
    "whole": "the command hap plan",
    "alone": "\nplanning alone: capture to plan",
    "search": "\none search, the median of three",
}


def table(title: str, rows: Sequence[Seen]) -> Table:
    """Return the rows of one kind against their targets; phases are processor seconds."""
    table = Table(box=None, title=title, title_justify="left")
    parts = list(rows[0].phases_cpu_s)
    for name in ("model", "cluster", "processor", "wall", "peak memory", *parts):
        table.add_column(name, justify="left" if name in ("model", "cluster") else "right")
    kind = rows[0].case.kind
    if kind != "search":
        table.add_column("fits")
    table.add_column("target")
    for row in rows:
        cells = [
            row.case.model, _where(row.case),
            format_seconds(row.cpu_s), format_seconds(row.wall_s), format_bytes(row.peak_bytes),
            *(format_seconds(row.phases_cpu_s[name]) for name in parts),
        ]  # fmt: skip
        if kind != "search":
            cells.append("yes" if row.fits else "no")
        table.add_row(*cells, row.verdicts)
    return table


def _where(case: Case) -> str:
    return case.cluster + ", two axes" * case.mesh + ", stages" * case.stages


def ratios(seen: Sequence[Seen]) -> Table | None:
    """Return the growth of the seconds with the model and with the cluster."""
    wall = {row.case: row.wall_s for row in seen}
    table = Table(box=None, title="\ngrowth", title_justify="left")
    for name in ("what grows", "seconds", "factor", "target"):
        table.add_column(name)
    for what, few, many, limit in RATIOS:
        if few in wall and many in wall:
            factor = wall[many] / wall[few]
            spans = f"{format_seconds(wall[few])} -> {format_seconds(wall[many])}"
            met = _verdict(factor <= limit)
            table.add_row(what, spans, f"{factor:.2f}", f"{limit:g}: {met}")
    return table if table.row_count else None


def _verdict(met: bool) -> str:
    return "met" if met else "[bold red]missed[/]"


if __name__ == "__main__":
    main()
