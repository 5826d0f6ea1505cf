"""How long does planning take, and how much memory?

    python -m benchmarks.plan_time            the real models
    python -m benchmarks.plan_time --quick    tiny ones: does it run at all?

Each row is planned twice, in processes of its own: once by the command ``hap plan``, whose
wall time, processor time and peak memory are those of the whole process as the kernel counts
them, and once phase by phase. Where the wall time is well above the processor time, the machine
was busy with something else. That no program fits the devices is an outcome like any other.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from hap.errors import InfeasibleError
from hap.units import format_bytes, format_seconds

HERE = Path(__file__).parent
ROWS = (
    ("bert.py", "unlike8"),
    ("vit.py", "unlike8"),
    ("gpt2.py", "unlike8"),
    ("vgg19.py", "unlike8"),
    ("bert_moe.py", "unlike8"),
    ("llama.py:llama_7b", "lab_mixed"),
)
QUICK = (("vit.py:tiny", "unlike8"), ("mlp.py:tiny", "unlike8"))

TARGETS = {"plan": ("bert.py", 15.0, 2e9), "search": ("bert.py", 2.0)}
"""BERT-base: seconds and bytes of the whole plan; seconds of one search (tables to program)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model on one cluster: the whole command, and its phases (seconds by name)."""

    model: str
    cluster: str
    wall_s: float
    cpu_s: float
    peak_bytes: int
    fits: bool
    weights_bytes: int
    nodes: int
    phases_s: dict[str, float]

    @property
    def search_s(self) -> float:
        return sum(self.phases_s[name] for name in ("tables", "elimination", "program"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models only")
    parser.add_argument("--only", help="rows whose model file's name holds this text")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    options = parser.parse_args(arguments)
    chosen = [row for row in (QUICK if options.quick else ROWS) if (options.only or "") in row[0]]
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=2 * len(chosen))
        for model, cluster in chosen:
            progress.update(task, description=f"hap plan {model}")
            whole = measure(model, cluster)
            progress.update(task, description=f"phases of {model}", advance=1)
            rows.append(Row(model=model, cluster=cluster, **whole, **by_phase(model, cluster)))
            progress.advance(task)
    console.print(whole_table(rows))
    console.print(phase_table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _paths(model: str, cluster: str) -> tuple[str, str]:
    return str(HERE / "models" / model), str(HERE / "clusters" / f"{cluster}.yaml")


def measure(model: str, cluster: str) -> dict[str, Any]:
    """``hap plan`` in a process of its own: wall and processor seconds, peak resident bytes."""
    spec, path = _paths(model, cluster)
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "plan.json")
        start = time.perf_counter()
        words = [sys.executable, "-m", "hap.cli", "plan", spec, "--cluster", path, "-o", output]
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as child:
            assert child.stderr is not None
            said = child.stderr.read().decode()
            _, status, used = os.wait4(child.pid, 0)  # of this child alone
            child.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - start
    if child.returncode not in (0, InfeasibleError.exit_code):
        sys.exit(f"hap plan {model} failed:\n{said}")
    unit = 1 if sys.platform == "darwin" else 1024
    cpu_s = used.ru_utime + used.ru_stime
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_bytes": used.ru_maxrss * unit,
        "fits": child.returncode == 0,
    }


def by_phase(model: str, cluster: str) -> dict[str, Any]:
    """What :mod:`benchmarks.plan_phases` prints in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.plan_phases", *_paths(model, cluster)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=HERE.parent)
    if done.returncode:
        sys.exit(f"planning {model} phase by phase failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def whole_table(rows: Sequence[Row]) -> Table:
    """The command as a whole, against the targets."""
    table = Table(box=None, title="hap plan, a process of its own", title_justify="left")
    for name in ("model", "cluster", "operators", "wall", "processor", "peak memory", "weights"):
        table.add_column(name, justify="left" if name in ("model", "cluster") else "right")
    table.add_column("fits")
    table.add_column("target")
    model, limit_s, limit_bytes = TARGETS["plan"]
    for row in rows:
        target = "weights never allocated: " + _verdict(row.peak_bytes < row.weights_bytes)
        if row.weights_bytes < limit_bytes:
            target = ""  # an import of torch alone takes about as much
        if row.model == model:
            met = row.wall_s <= limit_s, row.peak_bytes <= limit_bytes
            target = (
                f"{format_seconds(limit_s)}: {_verdict(met[0])}, "
                f"{limit_bytes / 1e9:g} GB: {_verdict(met[1])}"
            )
        table.add_row(
            row.model, row.cluster, str(row.nodes), format_seconds(row.wall_s),
            format_seconds(row.cpu_s), format_bytes(row.peak_bytes),
            format_bytes(row.weights_bytes), "yes" if row.fits else "no", target,
        )  # fmt: skip
    return table


def phase_table(rows: Sequence[Row]) -> Table:
    """Wall time by phase; ``one search`` is the sum of tables, elimination and program."""
    names = list(rows[0].phases_s) if rows else []
    table = Table(box=None, title="\nwall time by phase", title_justify="left")
    table.add_column("model")
    for name in [*names, "one search"]:
        table.add_column(name, justify="right")
    table.add_column("target")
    model, limit_s = TARGETS["search"]
    for row in rows:
        target = f"{format_seconds(limit_s)}: {_verdict(row.search_s <= limit_s)}"
        table.add_row(
            row.model, *(format_seconds(row.phases_s[n]) for n in names),
            format_seconds(row.search_s), target if row.model == model else "",
        )  # fmt: skip
    return table


def _verdict(met: bool) -> str:
    return "met" if met else "[bold red]missed[/]"


if __name__ == "__main__":
    main()
