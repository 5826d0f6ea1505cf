"""Check the package on a GPU with one command.

    python -m benchmarks.gpu_proof --prepare DIR          make the plans, on any machine
    python -m benchmarks.gpu_proof --plans DIR            run every part
    python -m benchmarks.gpu_proof --plans DIR --only collectives

Parts, in their order: *collectives* (every collective on NCCL, bit by bit against the emulator), *verification*
(random uneven plans of nine model families against one device), *overlap* (collectives beside
computing on CUDA streams), *commands* (``hap plan``, ``verify`` and ``run`` as a user types them),
*suite* (tests marked ``gpu``), *one rank* (against plain eager; peak memory), *cuda graphs* (the same
with steps as CUDA graphs), *profile* (predicted against measured steps), *compiled* (one rank against
torch.compile). The file is written after every line, so that a run that is stopped loses nothing.

Several ranks may share one GPU. Without a GPU the same code runs on CPUs with gloo and tiny models,
and prints a note. Running needs torch, numpy, rich, click, transformers; *profile* and *suite* need
the other dependencies of the package too. Exits with 0 if no line that ran was missed.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from benchmarks.gpu_proof.models import FAMILIES, SINGLES, TINY_SINGLES
from benchmarks.gpu_proof.report import MISSED, Line, cell, machine, write
from benchmarks.gpu_proof.settings import Settings

PARTS = {
    "collectives": "collectives", "verification": "verification", "overlap": "overlap",
    "commands": "user_commands", "suite": "suite", "one-rank": "single_rank",
    "cuda-graphs": "graph_rank", "profile": "profiled", "kernels": "kernels", "compiled": "compiled_rank",
}  # fmt: skip
"""Part -> module, imported when the part runs, because the parts have different dependencies."""

COLORS = {"met": "green", "missed": "bold red", "skipped": "yellow"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare the plans, or run the parts, print the tables and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the parts that use several")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="make the plans and stop")
    parser.add_argument("--tiny", action="store_true", help="with --prepare: for a run on CPUs")
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=FAMILIES, metavar="NAME",
        help="model families to make random plans for; parts skip the others; default: all nine",
    )  # fmt: skip
    parser.add_argument(
        "--models", nargs="+", default=(), metavar="NAME",
        choices=[single.name for single in (*SINGLES, *TINY_SINGLES)],
        help="models of the parts on one rank; default: all",
    )  # fmt: skip
    parser.add_argument("--plans", type=Path, metavar="DIR", help="where the plans were prepared")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("gpu_proof.json"), help="the JSON file")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: give 1 or more")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    prepare = functools.partial(
        make_plans, ranks=options.ranks, families=options.families, models=options.models,
        console=console,
    )  # fmt: skip
    if options.prepare:
        prepare(options.prepare, tiny=options.tiny)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        console.print("no CUDA device: the same code runs on CPUs with gloo and tiny models")
    with tempfile.TemporaryDirectory() as made:
        if options.plans is None:
            prepare(Path(made), tiny=device.type == "cpu")
        settings = Settings(
            ranks=options.ranks, device=device, folder=options.plans or Path(made),
            models=tuple(options.models),
        )  # fmt: skip
        profiled = settings.folder / "profiled.yaml"
        on, date, lines = machine(device), datetime.date.today().isoformat(), []
        for part in options.only or PARTS:
            for line in run_part(part, settings, console):
                lines.append(line)
                extra = {"The profiled cluster": profiled.read_text()} if profiled.exists() else {}
                write(options.out, on, date, lines, extra)
    console.print(f"{options.out} and {options.out.with_suffix('.md')} hold the lines")
    if any(line.outcome == MISSED for line in lines):
        sys.exit(1)


def make_plans(
    folder: Path, *, ranks: int, families: Sequence[str], models: Sequence[str], tiny: bool,
    console: Console,
) -> None:  # fmt: skip
    """Make the plans; the planner is imported here, because running does not need it."""
    prepare: Callable[..., None] = import_module("benchmarks.gpu_proof.prepare").prepare
    prepare(folder, ranks, families=families, models=models, tiny=tiny, progress=console.print)


def run_part(part: str, settings: Settings, console: Console) -> Iterator[Line]:
    """Yield the lines of a part, each printed as it comes; an exception becomes a missed line."""
    start = time.perf_counter()
    console.print(f"[bold]{part}[/]")
    try:
        for line in import_module(f"benchmarks.gpu_proof.{PARTS[part]}").run(settings):
            _show(line, console, time.perf_counter() - start)
            yield line
    except Exception as error:
        console.print(traceback.format_exc(), markup=False)
        reason = f"{type(error).__name__}: {error}"
        line = Line(part=part, claim="the part runs to its end", outcome=MISSED, reason=reason)
        _show(line, console, time.perf_counter() - start)
        yield line
    console.print(f"{part}: {time.perf_counter() - start:.0f} s")


def _show(line: Line, console: Console, passed_s: float) -> None:
    told = f"{line.seen} (aim {line.aim})" if line.aim else line.seen
    text = "; ".join(filter(None, (line.claim, told, cell(line.reason))))
    begin = f"{passed_s:5.0f} s  [{COLORS[line.outcome]}]{line.outcome:7}[/]"
    console.print(f"{begin} {escape(text)}")


if __name__ == "__main__":
    main()
