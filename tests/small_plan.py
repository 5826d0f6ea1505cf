"""Plans written by hand: linear layers and a sum, with rows split over the ranks."""

from __future__ import annotations

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.graph import Graph, Input, Node, Output, Ref, Tensor
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.placement import P, Placement, R, S
from hap.ir.plan import Plan, Source
from hap.ir.prediction import Alternative, Collective, Prediction, RankPrediction
from hap.ir.program import Compute, Convert, Program

LAYERS = 2


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, shape=shape, dtype="float32")


def node(name: str, op: str, *args: object, module: str = "") -> Node:
    return Node(name=name, op=op, args=args, outputs=(name,), module=module)


def small_graph(rows: int = 8) -> Graph:
    """Return the graph of loss = sum over layers of sum(x @ w); the gradient of w is x.T @ ones."""
    tensors = [tensor("x", rows, 4), tensor("tangent"), tensor("xt", 4, rows)]
    inputs = [Input(tensor="x", role="input", target="0")]
    forward, backward = [], [node("xt", "aten.t.default", Ref("x"))]
    outputs = []
    for k in range(LAYERS):
        w, y, s, g, d = (f"{letter}{k}" for letter in "wysgd")
        tensors += [
            tensor(w, 4, 6), tensor(y, rows, 6), tensor(s), tensor(g, rows, 6), tensor(d, 4, 6)
        ]  # fmt: skip
        inputs.append(Input(tensor=w, role="parameter", target=f"layers.{k}.weight"))
        forward += [
            node(y, "aten.mm.default", Ref("x"), Ref(w), module=f"layers.{k}"),
            node(s, "aten.sum.default", Ref(y), module=f"layers.{k}"),
        ]
        backward += [
            node(g, "aten.expand.default", Ref("tangent"), (rows, 6)),
            node(d, "aten.mm.default", Ref("xt"), Ref(g)),
        ]
        outputs.append(Output(tensor=d, role="gradient", target=f"layers.{k}.weight"))
    tensors.append(tensor("loss"))
    forward.append(node("loss", "aten.add.Tensor", Ref("s0"), Ref("s1")))
    return Graph(
        inputs=(*inputs, Input(tensor="tangent", role="tangent", target="loss")),
        nodes=(*forward, *backward),
        outputs=(Output(tensor="loss", role="loss", target="loss"), *outputs),
        tensors={t.name: t for t in tensors},
    )


def small_program(rows: int = 8) -> Program:
    def compute(name: str, ins: list[Placement], out: Placement, backward: bool) -> Compute:
        return Compute(node=name, ins=tuple(ins), outs=(out,), backward=backward)

    def reduce(name: str, backward: bool) -> Convert:
        return Convert(tensor=name, src=P, dst=R, implementation="one shot", backward=backward)

    steps: list[Compute | Convert] = []
    for k in range(LAYERS):
        steps.append(compute(f"y{k}", [S(0), R], S(0), False))
        steps.append(compute(f"s{k}", [S(0)], P, False))
    steps += [compute("loss", [P, P], P, False), reduce("loss", False)]
    steps.append(compute("xt", [S(0)], S(1), True))
    for k in range(LAYERS):
        steps.append(compute(f"g{k}", [R], S(0), True))
        steps += [compute(f"d{k}", [S(1), S(0)], P, True), reduce(f"d{k}", True)]
    sharded = ["x:0", "xt:1", *(f"{letter}{k}:0" for k in range(LAYERS) for letter in "yg")]
    return Program(
        inputs={"x": S(0), "w0": R, "w1": R, "tangent": R},
        instructions=tuple(steps),
        outputs=(R, R, R),
        axes=dict.fromkeys(sharded, ("batch", rows)),
    )


def device(name: str, kind: str, rate: float, line: int) -> Device:
    return Device(
        name=name,
        kind=kind,
        node=name.partition(":")[0],
        memory_bytes=2**30,
        flops_per_s={"float32": rate},
        memory_bytes_per_s=rate / 10,
        launch_s=1e-5,
        source={"memory_bytes": f"mine.yaml:{line}", "flops_per_s.float32": "catalogue: fitted"},
    )


def small_cluster(fast: int = 2, slow: int = 2) -> Cluster:
    return Cluster(
        name="mine",
        devices=(
            *(device(f"new:{k}", "A100", 1e13, 4) for k in range(fast)),
            *(device(f"old:{k}", "P100", 1e12, 9) for k in range(slow)),
        ),
        intra={"new": Link(1e10, 1e-5, "mine.yaml:5"), "old": Link(5e9, 1e-5, "mine.yaml:10")},
        inter=Link(1e9, 3e-5, "mine.yaml:2"),
    )


def small_plan(
    shares: tuple[int, ...] = (3, 3, 1, 1),
    cluster: Cluster | None = None,
    idle: tuple[int, ...] = (),
    path: str = "model.py",
) -> Plan:
    rows = sum(shares)
    cluster = cluster or small_cluster()
    return Plan(
        source=Source(path=path),
        graph=small_graph(rows),
        cluster=cluster,
        optimizer=OptimizerKind(name="Adam", states=2),
        program=small_program(rows),
        shares={"batch": shares},
        idle=idle,
        prediction=Prediction(
            step_s=0.010,
            communicate_s=0.004,
            hidden_s=0.001,
            ranks=tuple(
                RankPrediction(
                    work=share / rows,
                    stored=1 / len(shares),
                    compute_s=0.007 if share else 0.0,
                    wait_s=0.0 if share else 0.006,
                    peak_bytes=2**20 * (share + 1),
                    memory_bytes=2**30,
                )
                for share in shares
            ),
            collectives=(
                collective("loss", 4, 1e-5),
                collective("d0", 96, 2e-3),
                collective("d1", 96, 2e-3),
            ),
            alternatives=(
                Alternative(name="even data parallel", step_s=0.015, fits=True),
                Alternative(name="without the slowest", step_s=0.009, fits=False),
                Alternative(name="ZeRO", step_s=0.0, fits=False, note="the batch can't be split"),
            ),
        ),
    )


def collective(name: str, nbytes: int, seconds: float) -> Collective:
    return Collective(
        tensor=name,
        kind="all_reduce",
        nbytes=nbytes,
        implementation="one shot",
        seconds=seconds,
        runner_up="tree",
        runner_up_s=2 * seconds,
    )
