"""Random valid plans: any row of any node, any implementation of any conversion, any shares.

The search itself makes them: under random prices, the cheapest program is a random one. Shares
include zeros and primes, so ranks without a share and odd cuts are common.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hap.capture.tracing import capture
from hap.cluster.device import Device
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.ir.axes import Shares
from hap.ir.batch import call, each
from hap.ir.graph import Graph, Node, Tensor
from hap.ir.optimizer_kind import OptimizerKind
from hap.ir.placement import Placement
from hap.ir.plan import Plan, Source
from hap.ir.prediction import Prediction
from hap.ir.program import Convert, Program
from hap.runtime.one_device import widest
from hap.runtime.verify import Verdict, verify
from hap.synthesizer.cost.collective_cost import Quote
from hap.synthesizer.cost.cost_model import CostModel
from hap.synthesizer.cost.hardware_model import HardwareModel, PerRank
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.cost.serial_cost import choose_implementations, simulate
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.schedule.list_scheduler import Orders
from hap.synthesizer.search.cost_tables import Problem
from hap.synthesizer.search.program_space import Space, build_space
from hap.synthesizer.shares.storage_sharding import with_storage_axes

WEIGHTS = (0, 0, 1, 2, 3, 5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its batch, loss and optimizer, and the program space of its captured graph.

    ``captured``: returns the space; called once, if it is needed: ranks in processes only train.
    """

    model: torch.nn.Module
    batch: Any
    loss: Any
    optimizer: Any
    captured: Callable[[], Space]

    @cached_property
    def space(self) -> Space:
        with torch.random.fork_rng():
            return self.captured()

    def within(self, space: Space) -> Case:
        """Return the case with another space."""
        return replace(self, captured=lambda: space)

    @property
    def graph(self) -> Graph:
        return self.space.graph

    def loss_of(self, model: torch.nn.Module, batch: Any = None) -> torch.Tensor:
        """Return the loss of a whole model on one device."""
        batch = self.batch if batch is None else batch
        output = call(model, batch)
        if self.loss is not None:
            output = self.loss(output, batch)
        return output if isinstance(output, torch.Tensor) else output.loss


def widened(batch: Any) -> Any:
    """Return the batch with its floats in float64."""
    return each(batch, lambda name, t: t.to(widest(t.dtype)))


def make_case(
    model: torch.nn.Module, batch: Any, loss: Any = None, optimizer: Any = None,
    graph: Graph | None = None,
) -> Case:  # fmt: skip
    """Return a case; ``graph`` replaces the capture."""
    space = build_space(graph or capture(model, batch, loss))
    optimizer = optimizer or adamw
    return Case(model=model, batch=batch, loss=loss, optimizer=optimizer, captured=lambda: space)


@cache
def benchmark_case(file: str, variant: str) -> Case:
    """Return a variant of a model of ``benchmarks/models``, captured at most once in a run of tests."""
    module = import_module(f"benchmarks.models.{file}")
    torch.manual_seed(0)
    model, batch = getattr(module, variant)(), getattr(module, f"{variant}_batch")()
    loss = getattr(module, "loss", None)
    return Case(
        model=model, batch=batch, loss=loss, optimizer=getattr(module, "optimizer", adamw),
        captured=lambda: build_space(
            _kept(f"{file}-{variant}", lambda: capture(model, batch, loss))
        ),
    )  # fmt: skip


def _kept(name: str, make: Callable[[], Graph]) -> Graph:
    """Return a graph that a process of this run of tests has made, or make it."""
    folder = os.environ.get("HAP_TESTS_GRAPHS")
    if folder is None:
        return make()
    file = Path(folder) / f"{name}.json"
    if file.exists():
        return Graph.from_json(json.loads(file.read_text()))
    graph = make()
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(graph.to_json()))
    new.rename(file)
    return graph


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def two_machines(world: int) -> Cluster:
    """Return ``world`` equal devices: two on the first machine, the others on the second."""
    devices = tuple(
        Device(
            name=f"node:{k}", kind="cpu", node="ab"[k > 1], memory_bytes=2**30, launch_s=1e-6,
            flops_per_s={"float32": 1e10}, memory_bytes_per_s=1e9,
        )
        for k in range(world)
    )  # fmt: skip
    link = Link(1e9, 1e-5)
    return Cluster("two", devices, {"a": link, "b": link}, link)


def random_shares(units: int, world: int, rng: random.Random, least: int = 0) -> tuple[int, ...]:
    """Draw integer units per rank, one by one in proportion to random weights.

    Every rank gets ``least`` units, or ``units // world`` if that is less.
    """
    least = min(least, units // world)
    weights = [rng.choice(WEIGHTS) for _ in range(world)]
    if not any(weights):
        weights[rng.randrange(world)] = 1
    taken = rng.choices(range(world), weights, k=units - least * world)
    return tuple(least + taken.count(rank) for rank in range(world))


class RandomPrices(Prices):
    """Prices in seconds that depend on the random generator alone."""

    def __init__(
        self, space: Space, cluster: Cluster, shares: dict[str, tuple[int, ...]], rng: random.Random
    ) -> None:
        self._real = CostModel(space.graph, space.axes, HardwareModel(cluster), shares, 2)
        super().__init__(space.graph, self._real.hardware, self._real.parts, 2)
        self._rng, self._world = rng, cluster.world_size

    def compute(self, node: Node, row: Row) -> PerRank:
        return np.full(self._world, self._rng.random())

    def update(self, parameter: Tensor, stored: Placement) -> PerRank:
        return np.full(self._world, self._rng.random())

    def convert(
        self, tensor: Tensor, src: Placement, dst: Placement, **options: Any
    ) -> list[Quote]:
        choices = self._real.convert(tensor, src, dst, **options)
        self._rng.shuffle(choices)
        return [Quote(c.implementation, self._rng.random() * 0.1) for c in choices]

    def convert_group(self, group: Sequence[Convert]) -> list[Quote]:
        return self._real.convert_group(group)


def random_plan(
    case: Case, world: int, seed: int, least: int = 0, cluster: Cluster | None = None
) -> Plan:
    """Return a random valid plan; equal arguments give equal plans.

    Args:
        least: units of every axis that each rank gets at least, as far as they suffice.
        cluster: default: :func:`two_machines`.
    """
    cluster = cluster or two_machines(world)
    rng = random.Random(f"{world}/{seed}")
    program, used = random_program(case.space, cluster, rng, least)
    program = random_order(case.space, program, used, cluster, rng)
    return Plan(
        source=Source(),
        graph=case.graph,
        cluster=cluster,
        optimizer=OptimizerKind(name="AdamW", states=2),
        program=program,
        shares=used,
        idle=tuple(r for r in range(world) if used and not any(s[r] for s in used.values())),
        prediction=Prediction(
            step_s=0.0, communicate_s=0.0, hidden_s=0.0, ranks=(), collectives=(), alternatives=()
        ),
    )


def random_program(
    space: Space, cluster: Cluster, rng: random.Random, least: int = 0
) -> tuple[Program, dict[str, tuple[int, ...]]]:
    """Return a random valid program of a space, and random shares of the axes that it uses."""
    world = cluster.world_size
    shares = {
        name: random_shares(axis.units, world, rng, least) for name, axis in space.axes.axes.items()
    }
    # Inputs are drawn separately: no price would ask for a sharded one.
    drawn = (*space.graph.role("input"), *space.graph.role("received"))
    given = {i.tensor: rng.choice(space.sources[i.tensor]) for i in drawn}
    prices = RandomPrices(space, cluster, shares, rng)
    problem = Problem(space, prices, lambda t, p, stored: not stored or given.get(t, p) == p)
    labelling = problem.solve()
    assert labelling is not None
    program = with_storage_axes(space.graph, problem.program(labelling))
    for name, units in program.used_axes().items():
        if name not in shares:  # axes of storage
            shares[name] = random_shares(units, world, rng, least)
    return program, {name: shares[name] for name in program.used_axes()}


def random_order(
    space: Space, program: Program, shares: Shares, cluster: Cluster, rng: random.Random
) -> Program:
    """Return the program in one of the orders of the list scheduler."""
    cost = CostModel(space.graph, program.own_axes(), HardwareModel(cluster), shares, 2)
    program = choose_implementations(space.graph, program, cost) if rng.random() < 0.5 else program
    found = Orders(space.graph, simulate(space.graph, program, cost), cost)
    return rng.choice(list(found.all())).made()


def verdict(case: Case, plan: Plan, **options: Any) -> Verdict:
    """Verify the plan's program against the case's module on one device."""
    return verify(plan, case.model, case.batch, case.loss, case.optimizer, **options)
