"""Seconds and bytes of the page of ``hap report``.

    python -m benchmarks.report_size                     BERT-base on 64 devices of three kinds
    python -m benchmarks.report_size --plan plan.json    a plan that is there already
    python -m benchmarks.report_size --quick             a tiny model: does it run at all?

*plan*: the plan as it is; ranks of one kind share rows of the timeline. *unlike*: each device is made
slower by another factor, so that every rank has a row of its own: the largest page.
"""

from __future__ import annotations

import argparse
import gzip
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hap import api
from hap.cli.report.page import report_page
from hap.cli.report.timeline_data import timeline_data
from hap.cli.terminal import emit, table
from hap.ir.plan import Plan
from hap.plan_simulation import simulate_plan
from hap.synthesizer.plan_options import PlanOptions
from hap.units import format_seconds

HERE = Path(__file__).parent
LIMIT_BYTES = 3_000_000


def unlike(plan: Plan) -> Plan:
    """Return the plan on devices of which each is slower than the one before."""
    devices = tuple(
        replace(
            device, memory_bytes_per_s=device.memory_bytes_per_s * (1 - 0.003 * rank),
            flops_per_s={k: v * (1 - 0.003 * rank) for k, v in device.flops_per_s.items()},
        )
        for rank, device in enumerate(plan.cluster.devices)
    )  # fmt: skip
    return replace(plan, cluster=replace(plan.cluster, devices=devices))


def measured(name: str, plan: Plan) -> tuple[str, ...]:
    """Return a row of the table: the median of three pages."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        text = report_page(plan, name="plan.json")
        seconds.append(time.perf_counter() - start)
    data = text.encode()
    if len(data) > LIMIT_BYTES:
        print(f"{name}: the page is larger than {LIMIT_BYTES:,} bytes")
    rows = len(timeline_data(simulate_plan(plan))["rows"])
    packed = len(gzip.compress(data))
    return (
        name, str(plan.world_size), str(rows), format_seconds(sorted(seconds)[1]),
        f"{len(data):,}", f"{packed:,}",
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan if need be, and print both rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plan", help="a plan file, instead of planning")
    parser.add_argument("--quick", action="store_true", help="a tiny model on 8 devices")
    options = parser.parse_args(arguments)
    if options.plan:
        plan = Plan.load(options.plan)
    else:
        model = "bert.py:tiny" if options.quick else "bert.py"
        cluster = "three_types8" if options.quick else "three_types64"
        plan = api.plan_file(
            str(HERE / "models" / model), str(HERE / "clusters" / f"{cluster}.yaml"),
            options=PlanOptions(all_devices=True, compare=not options.quick),
        )  # fmt: skip
    rows = [measured("plan", plan), measured("unlike", unlike(plan))]
    head = ("page", "ranks", "rows", "seconds", "bytes", "compressed")
    emit(table(head, rows, right=range(1, 6)))


if __name__ == "__main__":
    main()
