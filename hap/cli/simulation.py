"""``hap simulate``: the simulated step of a plan as a screen, JSON or a trace file.

Nothing here reads a clock or needs torch: the same plan gives the same screen and trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hap.cli.chrome_trace import trace_text
from hap.cli.plan_screen import tensor_label
from hap.cli.terminal import MANY_RANKS, alike, pattern, shown_time, spans, table
from hap.errors import InputError, reason_of
from hap.files import write_whole
from hap.ir.graph import Input
from hap.ir.pipeline_order import StageWork
from hap.ir.plan import Plan
from hap.ir.program import Convert, Instruction
from hap.plan_simulation import Simulation
from hap.units import format_bytes

_LONGEST = 10


def write_trace(made: Simulation, path: str) -> None:
    """Write the trace file atomically; see :mod:`hap.cli.chrome_trace` for its format.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        if Path(path).is_dir():
            raise IsADirectoryError("it is a folder")
        write_whole(path, trace_text(made.plan, made.run, made.memory))
    except OSError as error:
        raise InputError(
            f"the trace cannot be written there ({reason_of(error)})",
            where=path, hint="change --trace",
        ) from error  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """One rank's step; :class:`hap.synthesizer.schedule.event_simulator.Usage` defines the times.

    ``issuing_s``: see :attr:`hap.plan_simulation.Simulation.issuing_s`. ``peak_at`` names the instruction that allocates when memory is fullest.
    """

    rank: int
    device: str
    kind: str
    compute_s: float
    waiting_s: float
    communicate_s: float
    overlapped_s: float
    idle_s: float
    issuing_s: float
    peak_bytes: int
    memory_bytes: int
    peak_s: float
    peak_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """Similar work of several layers; its time is the sum of each one's slowest rank."""

    of: str
    op: str
    part: str
    times: int
    total_s: float


def rank_uses(made: Simulation) -> list[RankUse]:
    found = []
    for rank, (device, curve) in enumerate(
        zip(made.plan.cluster.devices, made.memory, strict=True)
    ):
        used, k = made.usage, curve.peak
        found.append(
            RankUse(
                rank=rank, device=device.name, kind=device.kind,
                compute_s=float(used.compute_s[rank]), waiting_s=float(used.waiting_s[rank]),
                communicate_s=float(used.communicate_s[rank]),
                overlapped_s=float(used.overlapped_s[rank]), idle_s=float(used.idle_s[rank]),
                issuing_s=made.issuing_s[rank], peak_bytes=round(float(curve.bytes[k])), memory_bytes=device.memory_bytes,
                peak_s=float(curve.times_s[k]), peak_at=_instruction(made, int(curve.at[k])),
            )
        )  # fmt: skip
    return found


def longest(made: Simulation) -> list[Longest]:
    """Return the work that takes most time, by module."""
    found: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for span in made.run.spans:
        of, op = _who(made.plan, span.what)
        seconds = float((span.end_s - span.start_s).max())
        group = of if isinstance(span.what, StageWork) else pattern(of)
        found.setdefault((group, op, span.part), []).append((of, seconds))
    rows = [
        Longest(
            of=group if made.plan.stages else alike([of for of, _ in members])[0], op=op, part=part, times=len(members),
            total_s=sum(seconds for _, seconds in members),
        )
        for (group, op, part), members in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row.total_s)[:_LONGEST]


def _who(plan: Plan, what: Sequence[Instruction] | Input | StageWork) -> tuple[str, str]:
    """Return (module, parameter, tensor or stage; operator) for people."""
    if isinstance(what, StageWork):
        turn = "turn" if what.microbatch >= 0 else "once per step"
        return f"stage {what.stage}", f"to stage {what.to}" if what.to >= 0 else turn
    if isinstance(what, Input):
        return what.target, "update"
    step = what[0]
    if isinstance(step, Convert):
        more = f" and {len(what) - 1} more, fused" if len(what) > 1 else ""
        return tensor_label(plan, step.tensor) + more, step.kind
    node = plan.whole[0].by_name[step.node]
    return node.module or node.name, node.op.removeprefix("aten.")


def _instruction(made: Simulation, at: int) -> str:
    plan = made.plan
    if at < 0:
        return "nothing: at the start"
    if plan.stages:
        return str(made.run.spans[at].what)
    step = plan.whole[1].instructions[at]
    of, op = _who(plan, (step,))
    return f"{op}, {of}, {'backward' if step.backward else 'forward'}"


def simulation_json(made: Simulation) -> dict[str, Any]:
    """Return the contents of the screen for other programs."""
    return {
        "step_s": made.run.step_s,
        "overlap": made.run.overlap,
        "ranks": [asdict(use) for use in rank_uses(made)],
        "longest": [asdict(row) for row in longest(made)],
    }


def simulation_screen(made: Simulation) -> RenderableType:
    """Return each rank's times, its peak memory, and the longest work."""
    how = (
        "communication beside computing"
        if made.run.overlap
        else "communication and computing in turn, which the runtime does not do"
    )
    sections = (
        ("Step", Text(f"{shown_time(made.run.step_s)}, {how}").append(_by_host(made), "yellow")),
        ("Time", _times(made)),
        ("Memory", _memory(made)),
        ("Longest", _longest(made)),
    )
    parts: list[RenderableType] = []
    for title, body in sections:
        parts += [Text(title, style="bold"), Padding(body, (0, 0, 1, 2))]
    return Group(*parts)


def _by_host(made: Simulation) -> str:
    """Return a note on the ranks whose hosts issue operators for longer than the devices compute."""
    late = [u for u in rank_uses(made) if u.issuing_s > max(u.compute_s, 0.9 * made.run.step_s)]
    if not late:
        return ""
    worst = max(late, key=lambda use: use.issuing_s)
    return (
        f"\nrank {spans([use.rank for use in late])}: the host is the limit. It issues operators for "
        f"{shown_time(worst.issuing_s)}, the device computes for {shown_time(worst.compute_s)}; "
        "compiled code has fewer of them (--backend inductor), and CUDA graphs issue them at once "
        "(--backend cudagraphs)"
    )


def _times(made: Simulation) -> RenderableType:
    columns = ("compute_s", "waiting_s", "communicate_s", "overlapped_s", "idle_s")
    rows = [
        (*(shown_time(getattr(use, column)) for column in columns), shown_time(made.run.step_s))
        for use in rank_uses(made)
    ]
    head = ("rank", "device", "compute", "waiting", "communication", "overlapped", "idle", "step")
    return table(head, _by_rank(made.plan, rows), right=range(2, 8))


def _memory(made: Simulation) -> RenderableType:
    rows = [
        (f"{format_bytes(u.peak_bytes)} of {format_bytes(u.memory_bytes)}", shown_time(u.peak_s), u.peak_at)
        for u in rank_uses(made)
    ]  # fmt: skip
    head = ("rank", "device", "peak", "at", "while it computes")
    return table(head, _by_rank(made.plan, rows), right=(2, 3))


def _by_rank(plan: Plan, rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a line per rank; above 16 ranks, a line per group of equal devices and figures."""
    lines: dict[tuple[object, tuple[str, ...]], list[int]] = {}
    for rank, cells in enumerate(rows):
        device = plan.cluster.devices[rank]
        if plan.world_size > MANY_RANKS:
            lines.setdefault((device.figures, (device.kind, *cells)), []).append(rank)
        else:
            lines[rank, (f"{device.kind} {device.name}", *cells)] = [rank]
    return [(spans(ranks), *line) for (_, line), ranks in lines.items()]


def _longest(made: Simulation) -> RenderableType:
    rows = [
        (row.of, row.op, row.part, str(row.times), shown_time(row.total_s)) for row in longest(made)
    ]
    return table(("of", "", "", "times", "together"), rows, right=(3, 4))
