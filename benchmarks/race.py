"""The race: measured steps of plans against those of DDP, ZeRO, FSDP2 and tensor parallelism.

    python -m benchmarks.race --minutes 150   cells of the agenda, until the time is up
    python -m benchmarks.race --quick         a part of it in about ten minutes
    python -m benchmarks.race --resume        continue an interrupted run

Each cell is one model on one emulated cluster. All contenders live in the same processes and
take turns, a step each per round; ratios are within a round. docs/race.md explains the results.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.contenders import (
    ABSENT,
    CONTENDERS,
    HOPELESS,
    HOPELESS_ON,
    OURS,
    OURS_HALF,
    OURS_STAGED,
    PAPER,
    ROUNDED,
    TOO_SLOW,
)  # fmt: skip
from benchmarks.racing import clock, document, floors, plans, tables
from benchmarks.racing.agenda import CLUSTERS, MODELS, Slot, chosen
from benchmarks.racing.cell import Said, Task
from benchmarks.racing.profiled import profiled
from benchmarks.racing.results import (
    Cell,
    Entry,
    append,
    as_lines,
    judge_losses,
    judge_memory,
    read,
)
from benchmarks.racing.run import first_line, reference, run_cell
from benchmarks.racing.summary import PLAN
from hap.capture.model_file import ModelFile, load_model_file
from hap.capture.user_optimizer import default_optimizer, examine
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.files import write_whole
from hap.ir.plan import Plan
from hap.runtime.testbed import Testbed
from hap.runtime.testbed.scaling import core_flops_per_s
from hap.synthesizer.baselines import METHODS
from hap.synthesizer.plan_options import PlanOptions
from hap.units import format_seconds

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
KEPT = HERE / "data" / "race.jsonl"
"""Every step of the race in docs/; copied to results.jsonl of OUT, ``--resume`` continues it."""
QUICK = tuple(Slot(model, "4411") for model in ("vgg19", "bert", "wide_mlp"))

MEASURED = ("quick", "rounds", "warm_up", "budget", "sit_out", "cores", "size", "trust_cluster")
"""Options that affect the measurements of a cell."""
TOLERANCE = 1e-4
ROUNDED_TOLERANCE = 1e-2
"""Of losses whose gradients are rounded to bfloat16."""
PATIENCE_S = 300.0
UNBOUNDED = 4 << 30
"""Memory of a rank: limits are judged by tensor bytes, not enforced, as contenders share ranks."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Race cell by cell; rewrite the tables after each."""
    options = _options(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs each start and stop
    console = Console(highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / "results.jsonl"
    if options.write_docs:
        if not (cells := read(lines)):
            raise SystemExit(f"no cells in {lines}: race first, or name another --out")
        cells.sort(key=lambda c: (CLUSTERS.index(c.cluster), c.rows, MODELS.index(c.model), c.run))
        try:
            document.write(DOCS, cells)
        except ValueError as error:
            raise SystemExit(f"{error}: race anew, in one go") from error
        write_whole(KEPT, as_lines(cells))
        return
    if options.floors:
        cells = read(lines)
        for cell in cells:
            _prove(cell, options)
        write_whole(lines, as_lines(cells))
        console.print(tables.summary_text(cells), soft_wrap=True)
        return
    if not options.resume:
        lines.unlink(missing_ok=True)
        shutil.rmtree(options.out / "plans", ignore_errors=True)
    options.code = _code()  # now, since the commit may change during the race
    options.begun = time.time()
    done = {cell.slot for cell in read(lines)}
    todo = [slot for slot in options.slots if slot not in done]
    console.print(
        f"{len(todo)} cells to race, {len(done)} done; about "
        f"{format_seconds(_estimate_s(len(todo), options, read(lines)))}"
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for slot in todo:
            begun = time.time()
            if begun - options.begun > options.minutes * 60:
                console.print(f"the time is up before {slot}")
                break

            def told(text: str, slot: Slot = slot) -> None:
                progress.update(bar, description=f"{slot}: {text}")

            cell = race(slot, options, told)
            cell.took_s = time.time() - begun
            append(lines, cell)
            progress.advance(bar)
            tables.write(options.out, read(lines))
            console.print(tables.cell_text(cell), soft_wrap=True)
    console.print(tables.summary_text(read(lines)), soft_wrap=True)
    console.print(f"\nwritten: {options.out}/race.md, race.json, race.png, results.jsonl")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    some = {"nargs": "+", "metavar": "NAME"}
    parser.add_argument("--models", choices=MODELS, **some)
    parser.add_argument("--clusters", choices=CLUSTERS, **some)
    parser.add_argument("--contenders", choices=CONTENDERS, **some)
    parser.add_argument("--plans", action="store_true", help="baselines that run as plans, too")
    parser.add_argument("--quick", action="store_true", help="three cells, three rounds")
    parser.add_argument("--resume", action="store_true", help="keep cells and plans that are there")
    parser.add_argument("--rounds", type=int, help="counted rounds per cell; default 5, quick 3")
    parser.add_argument("--warm-up", type=int, default=1, help="rounds before those, not counted")
    parser.add_argument(
        "--budget", type=float, default=120.0,
        help="seconds of rounds per cell, after which none begins once three are counted",
    )  # fmt: skip
    parser.add_argument(
        "--sit-out", type=float, default=2.0,
        help="times the fastest, above which a contender takes no further rounds after the warm-up",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no further cell begins"
    )
    parser.add_argument("--cores", type=float, default=1.0, help="that all ranks use together")
    parser.add_argument("--size", default="race", help="function of the model files")
    parser.add_argument(
        "--trust-cluster", action="store_true", help="plan by the cluster file, do not profile"
    )
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="race nothing; write docs/, and all steps to benchmarks/data/, from OUT",
    )
    parser.add_argument(
        "--floors", action="store_true",
        help="race nothing; work out the floors of the cells of OUT anew, from plans and profiles",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path(".race"))
    options = parser.parse_args(arguments)
    options.said = " ".join(_said(parser, options))
    asked = options.models or options.clusters
    options.slots = QUICK if options.quick and not asked else chosen(
        options.models, options.clusters
    )  # fmt: skip
    options.hopeless = () if options.contenders else HOPELESS
    options.contenders = options.contenders or list(CONTENDERS)
    options.rounds = options.rounds or (3 if options.quick else 5)
    return options


def _said(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Iterator[str]:
    """Yield the options that affect measurements and differ from their defaults."""
    for name in MEASURED:
        value = getattr(options, name)
        if value != parser.get_default(name):
            yield f"--{name.replace('_', '-')}"
            if value is not True:
                yield f"{value:g}" if isinstance(value, float) else str(value)


def race(slot: Slot, options: argparse.Namespace, told: plans.Progress) -> Cell:
    """Plan, build and race one cell."""
    spec = _spec(slot, options)
    written = load_cluster(HERE / "clusters" / f"race_{slot.cluster}.yaml")
    rate = _core_flops_per_s(options.out / "core.json")
    with Testbed(roomy(written), cores=options.cores, core_flops_per_s=rate) as bed:
        measured = _with_memory(_measured(bed, slot, options, told), written)
        found, void = _plans(slot, spec, measured, options, told)
        if slot.cluster in HOPELESS_ON:
            void |= dict.fromkeys(options.hopeless, TOO_SLOW)
        names = [name for name in options.contenders if name not in void]
        names += [name for name in found if name not in names]
        file = load_model_file(spec)
        task = Task(
            file=file, names=tuple(names),
            plans={name: path for name, (path, _) in found.items()},
            speeds=tuple(d.rate("matmul", "float32") for d in measured.devices),
            devices=tuple(d.name for d in measured.devices),
            rounds=options.rounds, warm_up=options.warm_up, least=min(3, options.rounds),
            budget_s=options.budget, patience_s=PATIENCE_S, sit_out=options.sit_out,
            ticks=_ticks(file, slot, measured, options),
        )  # fmt: skip
        told("one device")
        losses = _reference(spec, task.steps)

        drift: list[float] = []
        pace: list[float] = []

        def heard(said: Said) -> None:
            if said.what == "begun":
                told(f"{said.name}")
            if said.what == "looked" and said.counted:
                drift.append(said.slower)
                pace.append(bed.pace)

        entries = run_cell(bed, task, heard)
    absent = [Entry(name=name, void=why) for name, why in (void | ABSENT).items()]
    cell = Cell(
        **slot._asdict(), unlike=_unlike(written), reference=losses, drift=drift,
        pace=pace, entries=[*entries, *absent], options=options.said, code=options.code,
        begun=options.begun,
    )  # fmt: skip
    memory = [d.memory_bytes for d in written.devices]
    for entry in entries:
        judge_losses(entry, losses, ROUNDED_TOLERANCE if entry.name in ROUNDED else TOLERANCE)
        judge_memory(entry, memory, task.devices)
        if entry.name in found:
            _describe(entry, found[entry.name][1], measured)
    if OURS in found:
        plan = found[OURS][1]
        states = _optimizer_states(spec)
        floors.fill(cell, plan.graph, measured, states, proved=plan.mesh is None)
    return cell


def _code() -> str:
    """Return the commit of this checkout; empty if git does not know it."""
    if shutil.which("git") is None:
        return ""
    asked = ["git", "describe", "--always", "--dirty=+"]
    found = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=False)
    return found.stdout.strip()


@functools.cache
def _reference(spec: str, steps: int) -> list[float]:
    return reference(load_model_file(spec), steps)


def _prove(cell: Cell, options: argparse.Namespace) -> None:
    """Compute the floors again, for a cell with floors and a stored profile."""
    path, spec = _profile_path(cell.slot, options), _spec(cell.slot, options)
    if path.exists() and cell.arithmetic_s:
        graph = plans.graph_of(load_model_file(spec))
        proved = cell.bound_s > 0
        floors.fill(cell, graph, load_cluster(path), _optimizer_states(spec), proved=proved)


def _optimizer_states(spec: str) -> int:
    return examine(load_model_file(spec).optimizer or default_optimizer).states


def _spec(slot: Slot, options: argparse.Namespace) -> str:
    rows = f"_x{slot.rows}" if slot.rows > 1 else ""
    return f"{HERE / 'models' / slot.model}.py:{options.size}{rows}"


def _core_flops_per_s(path: Path) -> float:
    """Return a core's speed, measured once for all cells: the base of quotas and profiles."""
    if not path.exists():
        write_whole(path, [json.dumps(core_flops_per_s())])
    return float(json.loads(path.read_text()))


def _measured(
    bed: Testbed, slot: Slot, options: argparse.Namespace, told: plans.Progress
) -> Cluster:
    if options.trust_cluster:
        return bed.cluster
    return profiled(bed, _profile_path(slot, options), told, quick=options.quick)


def _ticks(
    file: ModelFile, slot: Slot, measured: Cluster, options: argparse.Namespace
) -> tuple[clock.Tick, ...]:
    if options.trust_cluster:
        return ()
    fastest = max(measured.devices, key=lambda d: d.rate("matmul", "float32"))
    return clock.ticks(plans.graph_of(file), fastest, _profile_path(slot, options))


def _profile_path(slot: Slot, options: argparse.Namespace) -> Path:
    """A further run of a cell has a profile of its own."""
    run = f"{slot.model}.run{slot.run}" if slot.run > 1 else ""
    path: Path = options.out / "clusters" / f"{slot.cluster}{run and '.' + run}.yaml"
    return path


def _plan_path(slot: Slot, name: str, options: argparse.Namespace) -> Path:
    words = (*map(str, slot), name.removeprefix(PLAN).replace(" ", "-").replace(",", ""))
    path: Path = options.out / "plans" / f"{'.'.join(words)}.json"
    return path


def _plans(
    slot: Slot, spec: str, measured: Cluster, options: argparse.Namespace, told: plans.Progress
) -> tuple[dict[str, tuple[Path, Plan]], dict[str, str]]:
    """Return (contender -> its plan, contender -> the reason why it has none)."""
    wanted = {PAPER: plans.PAPER_METHOD} if PAPER in options.contenders else {}
    if options.plans:
        wanted |= {PLAN + m.name: m.name for m in METHODS if m.name != plans.PAPER_METHOD}
    makers = {
        name: (lambda method=method: plans.baseline(spec, measured, method))
        for name, method in wanted.items()
    }
    own = {
        OURS: PlanOptions(), OURS_STAGED: PlanOptions(stages=True),
        OURS_HALF: PlanOptions(allow=("bf16-gradients",)),
    }  # fmt: skip
    for name in own.keys() & set(options.contenders):
        makers[name] = lambda chosen=own[name]: plans.ours(spec, measured, chosen)
    found, void = {}, {}
    for name, make in makers.items():
        told(f"planning {name}")
        path = _plan_path(slot, name, options)
        path.parent.mkdir(exist_ok=True)
        try:
            found[name] = path.resolve(), plans.kept(path, make)
        except HapError as error:
            void[name] = first_line(error)
    return found, void


def _describe(entry: Entry, plan: Plan, cluster: Cluster) -> None:
    names = [d.name for d in plan.cluster.devices]
    peaks = dict(zip(names, (r.peak_bytes for r in plan.prediction.ranks), strict=True))
    entry.predicted_s = plan.prediction.step_s
    entry.predicted_bytes = [peaks.get(d.name, 0) for d in cluster.devices]
    if plan.left_out:
        kept = next(a for a in plan.prediction.alternatives if a.name.startswith("all devices"))
        cost = kept.step_s / plan.prediction.step_s
        entry.note = f"without {', '.join(plan.left_out)}; all devices: predicted {cost:.2f}x"


def take_turns(
    bed: Testbed, file: ModelFile, names: Sequence[str], found: Mapping[str, Path],
    cluster: Cluster, rounds: int,
) -> list[Entry]:  # fmt: skip
    """Return the entries of contenders that take turns for some rounds, judged by their losses.

    Args:
        found: the plan files of contenders that run one.
    """
    task = Task(
        file=file, names=tuple(names), plans=found,
        speeds=tuple(d.rate("matmul", "float32") for d in cluster.devices),
        devices=tuple(d.name for d in cluster.devices), rounds=rounds, warm_up=2, least=rounds,
        budget_s=0.0, patience_s=PATIENCE_S,
    )  # fmt: skip
    losses = reference(file, task.steps)
    entries = run_cell(bed, task)
    for entry in entries:
        judge_losses(entry, losses, TOLERANCE)
    return entries


def roomy(cluster: Cluster) -> Cluster:
    """Return the cluster with memory for all contenders, which share their processes."""
    devices = tuple(
        replace(d, memory_bytes=max(d.memory_bytes, UNBOUNDED)) for d in cluster.devices
    )
    return replace(cluster, devices=devices)


def _with_memory(cluster: Cluster, written: Cluster) -> Cluster:
    """Return the measured cluster with the memory of the file's devices."""
    pairs = zip(cluster.devices, written.devices, strict=True)
    devices = tuple(replace(d, memory_bytes=w.memory_bytes) for d, w in pairs)
    return replace(cluster, devices=devices)


def _unlike(cluster: Cluster) -> bool:
    return len(cluster.types()) > 1 or len(cluster.nodes) not in (1, cluster.world_size)


def _estimate_s(cells: int, options: argparse.Namespace, done: Sequence[Cell]) -> float:
    """Estimate by the finished cells, or else by the usual seconds of a cell."""
    seen = [cell.took_s for cell in done if cell.took_s]
    each = sum(seen) / len(seen) if seen else 60 + min(options.budget, options.rounds * 30)
    return cells * each


if __name__ == "__main__":
    main()
