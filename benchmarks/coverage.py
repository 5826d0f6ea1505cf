"""Plan and verify every architecture of :mod:`benchmarks.zoo`.

    python -m benchmarks.coverage                    verify the tiny ones, plan the full sizes
    python -m benchmarks.coverage --only bert t5     these alone
    python -m benchmarks.coverage --verify           the tiny ones only; --plan: the full ones only
    python -m benchmarks.coverage --again            also what the results hold already
    python -m benchmarks.coverage --write-docs       write docs/models.md from the results

*Verify*: a plan of the planner's for a random cluster of unlike devices, and a random plan with
random shares for each of 2 to 5 ranks, emulated and compared with one device in float64.
*Plan*: the published size, without memory for its weights, on ``benchmarks/clusters/unlike8.yaml``.

Each architecture runs in a process of its own, so that one failure, or a crash, is one entry's.
Results are kept in ``benchmarks/data/coverage.json`` as they come; what is there is not run again.
Architectures of packages that are not installed are skipped, by name.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.coverage_document import document
from benchmarks.coverage_results import RESULTS, Found, counts, entries, read, summary
from benchmarks.zoo.optional import missing

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "models.md"
CLUSTER = HERE / "clusters" / "unlike8.yaml"
WORLDS = (2, 3, 4, 5)
LIMIT_CPU_S = {"verify": 400, "plan": 200}
"""Processor seconds that each process of a run may take, so that the machine's load does not decide."""
LIMIT_WALL_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures; default: all")
    parser.add_argument("--verify", action="store_true", help="tiny sizes alone")
    parser.add_argument("--plan", action="store_true", help="full sizes alone")
    parser.add_argument("--again", action="store_true", help="run what has a result already")
    parser.add_argument("--write-docs", action="store_true", help="write docs/models.md")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "WHAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, what = options.one
        print(json.dumps(STAGES[what](name)))
        return
    unknown = [name for name in options.only or () if name not in entries()]
    if unknown:
        parser.error(f"no such architecture: {' '.join(unknown)}; docs/models.md lists all")
    chosen = _built_here(options.only or list(entries()))
    for what in STAGES:
        if getattr(options, what) or not (options.verify or options.plan or options.write_docs):
            for name in chosen:
                _update(name, what, options.again)
    results = read()
    print(counts(results))
    if options.write_docs:
        DOCS.write_text(document(results))
        print(f"wrote {DOCS}")


def _built_here(names: list[str]) -> list[str]:
    """Return the architectures whose package is installed; print the others, with the reason."""
    reasons = {name: missing(entries()[name].requires) for name in names}
    for reason in dict.fromkeys(filter(None, reasons.values())):
        left_out = [name for name in names if reasons[name] == reason]
        print(f"SKIPPED {len(left_out)} architectures, {reason}: {' '.join(left_out)}")
    return [name for name in names if not reasons[name]]


def _update(name: str, what: str, again: bool) -> None:
    if not again and read().get(name, {}).get(what, {}).get("ok"):
        return
    found = _in_a_process(name, what)
    results = read()
    results.setdefault(name, {})[what] = found
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(f"{name:16} {what:7} {'ok' if found['ok'] else 'no':3} {summary(found)}", flush=True)


def _in_a_process(name: str, what: str) -> Found:
    words = [sys.executable, "-m", "benchmarks.coverage", "--one", name, what]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    limit = LIMIT_CPU_S[what]
    limited = ["prlimit", f"--cpu={limit}:{limit + 5}", *words]
    try:
        done = subprocess.run(
            limited, capture_output=True, text=True, timeout=LIMIT_WALL_S, env=environment,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ok": False, "reason": f"not done after {LIMIT_WALL_S:.0f} s"}
    if done.returncode == -signal.SIGXCPU:
        return {"ok": False, "reason": f"not done after {limit} processor seconds"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == -signal.SIGKILL:
        return {"ok": False, "reason": "killed by SIGKILL, as when memory runs out"}
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"ok": False, "reason": f"the process ended with {done.returncode}: {last}"}
    found: Found = json.loads(lines[-1])
    return found


def verify(name: str) -> Found:
    """The tiny size under plans that make sense and plans that make none."""
    import hap
    from hap.errors import HapError
    from tests.random_plans import verdict

    start = time.process_time()
    entry = entries()[name]
    try:
        case = case_of(entry)
        rng = random.Random(name)
        plans = {f"{world} ranks": by_chance(case, world) for world in WORLDS}
        cluster = unlike(rng.choice(WORLDS), rng)
        plans[f"planned for {cluster.world_size} unlike ranks"] = hap.plan(
            case.model, case.batch, cluster, loss=entry.loss, fixed=entry.fixed,
            options=hap.PlanOptions(all_devices=True),
        )  # fmt: skip
        worst = 0.0
        for which, plan in plans.items():
            seen = verdict(case, plan)
            if not seen.ok:
                first = next(row for row in seen.rows if not row.ok)
                text = f"{which}: the {first.tensor} differs by {first.error:.0e}"
                return {"ok": False, "reason": text}
            worst = max(worst, *(row.error for row in seen.rows))
    except HapError as error:
        return _refused(error)
    return {
        "ok": True, "nodes": len(case.graph.nodes), "plans": len(plans), "error": worst,
        "operators": sorted({node.op for node in case.graph.nodes}),
        "cpu_s": round(time.process_time() - start, 1),
    }  # fmt: skip


def plan(name: str) -> Found:
    """The full size on eight unlike devices, as ``hap plan`` would."""
    import hap
    from benchmarks.plan_phases import processor_s
    from hap.capture.building import without_data
    from hap.capture.hidden_tensors import real_if_needed
    from hap.capture.torch_private import known_numbers
    from hap.errors import HapError

    entry = entries()[name]
    start = time.perf_counter()
    try:
        with known_numbers():  # of fixed entries
            model, batch = without_data(entry.full)
        wall, processor = time.perf_counter(), processor_s()
        planned = functools.partial(
            hap.plan, batch=batch, cluster=CLUSTER, loss=entry.loss, fixed=entry.fixed
        )
        made = real_if_needed(planned, model, lambda: entry.full()[0], lambda text: None)
    except HapError as error:
        return _refused(error)
    return {
        "ok": True, "nodes": len(made.graph.nodes),
        "parameters": sum(p.numel() for p in model.parameters()),
        "operators": sorted({node.op for node in made.graph.nodes}),
        "step_s": made.prediction.step_s, "unruled": sorted({u.op for u in made.unruled}),
        "build_s": round(wall - start, 1), "wall_s": round(time.perf_counter() - wall, 1),
        "cpu_s": round(processor_s() - processor, 1),
    }  # fmt: skip


STAGES: dict[str, Callable[[str], Found]] = {"verify": verify, "plan": plan}


def _refused(error: Exception) -> Found:
    text = str(error).replace(str(HERE.parent) + "/", "")
    text = text.replace("\n", " ").partition(" hint:")[0]
    where, found, rest = text.partition("site-packages/")
    return {"ok": False, "reason": rest if found else where}


def case_of(entry: Any) -> Any:
    """The tiny size, captured, to be trained by SGD.

    Adam divides by a gradient's size: one that should vanish, as of a key's bias, is all rounding,
    and steps as far as any other.
    """
    import torch

    from hap.capture.fixed_entries import fix_entries
    from hap.capture.tracing import capture
    from hap.rule_sources import with_rules
    from tests.random_plans import make_case

    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    model, batch = built(entry.tiny)
    graph = with_rules(capture(model, fix_entries(batch, entry.fixed), entry.loss), {})
    return make_case(model, batch, entry.loss, optimizer, graph)


def by_chance(case: Any, world: int) -> Any:
    """A random plan, of a narrower space where the whole one is too wide to search."""
    from hap.synthesizer.search.bucket_elimination import TooWide
    from hap.synthesizer.search.program_space import NARROW, build_space
    from tests.random_plans import random_plan

    for narrow in range(len(NARROW) - 1):
        space = build_space(case.graph, narrow=narrow) if narrow else case.space
        with contextlib.suppress(TooWide):
            return random_plan(case.within(space), world, seed=world)
    space = build_space(case.graph, narrow=len(NARROW) - 1)
    return random_plan(case.within(space), world, seed=world)


def built(make: Callable[[], Any]) -> Any:
    import torch

    torch.manual_seed(0)
    return make()


def unlike(world: int, rng: random.Random) -> Any:
    """A cluster of ``world`` devices of two kinds, one a machine, behind a random link."""
    from hap.cluster.device import Device
    from hap.cluster.link import Link
    from hap.cluster.topology import Cluster

    fast = rng.randrange(1, world)
    factors = [rng.choice((1.5, 2.0, 4.0))] * fast + [1.0] * (world - fast)
    devices = tuple(
        Device(
            name=f"node:{rank}", kind="cpu", node="ab"[factor == 1.0], memory_bytes=2**30,
            launch_s=1e-7, flops_per_s={"float32": factor * 1e9},
            memory_bytes_per_s=factor * 1e8,
        )
        for rank, factor in enumerate(factors)
    )  # fmt: skip
    link = Link(10 ** rng.uniform(8, 10), 1e-6)
    return Cluster("random", devices, {"a": link, "b": link}, link)


if __name__ == "__main__":
    main()
