"""Kernel time of each operator on one rank, by torch's profiler, against the predicted one.

    python -m benchmarks.gpu_proof.kernels plans benchmarks/clusters/h200.yaml

The part *kernels* writes ``plans/kernels.json``. The command above prints, for that file or another one and
any cluster file, the measured and the predicted milliseconds per operator and shapes of its inputs;
it needs no GPU. ``benchmarks/data/h200_kernels.json`` is of the H200 of docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_proof.models import PRECISIONS, Prepared, Single, built_single, singles
from benchmarks.gpu_proof.report import MET, MISSED, SKIPPED, Line, unprepared
from benchmarks.gpu_proof.settings import Settings
from hap.cli.terminal import emit, table
from hap.cluster.cluster_file import load_cluster
from hap.ir.batch import call, each
from hap.ir.graph import Node
from hap.ir.linear_layers import LINEAR, MATMUL, TENSORDOT
from hap.ir.plan import Plan
from hap.ir.program import Compute
from hap.plan_simulation import plan_costs
from hap.runtime.collectives import LocalComm
from hap.runtime.compiled import Runnable
from hap.runtime.context import Context
from hap.runtime.hap_module import HapModule
from hap.runtime.hap_module import emit as emit_rank
from hap.runtime.native_calls import with_native_calls
from hap.synthesizer.rules.rule_table import Row

PART = "kernels"
AIM = 0.06
UPDATE, OTHER = "(update)", "(other)"
MARK = "hap/"


def run(settings: Settings) -> Iterator[Line]:
    """Yield a line per model and precision: the sum of its kernels, predicted and measured."""
    if not settings.on_gpu:
        reason = "this machine has no CUDA device"
        yield Line(part=PART, claim="kernels of operators", outcome=SKIPPED, reason=reason)
        return
    kept: dict[str, dict[str, float]] = {}
    profiled = settings.folder / "profiled.yaml"
    text = f"nodes:\n  - {{name: node, gpus: 1, type: {torch.cuda.get_device_name()}}}\n"
    cluster = load_cluster(profiled if profiled.exists() else text)
    for single in singles(settings.device, settings.models):
        for precision in PRECISIONS:
            name = f"{single.name}-{precision}"
            prepared = Prepared.load(settings.folder, f"single-{name}")
            if prepared is None:
                yield unprepared(PART, name)
                continue
            seconds = kernel_seconds(prepared.plan, single, settings.device)
            kept[name] = by_call(prepared.plan, seconds)
            (settings.folder / "kernels.json").write_text(json.dumps(kept))
            predicted = sum(predicted_seconds(replace(prepared.plan, cluster=cluster)).values())
            measured = sum(kept[name].values())
            error = predicted / measured - 1
            yield Line(
                part=PART, claim=f"{name}: kernels, predicted",
                outcome=MET if abs(error) <= AIM else MISSED, aim=f"<= {AIM:.0%}",
                seen=f"{error:+.1%} of {measured * 1e3:.1f} ms",
            )  # fmt: skip


def kernel_seconds(plan: Plan, single: Single, device: torch.device) -> dict[str, float]:
    """Return the seconds of the kernels of each operator of a step, and of the update."""
    model, batch = built_single(single)
    batch = each(batch, lambda name, t: t.to(device))
    module = HapModule(plan, model, LocalComm(), device)
    emitted = emit_rank(plan, 0, device)
    makers = {o: n.name for n in plan.graph.nodes for o in n.outputs if o}
    forward, backward = (_Marked(code, makers) for code in (emitted.forward, emitted.backward))
    code = Runnable(
        forward=forward, backward=backward, buffers=emitted.buffers,
        gradient_of=emitted.gradient_of, precision=plan.recipe.float32_matmul_precision,
    )  # fmt: skip
    module._code = code
    optimizer = single.optimizer([p for p in module.parameters() if p.requires_grad])
    mine = plan.local_batch(batch, 0)

    def step() -> None:
        optimizer.zero_grad()
        call(module, mine).backward()
        with record_function(f"{MARK}{UPDATE}"):
            optimizer.step()
        torch.cuda.synchronize(device)

    step(), step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    events: Any = seen.key_averages()
    return {
        event.key.removeprefix(MARK): event.device_time_total / 1e6
        for event in events
        if event.key.startswith(MARK) and event.device_type == DeviceType.CPU
    }


class _Marked:
    """A function ``(ctx, args)`` that runs a graph and marks each operator for the profiler."""

    def __init__(self, code: fx.Graph, makers: Mapping[str, str]) -> None:
        with_native_calls(code)
        self._code, self._makers = code, makers

    def __call__(self, ctx: Context, args: list[Any]) -> list[Tensor]:
        given = list(args)
        args.clear()
        return list(_Interpreter(self._code, self._makers).run(ctx, *given))


class _Interpreter(fx.Interpreter):
    def __init__(self, code: fx.Graph, makers: Mapping[str, str]) -> None:
        super().__init__(torch.nn.Module(), graph=code)
        self._makers = makers

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        values = [x.meta["value"].tensor for x in (n, *n.users) if "value" in x.meta]
        name = next((self._makers[v] for v in values if v in self._makers), OTHER)
        with record_function(f"{MARK}{name}"):
            return super().run_node(n)


def predicted_seconds(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of each operator of a plan for one rank, and of the update."""
    cost = plan_costs(plan)
    found = {}
    for step in plan.program.instructions:
        if isinstance(step, Compute):
            node = plan.graph.by_name[step.node]
            found[node.name] = float(cost.compute(node, Row(step.outs, step.ins))[0])
    found[UPDATE] = sum(
        float(cost.update(plan.graph.tensors[i.tensor], plan.program.inputs[i.tensor])[0])
        for i in plan.graph.role("parameter") if i.target in plan.graph.gradients
    )  # fmt: skip
    return found


def by_call(plan: Plan, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the sums over operators with the same name and shapes of inputs, which layers repeat."""
    found: dict[str, float] = {}
    for name, s in seconds.items():
        node = plan.graph.by_name.get(name)
        call = name if node is None else _call(plan, node)
        found[call] = found.get(call, 0.0) + s
    return found


def _call(plan: Plan, node: Node) -> str:
    shapes = [plan.graph.tensors[t].shape for t in node.inputs]
    op = node.op.removeprefix("aten.")
    if node.op in (LINEAR, MATMUL, TENSORDOT):
        op, shapes = product_of(node.op, *shapes)
    return " ".join([op, *("x".join(map(str, s)) or "1" for s in shapes)])


def product_of(
    op: str, x: tuple[int, ...], other: tuple[int, ...], *bias: tuple[int, ...]
) -> tuple[str, list[tuple[int, ...]]]:
    """Return the product of matrices that a linear layer runs, by which kernels were recorded."""
    rows, size = math.prod(x[:-1]), x[-1]
    if op == TENSORDOT:
        return "mm.default", [(size, rows), (rows, other[-1])]
    matrix = other[::-1] if op == LINEAR else other
    return "addmm.default" if bias else "mm.default", [*bias, (rows, size), matrix]


def main() -> None:
    """Print the milliseconds of each call of each model, those with the largest error first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plans", type=Path, help="the folder of the prepared plans")
    parser.add_argument("cluster", help="the figures of the device: a cluster file")
    parser.add_argument("--kernels", type=Path, help="default: kernels.json in the folder")
    parser.add_argument("--top", type=int, default=12, help="calls to print per model")
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    kernels = options.kernels or options.plans / "kernels.json"
    for name, measured in json.loads(kernels.read_text()).items():
        prepared = Prepared.load(options.plans, f"single-{name}")
        if prepared is None:
            parser.error(f"{options.plans} has no plan of {name}; prepare it")
        plan = replace(prepared.plan, cluster=cluster)
        predicted = by_call(plan, predicted_seconds(plan))
        counts = Counter(_call(plan, node) for node in plan.graph.nodes)
        sums = sum(measured.values()) * 1e3, sum(predicted.values()) * 1e3
        emit(f"{name}: {sums[0]:.2f} ms measured, {sums[1]:.2f} ms predicted")
        rows = [
            (call, counts[call] or 1, measured.get(call, 0.0) * 1e3, predicted.get(call, 0.0) * 1e3)
            for call in {**measured, **predicted}
        ]
        rows.sort(key=lambda row: -abs(row[2] - row[3]))
        emit(table(
            ("operator and inputs", "calls", "measured ms", "predicted ms"),
            [(call, str(n), f"{a:.3f}", f"{b:.3f}") for call, n, a, b in rows[: options.top]],
        ))  # fmt: skip


if __name__ == "__main__":
    main()
