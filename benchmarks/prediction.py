"""Measured steps against steps predicted from ``hap profile`` alone.

    python -m benchmarks.prediction                    profile, plan, run; about half an hour
    python -m benchmarks.prediction --profile c.yaml   with a profile of this testbed
    python -m benchmarks.prediction --quick            two models, a quick profile

Starts an emulated cluster, profiles it like any cluster, and plans each model by the profile:
the plan, and the usual baselines as programs of the same kind. Each then trains on the
emulated cluster. The output is predicted and measured seconds of a step and bytes at the peak,
with the median and worst error and the rank correlation. Nothing is fitted to the
models. The profile and the steps need a quiet machine.

Memory is the largest amount that the C library's allocator holds during a step, sampled every
two milliseconds by a thread, less the memory besides tensors before the first step:
the rest is tensors and the memory of kernels and gloo.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

import hap
from benchmarks.one_rank import CASES, Case
from benchmarks.racing.summary import rank_correlation
from hap import api
from hap.capture.tracing import capture, flatten
from hap.cli.profiling import Settings
from hap.cli.terminal import emit, no_repeats, profiling_progress, table
from hap.cli.testbed_command import profile_hosts
from hap.cluster.cluster_file import load_cluster
from hap.cluster.topology import Cluster
from hap.errors import HapError
from hap.ir.plan import Plan
from hap.runtime.testbed import Testbed
from hap.synthesizer.baselines import METHODS
from hap.synthesizer.candidate import Candidate
from hap.synthesizer.schedule.event_simulator import schedule, usage
from hap.synthesizer.search.program_space import build_space
from hap.units import format_bytes, format_seconds

HERE = Path(__file__).parent
WARM_UP = 2
MODELS = ("mlp, dropout", "bert", "gpt2", "vit", "vgg")
QUICK = ("mlp, dropout", "bert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One program of one model: its prediction, and its measured steps."""

    model: str
    program: str
    predicted_s: float
    computing_s: float
    communicating_s: float
    hidden_s: float
    predicted_bytes: list[int]
    steps_s: list[float]
    peak_bytes: list[int]

    @property
    def measured_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_errors(self) -> list[float]:
        """Predicted over measured peak, minus one, per rank."""
        pairs = zip(self.predicted_bytes, self.peak_bytes, strict=True)
        return [predicted / measured - 1 for predicted, measured in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile, plan, run, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cluster", default=str(HERE / "clusters" / "prediction4.yaml"))
    parser.add_argument("--profile", help="a profile of this testbed, made before")
    parser.add_argument("--model", action="append", help="a name; may be given several times")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(".prediction"))
    options = parser.parse_args(arguments)
    options.out.mkdir(exist_ok=True)
    wanted = options.model or (QUICK if options.quick else MODELS)
    entries: list[Entry] = []
    with Testbed(load_cluster(options.cluster), links="as written") as bed:
        measured = options.profile or profiled(
            bed, str(options.out / "cluster.yaml"), options.quick
        )
        cluster = load_cluster(measured)
        for case in (c for c in CASES if c.name in wanted):
            for name, plan, line in programs(case, cluster):
                try:
                    ran = bed.spawn(
                        train, args=(plan.to_json(), case.name, options.steps), timeout_s=900
                    )
                except HapError as error:
                    print(f"{case.name}, {name}: {error}")
                    continue
                entries.append(
                    Entry(
                        model=case.name, program=name, **line,
                        steps_s=ran[0][0], peak_bytes=[peak for _, peak in ran],
                    )
                )  # fmt: skip
                told = entries[-1]
                print(
                    f"{case.name}, {name}: predicted {format_seconds(told.predicted_s)}, "
                    f"measured {format_seconds(told.measured_s)}, {told.error:+.1%}",
                    flush=True,
                )
                file = options.out / "prediction.json"
                file.write_text(json.dumps(summary(entries) | {
                    "entries": [asdict(e) | {"error": e.error} for e in entries]
                }, indent=1))  # fmt: skip
    show(entries)


def profiled(bed: Testbed, output: str, quick: bool) -> str:
    """Return the testbed's cluster file, measured by its ranks."""
    with profiling_progress() as progress:
        profile_hosts(bed, Settings(output=output, quick=quick), progress)
    return output


def programs(case: Case, cluster: Cluster) -> Iterator[tuple[str, Plan, dict[str, Any]]]:
    """Yield (name, plan, predictions) of the plan and of the usual baselines."""
    torch.manual_seed(0)
    model, batch = case.model(), case.batch()
    made = hap.plan(
        model, batch, cluster, loss=case.loss, optimizer=case.optimizer,
        options=hap.PlanOptions(all_devices=True, mesh=False),
    )  # fmt: skip
    told = made.prediction
    yield "plan", made, {
        "predicted_s": told.step_s, "computing_s": max(r.compute_s for r in told.ranks),
        "communicating_s": told.communicate_s, "hidden_s": told.hidden_s,
        "predicted_bytes": [r.peak_bytes for r in told.ranks],
    }  # fmt: skip
    space = build_space(capture(model, batch, case.loss))
    for method in METHODS:
        if not method.usual:
            continue
        found = method.plan(space, cluster, made.optimizer.states)
        yield method.name, _as_plan(made, found), _predicted(found)


def _as_plan(made: Plan, found: Candidate) -> Plan:
    program = found.timeline.program
    shares = {name: found.shares[name] for name in program.used_axes()}
    return replace(made, program=program, shares=shares, inside=None, idle=())


def _predicted(found: Candidate) -> dict[str, Any]:
    line, cost = found.timeline, found.price()
    used = usage(schedule(cost.graph, line.program, cost))
    return {
        "predicted_s": line.step_s, "computing_s": float(used.compute_s.max()),
        "communicating_s": float(used.communicate_s.max()),
        "hidden_s": float(used.overlapped_s[used.compute_s.argmax()]),
        "predicted_bytes": [round(b) for b in line.peak_bytes.tolist()],
    }  # fmt: skip


def train(plan_json: dict[str, Any], name: str, steps: int) -> tuple[list[float], int]:
    """Train one rank: (seconds per step until the last rank is done, bytes at the peak)."""
    plan = Plan.from_json(plan_json)
    case = next(c for c in CASES if c.name == name)
    torch.manual_seed(0)
    module = hap.compile(case.model(), plan, loss=case.loss, check=False)
    optimizer = case.optimizer(module.parameters())
    mine = plan.local_batch(case.batch(), dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        loss = api.call(module, mine)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.item()

    gc.collect()
    tensors = [*module.parameters(), *module.buffers(), *flatten(mine).values()]
    held = _allocated_bytes() - sum(t.nbytes for t in tensors)
    with Peak() as peak:
        seconds = [_timed(step) for _ in range(WARM_UP + steps)]
    return seconds[WARM_UP:], peak.nbytes - held


class Peak:
    """The peak of allocated bytes within the context."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while not self._stop.wait(0.002):
            self.nbytes = max(self.nbytes, _allocated_bytes())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of <malloc.h>."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]  # fmt: skip


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Info


def _allocated_bytes() -> int:
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def summary(entries: Sequence[Entry]) -> dict[str, float]:
    """Return errors of the step and of the peak over all entries, and the rank correlation."""
    errors = [abs(e.error) for e in entries]
    memory = [abs(x) for e in entries for x in e.memory_errors]
    return {
        "median_error": statistics.median(errors), "worst_error": max(errors),
        "median_memory_error": statistics.median(memory),
        "rank_correlation": rank_correlation(
            [e.predicted_s for e in entries], [e.measured_s for e in entries]
        ),
    }  # fmt: skip


def show(entries: Sequence[Entry]) -> None:
    """Print the table and the summary."""
    rows = [
        (
            e.model, e.program, format_seconds(e.predicted_s), format_seconds(e.measured_s),
            f"{e.error:+.1%}", format_seconds(e.computing_s), format_seconds(e.communicating_s),
            format_seconds(e.hidden_s), format_bytes(max(e.predicted_bytes)),
            format_bytes(max(e.peak_bytes)), f"{statistics.median(e.memory_errors):+.0%}",
        )
        for e in entries
    ]  # fmt: skip
    head = ("model", "program", "predicted", "measured", "error", "computing", "communicating",
            "hidden", "peak", "measured", "error")  # fmt: skip
    emit(table(head, no_repeats(rows), right=range(2, 11)))
    found = summary(entries)
    print(
        f"step: median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}, "
        f"rank correlation {found['rank_correlation']:.3f}; "
        f"peak memory: median error {found['median_memory_error']:.1%}"
    )


if __name__ == "__main__":
    main()
