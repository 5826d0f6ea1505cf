"""Integer shares: against exhaustive search under the simulator; memory; many devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.axes import Axes, Axis, Shares
from hap.ir.graph import Graph, Input, Node, Output, Ref, Tensor
from hap.ir.placement import P, Placement, R, S
from hap.ir.program import Compute, Convert, Program
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel
from hap.synthesizer.cost.serial_cost import Timeline, simulate
from hap.synthesizer.shares.linearize import exchange_plane, padded_slopes, tangents_of
from hap.synthesizer.shares.share_model import Model as IntegerProgram
from hap.synthesizer.shares.share_solver import ShareResult, alike_axes, proportional, solve_shares
from hap.synthesizer.shares.share_task import Task

STATES = 2
LETTERS = "abcdefghijkl"


def cluster(*speeds: float, memory: tuple[float, ...] = (), launch_s: float = 1e-6) -> Cluster:
    """Return devices of these TFLOP/s, on a node per speed; memory in MB, 1 GB by default."""
    devices = tuple(
        Device(
            name=f"gpu:{k}", kind=f"{speed:g}", node=f"{speed:g}", launch_s=launch_s,
            memory_bytes=int((memory[k] if memory else 1e3) * 1e6),
            flops_per_s={"float32": speed * 1e12}, memory_bytes_per_s=speed * 1e11,
        )
        for k, speed in enumerate(speeds)
    )  # fmt: skip
    inner = {d.node: Link(5e10, 2e-6) for d in devices}
    return Cluster("test", devices, inner, Link(2e10, 5e-6))


class Model:
    """A graph and its program, built line by line."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.inputs: list[Input] = []
        self.placed: dict[str, Placement] = {}
        self.nodes: list[Node] = []
        self.steps: list[Compute | Convert] = []
        self.outputs: list[Output] = []
        self.ends: list[Placement] = []
        self.of: dict[tuple[str, int], str] = {}

    def tensor(self, name: str, axes: str, *shape: int) -> None:
        """Add a tensor; ``axes`` names the axis of each dim by a letter, '.' for none."""
        self.tensors[name] = Tensor(name=name, shape=shape, dtype="float32")
        self.of.update(((name, d), a) for d, a in enumerate(axes) if a != ".")

    def given(self, name: str, role: str, axes: str, shape: tuple[int, ...], p: Placement) -> None:
        self.tensor(name, axes, *shape)
        self.inputs.append(Input(tensor=name, role=role, target=name))
        self.placed[name] = p

    def run(self, op: str, out: str, axes: str, shape: tuple[int, ...], p: Placement,
            *ins: tuple[str, Placement]) -> None:  # fmt: skip
        self.tensor(out, axes, *shape)
        args = tuple(Ref(name) for name, _ in ins)
        self.nodes.append(Node(name=out, op=f"aten.{op}", args=args, outputs=(out,)))
        self.steps.append(
            Compute(node=out, ins=tuple(p for _, p in ins), outs=(p,), backward=False)
        )

    def convert(self, name: str, src: Placement, dst: Placement, how: str) -> None:
        self.steps.append(
            Convert(tensor=name, src=src, dst=dst, implementation=how, backward=False)
        )

    def end(self, role: str, tensor: str, target: str, p: Placement) -> None:
        self.outputs.append(Output(tensor=tensor, role=role, target=target))
        self.ends.append(p)

    def loss(self, last: str, p: Placement) -> None:
        self.run("sum.default", "loss", "", (), P, (last, p))
        self.convert("loss", P, R, "one shot")
        self.end("loss", "loss", "loss", R)

    def build(self, **units: int) -> tuple[Graph, Axes, Program]:
        graph = Graph(inputs=tuple(self.inputs), nodes=tuple(self.nodes),
                      outputs=tuple(self.outputs), tensors=self.tensors)  # fmt: skip
        program = Program(
            inputs=self.placed, instructions=tuple(self.steps), outputs=tuple(self.ends),
            axes={f"{t}:{d}": (a, units[a]) for (t, d), a in self.of.items()},
        )  # fmt: skip
        program.check(graph)
        axes = {a: Axis(name=a, units=u) for a, u in units.items()}
        return graph, Axes(axes=axes, of=self.of), program


Case = tuple[Graph, Axes, Program]


def data_parallel(batch: int = 12, width: int = 256, rows: int = 64) -> Case:
    """``batch`` samples of ``rows`` rows through one product; the gradient is all-reduced."""
    m = Model()
    m.given("x", "input", "b.", (batch * rows, width), S(0))
    m.given("w", "parameter", "..", (width, width), R)
    m.run("mm.default", "y", "b.", (batch * rows, width), S(0), ("x", S(0)), ("w", R))
    m.run("t.default", "xt", ".b", (width, batch * rows), S(1), ("x", S(0)))
    m.run("mm.default", "dw", "..", (width, width), P, ("xt", S(1)), ("y", S(0)))
    m.convert("dw", P, R, "one shot")
    m.loss("y", S(0))
    m.end("gradient", "dw", "w", R)
    return m.build(b=batch)


def with_storage_axes(batch: int = 10, stored: int = 8, width: int = 256, rows: int = 64) -> Case:
    """:func:`data_parallel` with the parameter stored in shards, on an axis of storage alone."""
    m = Model()
    m.given("x", "input", "b.", (batch * rows, width), S(0))
    m.given("w", "parameter", "s.", (width, width), S(0))
    m.convert("w", S(0), R, "padded")
    m.run("mm.default", "y", "b.", (batch * rows, width), S(0), ("x", S(0)), ("w", R))
    m.run("t.default", "xt", ".b", (width, batch * rows), S(1), ("x", S(0)))
    m.run("mm.default", "dw", "s.", (width, width), P, ("xt", S(1)), ("y", S(0)))
    m.convert("dw", P, S(0), "padded")
    m.loss("y", S(0))
    m.end("gradient", "dw", "w", S(0))
    return m.build(b=batch, s=stored)


def experts(count: int = 16, tokens: int = 512, width: int = 256) -> Case:
    """A product per expert; each device stores and trains the experts that it runs."""
    m = Model()
    m.given("x", "input", "e..", (count, tokens, width), S(0))
    m.given("w", "parameter", "e..", (count, width, width), S(0))
    m.run("bmm.default", "y", "e..", (count, tokens, width), S(0), ("x", S(0)), ("w", S(0)))
    m.run("bmm.default", "dw", "e..", (count, width, width), S(0), ("x", S(0)), ("y", S(0)))
    m.loss("y", S(0))
    m.end("gradient", "dw", "w", S(0))
    return m.build(e=count)


def two_axes(batch: int = 12, heads: int = 6, how: str = "padded") -> Case:
    """A product split by the batch, an all-to-all, then a product split by ``heads``."""
    wide = heads * 64
    m = Model()
    m.given("x", "input", "b.", (batch * 64, 256), S(0))
    m.given("v", "parameter", "..", (256, wide), R)
    m.given("w", "parameter", "h.", (wide, 256), S(0))
    m.run("mm.default", "y", "bh", (batch * 64, wide), S(0), ("x", S(0)), ("v", R))
    m.convert("y", S(0), S(1), "exact")
    m.run("mm.default", "z", "b.", (batch * 64, 256), P, ("y", S(1)), ("w", S(0)))
    m.convert("z", P, S(0), how)
    m.run("relu.default", "a", "b.", (batch * 64, 256), S(0), ("z", S(0)))
    m.loss("a", S(0))
    return m.build(b=batch, h=heads)


def layers(depth: int, batch: int = 64) -> Case:
    """Equal layers, each split by a width of its own and gathered at its end."""
    m = Model()
    m.given("x0", "input", "..", (batch, 256), R)
    for k, a in enumerate(LETTERS[:depth]):
        m.given(f"w{k}", "parameter", f".{a}", (256, 256), S(1))
        m.run("mm.default", f"y{k}", f".{a}", (batch, 256), S(1), (f"x{k}", R), (f"w{k}", S(1)))
        m.convert(f"y{k}", S(1), R, "padded")
        m.run("relu.default", f"x{k + 1}", "..", (batch, 256), R, (f"y{k}", R))
    m.run("sum.default", "loss", "", (), R, (f"x{depth}", R))
    m.end("loss", "loss", "loss", R)
    return m.build(**dict.fromkeys(LETTERS[:depth], 256))


def gathered(how: str, units: int = 12) -> Case:
    """A product split by columns, whose result is gathered."""
    wide = 64 * units
    m = Model()
    m.given("x", "input", "..", (512, 256), R)
    m.given("w", "parameter", ".c", (256, wide), S(1))
    m.run("mm.default", "y", ".c", (512, wide), S(1), ("x", R), ("w", S(1)))
    m.convert("y", S(1), R, how)
    m.run("sum.default", "loss", "", (), R, ("y", R))
    m.end("loss", "loss", "loss", R)
    return m.build(c=units)


def timeline(case: Case, hardware: HardwareModel, shares: Shares) -> Timeline:
    graph, axes, program = case
    return simulate(graph, program, CostModel(graph, axes, hardware, shares, STATES))


def shares_of(case: Case, weights: np.ndarray) -> dict[str, tuple[int, ...]]:
    return {a.name: proportional(a.units, weights) for a in case[1].axes.values()}


def solve(case: Case, hardware: HardwareModel, start: Shares | None = None) -> ShareResult:
    graph, axes, program = case
    start = start or shares_of(case, np.ones(hardware.cluster.world_size))
    outcome = solve_shares(graph, axes, program, hardware, STATES, start)
    for axis in axes.axes.values():
        assert sum(outcome.shares[axis.name]) == axis.units
    assert outcome.step_s == timeline(case, hardware, outcome.shares).step_s
    return outcome


def compositions(units: int, ranks: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(units + ranks - 1), ranks - 1):
        ends = (-1, *cuts, units + ranks - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(ends))


def brute_force(case: Case, hardware: HardwareModel) -> float:
    """Return the fastest step over all integer shares of all axes that fit the memory."""
    names = list(case[1].axes)
    room = np.array([d.memory_bytes for d in hardware.cluster.devices])
    ways = [compositions(case[1].axes[n].units, len(room)) for n in names]
    best = np.inf
    for split in itertools.product(*ways):
        line = timeline(case, hardware, dict(zip(names, split, strict=True)))
        if (line.peak_bytes <= room).all():
            best = min(best, line.step_s)
    return best


# --- proportional ---


def test_proportional_gives_the_largest_remainders_the_rest() -> None:
    assert proportional(16, np.array([1.8, 1.8, 1, 1, 1, 1, 1, 1])) == (3, 3, 2, 2, 2, 2, 1, 1)
    assert proportional(2, np.ones(3)) == (1, 1, 0)
    assert proportional(3, np.array([1000.0, 1.0])) == (3, 0)
    assert proportional(7, np.array([0.0, 1.0])) == (0, 7)


def test_proportional_always_sums_to_the_units() -> None:
    random = np.random.default_rng(0)
    for units in range(40):
        weights = random.random(1 + units % 7) + 1e-3
        shares = proportional(units, weights)
        assert sum(shares) == units
        assert (np.abs(np.array(shares) - units * weights / weights.sum()) < 1).all()


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [1.0, np.nan]])
def test_proportional_refuses_weights_without_meaning(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        proportional(4, np.array(weights))


# --- the optimum ---

SPEEDS = [(3, 1), (1, 1), (5, 2, 2), (4, 2, 1), (9, 0.1)]


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("launch_s", [0.0, 1e-6, 3e-5])
@pytest.mark.parametrize("make", [data_parallel, lambda: experts(12)])
def test_one_axis_is_solved_as_by_brute_force(make, speeds, launch_s) -> None:
    case, hardware = make(), HardwareModel(cluster(*speeds, launch_s=launch_s))
    outcome = solve(case, hardware)
    assert outcome.fits
    assert outcome.step_s == pytest.approx(brute_force(case, hardware), rel=2e-5)


@pytest.mark.parametrize("how", ["padded", "grouped"])
@pytest.mark.parametrize("speeds", [(3, 1), (1, 1), (2, 2, 1)])
def test_two_axes_joined_by_an_all_to_all_come_near_brute_force(speeds, how) -> None:
    """An all-to-all is not convex in the shares, so the result may miss the optimum."""
    case, hardware = two_axes(8, 6, how), HardwareModel(cluster(*speeds))
    best = brute_force(case, hardware)
    assert best <= solve(case, hardware).step_s <= 1.03 * best


@pytest.mark.parametrize("speeds", [(2, 2, 1), (2, 2, 1, 1), (9, 9, 1, 1)])
def test_gathers_in_stages_come_near_brute_force(speeds) -> None:
    """A node per speed, with two devices and one, or with two each."""
    case, hardware = gathered("hierarchical"), HardwareModel(cluster(*speeds))
    best = brute_force(case, hardware)
    even = timeline(case, hardware, shares_of(case, np.ones(len(speeds)))).step_s
    found = solve(case, hardware).step_s
    assert best <= found <= 1.02 * best
    assert found < even, "the shares matter here"


def relaxed_roundings(case: Case, hardware: HardwareModel) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield all ways of rounding the relaxed optimum's units per type up or down."""
    graph, axes, program = case
    start = shares_of(case, np.ones(hardware.cluster.world_size))
    task = Task(
        graph=graph, axes=axes, program=program, hardware=hardware, optimizer_states=STATES,
        start=start, types=hardware.cluster.types(), groups=alike_axes(graph, program),
    )  # fmt: skip
    splits = task.first_splits()
    model = IntegerProgram(
        task=task, tangents=tangents_of(task, splits), padded=padded_slopes(task),
        exchange=[exchange_plane(task, s) for s in splits], scale=1e4 / task.simulated(start).step_s,
    )  # fmt: skip
    totals = model.totals(relaxed=True)
    assert totals is not None
    ways = []
    for units, of_types in zip(task.units, totals, strict=True):
        whole = [{math.floor(n + 1e-9), math.ceil(n - 1e-9)} for n in of_types]
        ways.append([w for w in itertools.product(*whole) if sum(w) == units and min(w) >= 0])
    for picked in itertools.product(*ways):
        split = []
        for units, of_types in zip(task.units, picked, strict=True):
            each = np.zeros(hardware.cluster.world_size, dtype=int)
            for total, ranks in zip(of_types, task.types, strict=True):
                each[list(ranks)] = proportional(total, np.ones(len(ranks)))
            assert each.sum() == units
            split.append(tuple(each.tolist()))
        yield dict(task.shares(tuple(split)))


@pytest.mark.parametrize("seed", range(40))
def test_never_worse_than_any_rounding_of_the_relaxed_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    make = (data_parallel, experts, layers)[seed % 3]
    case = make(int(random.integers(2, 4))) if make is layers else make(int(random.integers(7, 40)))
    speeds = np.round(random.uniform(0.3, 4, int(random.integers(2, 4))), 2)
    on = cluster(
        *np.repeat(speeds, random.integers(1, 3, len(speeds))).tolist(),
        launch_s=float(random.choice([0.0, 1e-6, 3e-5])),
    )
    hardware = HardwareModel(on)
    found = solve(case, hardware).step_s
    roundings = [timeline(case, hardware, s).step_s for s in relaxed_roundings(case, hardware)]
    assert roundings
    assert found <= min(roundings) * (1 + 2e-5)


@pytest.mark.parametrize("speeds", [*SPEEDS, (1.8, 1.8, 1, 1, 1, 1, 1, 1)])
@pytest.mark.parametrize("make", [data_parallel, experts, two_axes, lambda: layers(3)])
def test_never_slower_than_where_it_starts(make, speeds) -> None:
    case, hardware = make(), HardwareModel(cluster(*speeds))
    for weights in hardware.speed, np.ones(len(speeds)):
        start = shares_of(case, weights)
        assert solve(case, hardware, start).step_s <= timeline(case, hardware, start).step_s


def test_rounding_decides_sixteen_experts() -> None:
    """At speeds 1.8 : 1, two fast and six slow devices gain nothing; four and four do."""
    case = experts(16)
    for fast, gains in ((2, False), (4, True)):
        hardware = HardwareModel(cluster(*[1.8] * fast, *[1.0] * (8 - fast)))
        even = timeline(case, hardware, shares_of(case, np.ones(8))).step_s
        best = min(
            timeline(case, hardware, {"e": (f,) * fast + proportional(16 - f * fast, np.ones(8 - fast))}).step_s
            for f in range(16 // fast + 1)
        )  # fmt: skip
        found = solve(case, hardware).step_s
        assert found == pytest.approx(best, rel=2e-5)
        assert (found < 0.9 * even) is gains


def test_a_device_a_thousand_times_slower_gets_nothing() -> None:
    assert solve(data_parallel(), HardwareModel(cluster(1, 1, 0.001))).shares["b"] == (6, 6, 0)


# --- memory ---


def test_a_device_with_little_memory_gets_less() -> None:
    case = experts(12)
    free = HardwareModel(cluster(2, 1))
    peak = timeline(case, free, solve(case, free).shares).peak_bytes / 1e6
    tight = HardwareModel(cluster(2, 1, memory=(0.7 * peak[0], 1e3)))
    outcome = solve(case, tight, shares_of(case, tight.speed))
    assert outcome.fits
    assert outcome.shares["e"][0] < solve(case, free).shares["e"][0]
    assert outcome.step_s == pytest.approx(brute_force(case, tight), rel=2e-5)


@pytest.mark.parametrize("speeds", [(2, 1), (1, 1), (3, 3, 1)])
@pytest.mark.parametrize("less", [1.0, 0.95, 0.9, 0.85])
def test_computing_and_storing_are_balanced_together(speeds, less) -> None:
    """Compare with all pairs of splits, as the first device's memory shrinks."""
    case, free = with_storage_axes(), HardwareModel(cluster(*speeds))
    peak = timeline(case, free, solve(case, free).shares).peak_bytes / 1e6
    tight = HardwareModel(cluster(*speeds, memory=(less * peak[0], *[1e3] * (len(speeds) - 1))))
    best = brute_force(case, tight)
    outcome = solve(case, tight)
    assert outcome.fits == np.isfinite(best)
    if np.isfinite(best):
        assert best <= outcome.step_s <= best * (1 + 2e-5)


def test_infeasible_shares_lack_the_fewest_bytes() -> None:
    case = data_parallel(width=512)  # the replicated parameter and its states take 3 MB
    outcome = solve(case, HardwareModel(cluster(2, 1, 1, memory=(1e3, 1, 1))))
    assert not outcome.fits
    assert outcome.shares["b"] == (12, 0, 0)


# --- many layers, many devices, no axes ---


def test_layers_alike_share_one_vector() -> None:
    graph, _, program = layers(12)
    groups = alike_axes(graph, program)
    assert groups == (tuple(LETTERS[:12]),)
    shares = solve(layers(12), HardwareModel(cluster(2, 1))).shares
    assert len(set(shares.values())) == 1


def test_axes_of_unlike_layers_are_kept_apart() -> None:
    graph, _, program = two_axes()
    assert alike_axes(graph, program) == (("b",), ("h",))


def test_more_devices_of_each_type_get_the_same_shares() -> None:
    few = solve(data_parallel(64, 512, 256), HardwareModel(cluster(*[3] * 4, *[1] * 4))).shares["b"]
    many = solve(data_parallel(512, 512, 256), HardwareModel(cluster(*[3] * 32, *[1] * 32))).shares[
        "b"
    ]
    assert few == (12,) * 4 + (4,) * 4
    assert many == (12,) * 32 + (4,) * 32


def test_three_types_of_sixty_four_devices() -> None:
    case = data_parallel(512, 128)
    hardware = HardwareModel(cluster(*[4] * 16, *[2] * 32, *[1] * 16))
    outcome = solve(case, hardware)
    best = min(
        timeline(case, hardware, {"b": (a,) * 16 + (b,) * 32 + proportional(rest, np.ones(16))}).step_s
        for a in range(33) for b in range(17) if (rest := 512 - 16 * a - 32 * b) >= 0
    )  # fmt: skip
    assert outcome.step_s <= best * (1 + 2e-5)


def test_a_program_without_axes_returns_the_start() -> None:
    graph, axes, program = data_parallel()
    whole = replace(
        program,
        inputs={"x": R, "w": R},
        instructions=tuple(
            replace(i, ins=(R,) * len(i.ins), outs=(R,))
            for i in program.instructions
            if isinstance(i, Compute)
        ),
        axes={},
    )
    start = {"b": (7, 5)}
    outcome = solve((graph, axes, whole), HardwareModel(cluster(3, 1)), start)
    assert outcome.fits
    assert outcome.shares == start


def test_unused_axes_keep_their_shares() -> None:
    graph, axes, program = data_parallel()
    more = Axes(axes={**axes.axes, "other": Axis(name="other", units=5)}, of=axes.of)
    start = {"b": (6, 6), "other": (1, 4)}
    assert solve((graph, more, program), HardwareModel(cluster(3, 1)), start).shares["other"] == (
        1,
        4,
    )


def test_the_same_question_has_the_same_answer() -> None:
    hardware = HardwareModel(cluster(4, 2, 2, 1))
    first, again = (solve(two_axes(), hardware) for _ in range(2))
    assert (first.shares, first.step_s) == (again.shares, again.step_s)
