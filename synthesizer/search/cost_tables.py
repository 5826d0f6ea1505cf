"""The choice of a program as a labelling problem: its variables and cost tables.

Variables (all costs in integer picoseconds):

* each node: its row (unary: its computing time);
* each tensor: its holding (:data:`hap.synthesizer.search.program_space.Holding`);
* each parameter: the placement in which it is stored, which its gradient shares, so that the
  optimizer updates the stored shards (unary: the update's time); the batch: whether a
  rank reads all of it or its rows.

Pairs: producer-tensor, the cheapest conversions from the placement that the row makes to the
holding; tensor-consumer, 0 if the holding gives the placement that the row needs. Elimination
(:mod:`hap.synthesizer.search.bucket_elimination`) minimises the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hap.ir.graph import Node, Tensor
from hap.ir.mesh import step_ends
from hap.ir.placement import P, Placement, R, convertible
from hap.ir.program import Convert, Program
from hap.ir.regather import backward_alias_of
from hap.synthesizer.cost.hardware_model import PerRank
from hap.synthesizer.cost.prices import Prices
from hap.synthesizer.rules.rule_table import Row
from hap.synthesizer.search.bucket_elimination import FORBIDDEN, Costs, Labelling, minimise
from hap.synthesizer.search.lowering import Choices, write_program
from hap.synthesizer.search.program_space import Holding, Space, final_placements
from hap.synthesizer.search.search_result import Engine, SearchResult

PICOSECONDS = 1e12

Allowed = Callable[[str, Placement, bool], bool]
"""(tensor, placement, stored) -> whether the program may hold, or store, the tensor so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The data that nodes of one kind share: times per row, and placements per operand.

    ``needs`` and ``makes`` hold each column of placements with its number.
    """

    seconds: list[PerRank]
    times: Costs
    needs: list[tuple[tuple[Placement, ...], int]]
    makes: list[tuple[tuple[Placement, ...], int]]


class Problem:
    """The tables of one search.

    Args:
        time: the price of a vector of seconds over ranks.

    ``memory_s_per_byte``: price of each rank's stored parameters and saved activations.
    """

    def __init__(
        self, space: Space, cost: Prices, allowed: Allowed | None = None,
        time: Callable[[PerRank], float] = np.max,
    ) -> None:  # fmt: skip
        self.space, self.cost, self._time = space, cost, time
        self.memory_s_per_byte: PerRank | None = None
        self._restricted = allowed is not None
        self._allowed = allowed or (lambda tensor, placement, stored: True)
        self.unary: list[Costs] = []
        self.pairs: dict[tuple[int, int], Costs] = {}
        self._tables: dict[object, Costs] = {}
        self._numbers: dict[object, int] = {}
        self._kinds: dict[object, _Kind] = {}
        self._lie = {axis: cost.parts.axis_key(axis) for axis in space.axes.axes}
        graph = space.graph
        # Parameters are gathered together at the start, gradients reduced together at the end.
        # In microbatches their terms are converted, not the sums.
        self._gradients = frozenset(graph.gradients.values()) | space.terms
        self._fused = step_ends(graph)
        twins = backward_alias_of(graph)
        self._twins = frozenset(graph.producer[twin].name for twin in twins.values())
        self.held: dict[str, tuple[Holding, ...]] = {}
        self._held: dict[str, int] = {}
        self._variable: dict[str, int] = {}
        for name in graph.tensors:
            self.held[name] = self._filter(name)
            self._held[name] = self._number(self.held[name])
            self._variable[name] = self._add([0.0] * len(self.held[name]))
        self._kind_of: dict[str, _Kind] = {}
        self.rows: dict[str, tuple[Row, ...]] = {}
        self._node: dict[str, int] = {}
        for node in graph.nodes:
            self._add_node(node)
        self.stored: dict[str, tuple[Placement, ...]] = {}
        self._stored: dict[str, int] = {}
        self._add_batch()
        for i in graph.inputs:
            if i.role != "input":
                self._add_input(i.tensor, i.role, i.target)
        for parameter, twin in twins.items():
            self._add_backward_alias(parameter, graph.producer[twin])
        for o in graph.outputs:
            if o.role != "gradient":
                ends = final_placements(self.space, o)
                self._require(self._add([0] * len(ends)), o.tensor, ends)

    def priced(self, memory_s_per_byte: PerRank | None) -> Problem:
        """Return the same problem, whose bytes have no price, with a price of memory."""
        if memory_s_per_byte is None:
            return self
        found = copy.copy(self)
        found.memory_s_per_byte = memory_s_per_byte
        found.unary, found.pairs, found._tables = [*self.unary], dict(self.pairs), {}
        found._add_memory(memory_s_per_byte)
        return found

    def solve(self) -> Labelling | None:
        """Return the optimal labelling, or ``None`` if the placements admit no program."""
        return minimise(self.unary, self.pairs)

    def outcome(self, engine: Engine) -> SearchResult:
        """Return an engine's result, which may be suboptimal or without a labelling."""
        return engine(self.unary, self.pairs)

    def timed(self) -> Iterator[tuple[int, list[PerRank]]]:
        """Yield the variables with labels that take time, with seconds per rank of each label."""
        for node in self.space.graph.nodes:
            yield self._node[node.name], self._kind_of[node.name].seconds
        for i in self.space.graph.role("parameter"):
            if i.target in self.space.graph.gradients:
                t = self.space.graph.tensors[i.tensor]
                yield (
                    self._stored[i.tensor],
                    [self.cost.update(t, p) for p in self.stored[i.tensor]],
                )

    # --- tables ---

    def _filter(self, name: str) -> tuple[Holding, ...]:
        holdings = self.space.holdings[name]
        if not self._restricted:
            return holdings
        # If partial placements are forbidden, a tensor with only these is held replicated.
        for some in (holdings, ((R,),)):
            if kept := tuple(h for h in some if all(self._allowed(name, p, False) for p in h)):
                return kept
        return ()

    def _add(self, costs: Iterable[float]) -> int:
        self.unary.append(_costs(costs))
        return len(self.unary) - 1

    def _pair(self, u: int, v: int, table: Costs) -> None:
        key, table = ((u, v), table) if u < v else ((v, u), table.T)
        self.pairs[key] = self.pairs[key] + table if key in self.pairs else table

    def _add_node(self, node: Node) -> None:
        rows = self.space.rows[node.name]
        if self._restricted:
            rows = tuple(r for r in rows if self._row_allowed(node, r))
        self.rows[node.name] = rows
        number, axes = self.space.node_kinds[node.name]
        lie = tuple(self._lie[axis] for axis in axes)
        key = number, lie, self.cost.parts.node_key(node), self._restricted and rows
        if key not in self._kinds:
            self._kinds[key] = self._kind(node, rows)
        kind = self._kind_of[node.name] = self._kinds[key]
        self.unary.append(kind.times)
        v = self._node[node.name] = len(self.unary) - 1
        for name, (needs, number) in zip(node.inputs, kind.needs, strict=True):
            self._require(v, name, needs, number)
        for out, (makes, number) in zip(node.outputs, kind.makes, strict=True):
            if out is not None:
                self._produce(v, out, makes, number)

    def _kind(self, node: Node, rows: tuple[Row, ...]) -> _Kind:
        seconds = [self.cost.compute(node, row) for row in rows]
        needs = [tuple(row.ins[k] for row in rows) for k in range(len(node.inputs))]
        makes = [tuple(row.outs[k] or R for row in rows) for k in range(len(node.outputs))]
        return _Kind(
            seconds=seconds,
            times=_costs(self._time(s) for s in seconds),
            needs=[(column, self._number(column)) for column in needs],
            makes=[(column, self._number(column)) for column in makes],
        )

    def _number(self, key: object) -> int:
        """Return the number of a key; equal keys have equal numbers, which are compared faster."""
        return self._numbers.setdefault(key, len(self._numbers))

    def _row_allowed(self, node: Node, row: Row) -> bool:
        stored = node.name in self._twins  # it may read the stored value in any placement
        placed = zip((*node.inputs, *node.outputs), (*row.ins, *row.outs), strict=True)
        return all(self._allowed(n, p, stored) for n, p in placed if n and p and p.sharded)

    def _add_batch(self) -> None:
        """Add one variable for the whole batch: each rank reads all of it, or its rows."""
        names = [i.tensor for i in self.space.graph.role("input")]
        rows = [self.space.sources[name][-1] for name in names]
        split = [(n, p) for n, p in zip(names, rows, strict=True) if p != R]
        whole_allowed = all(self._allowed(n, R, True) for n, _ in split)
        rows_allowed = not whole_allowed or all(self._allowed(n, p, True) for n, p in split)
        # Ties go to the first label: rows, unless reading all of the batch saves time.
        options = [rows] * rows_allowed + [[R] * len(names)] * whole_allowed
        v = self._add([0.0] * len(options))
        for name, placements in zip(names, zip(*options, strict=True), strict=True):
            self._stored[name] = v
            self.stored[name] = placements
            self._produce(v, name, placements)

    def _add_input(self, tensor: str, role: str, target: str) -> None:
        graph = self.space.graph
        options = tuple(p for p in self.space.sources[tensor] if self._allowed(tensor, p, True))
        gradient = graph.gradients.get(target) if role == "parameter" else None
        costs = [self._store_cost(tensor, p, gradient is not None) for p in options]
        v = self._stored[tensor] = self._add(costs)
        self.stored[tensor] = options
        self._produce(v, tensor, options)
        if gradient is not None:
            self._require(v, gradient, options)

    def _add_backward_alias(self, parameter: str, alias: Node) -> None:
        """Price the backward's gather of a parameter that the forward has gathered."""
        v = self._node[alias.name]
        t, rows = self.space.graph.tensors[parameter], self.rows[alias.name]
        # The forward's gather is then not among those at the start of the program.
        self._pair(self._variable[parameter], v, np.array([
            [_scaled(self._start_s(t, row.ins[0]) if R in holding else 0.0) for row in rows]
            for holding in self.held[parameter]
        ], dtype=np.int64))  # fmt: skip

    def _start_s(self, t: Tensor, p: Placement) -> float:
        """Return the start of a gather without neighbours."""
        if not p.sharded:
            return 0.0
        alone, fused = (self.cost.convert(t, p, R, fused=f)[0].seconds for f in (False, True))
        return alone - fused

    def _add_memory(self, price: PerRank) -> None:
        """Add the price of memory to the tables that it changes."""
        graph = self.space.graph

        def seconds(name: str, p: Placement) -> float:
            part = self.space.at_once.get(name, 1.0)
            return part * float(price @ self.cost.local_bytes(graph.tensors[name], p))

        for name in graph.saved:
            key = self._held[name], self._alike(name)
            if key not in self._tables:
                holdings = self.held[name]
                self._tables[key] = _costs(sum(seconds(name, p) for p in h) for h in holdings)
            self.unary[self._variable[name]] = self._tables[key]
        for parameter, twin in backward_alias_of(graph).items():
            node = graph.producer[twin]  # reads the forward's replica, or gathers again
            read = [row.ins[0] for row in self.rows[node.name]]
            kept = [(p, seconds(parameter, p)) for p in read]
            self._pair(self._stored[parameter], self._node[node.name], np.array([
                [_scaled(0.0 if p == own else s) for p, s in kept] for own in self.stored[parameter]
            ], dtype=np.int64))  # fmt: skip
        for i in graph.role("parameter"):
            options, gradient = self.stored[i.tensor], graph.gradients.get(i.target)
            v, trained = self._stored[i.tensor], gradient is not None
            self.unary[v] = _costs(self._store_cost(i.tensor, p, trained) for p in options)
            if gradient is None:
                continue
            # A gradient that is reduced whole and then sliced takes the memory of the whole.
            of, t = self._variable[gradient], graph.tensors[gradient]
            more = [float(price @ (t.nbytes - self.cost.local_bytes(t, p))) for p in options]
            self._pair(v, of, np.array([
                [_scaled(0.0 if p in holding else s) for holding in self.held[gradient]]
                for p, s in zip(options, more, strict=True)
            ], dtype=np.int64))  # fmt: skip
            producer = graph.producer[gradient]
            makes, number = self._kind_of[producer.name].makes[producer.outputs.index(gradient)]
            del self.pairs[of, self._node[producer.name]]
            self._produce(self._node[producer.name], gradient, makes, number)

    def _store_cost(self, tensor: str, p: Placement, trained: bool) -> float:
        t = self.space.graph.tensors[tensor]
        seconds = float(self._time(self.cost.update(t, p))) if trained else 0.0
        price = self.memory_s_per_byte
        if price is not None:
            seconds += float(price @ self.cost.stored_bytes(t, p, trained=trained))
        return seconds

    def _require(
        self, v: int, tensor: str, needs: Sequence[Placement], number: int | None = None
    ) -> None:
        """Let ``v`` require ``tensor`` in its label's placement; ``number``: that of ``needs``."""
        number = self._number(tuple(needs)) if number is None else number
        key = self._held[tensor], number
        if key not in self._tables:
            table = [[_given(h, need) for h in self.held[tensor]] for need in needs]
            self._tables[key] = np.array(table, dtype=np.int64)
        self._pair(v, self._variable[tensor], self._tables[key])

    def _produce(
        self, v: int, tensor: str, makes: Sequence[Placement], number: int | None = None
    ) -> None:
        """Let variable ``v`` make ``tensor`` in the placement of its label."""
        number = self._number(tuple(makes)) if number is None else number
        key = self._held[tensor], number, self._alike(tensor)
        if key not in self._tables:
            held = self.held[tensor]
            table = [[_scaled(self.conversions(tensor, p, h)[0]) for h in held] for p in makes]
            self._tables[key] = np.array(table, dtype=np.int64)
        self._pair(v, self._variable[tensor], self._tables[key])

    def _alike(self, tensor: str) -> object:
        """Return the key of the prices of a tensor's conversions; layers repeat it."""
        fused = tensor in self._fused, tensor in self._gradients
        number, axes = self.space.tensor_kinds[tensor]
        key = self.cost.parts.tensor_key(tensor)
        return number, tuple(self._lie[axis] for axis in axes), fused, key

    def conversions(
        self, tensor: str, made: Placement, holding: Holding
    ) -> tuple[float, tuple[Convert, ...]]:
        """Return the cheapest conversions from ``made`` to all of ``holding``, with seconds."""
        if self.at_once(tensor, made, holding):
            return self._cheapest(tensor, made, holding, fused=False)
        seconds, steps = self._cheapest(tensor, made, holding, fused=tensor in self._fused)
        return seconds + self._waiting_s(tensor, made, holding), steps

    def at_once(self, tensor: str, made: Placement, holding: Holding) -> bool:
        """Return whether to reduce a gradient at once instead of at the end, as in ZeRO-2."""
        waiting = self._waiting_s(tensor, made, holding)
        if not waiting or tensor in self.space.summed:
            return False
        alone, fused = (self._cheapest(tensor, made, holding, fused=f)[0] for f in (False, True))
        return alone < fused + waiting

    def _waiting_s(self, tensor: str, made: Placement, holding: Holding) -> float:
        """Return the price of the memory of a gradient's terms that wait for the end."""
        price = self.memory_s_per_byte
        if price is None or tensor not in self._gradients or made in holding:
            return 0.0
        return float(price @ self.cost.local_bytes(self.space.graph.tensors[tensor], made))

    def _cheapest(
        self, tensor: str, made: Placement, holding: Holding, *, fused: bool
    ) -> tuple[float, tuple[Convert, ...]]:
        wanted = [p for p in holding if p != made]
        if made == R and wanted:
            return float("inf"), ()  # slices of a replica are free: hold the tensor as R
        if made in holding:
            return self._chain(tensor, made, wanted, fused=fused)
        routes = [wanted, wanted[::-1]] if len(wanted) == 2 else [wanted]
        chains = (self._chain(tensor, made, route, fused=fused) for route in routes)
        return min(chains, key=lambda c: c[0])

    def _chain(
        self, tensor: str, made: Placement, route: list[Placement], *, fused: bool
    ) -> tuple[float, tuple[Convert, ...]]:
        """Convert to each placement in turn: the first from ``made``, the next from the first."""
        total, steps, src, times = 0.0, [], made, self.space.repeated.get(tensor, 1)
        for dst in route:
            if not convertible(src, dst):
                return float("inf"), ()
            t = self.space.graph.tensors[tensor]
            choice = self.cost.convert(t, src, dst, fused=fused)[0]
            total += times * choice.seconds
            steps.append(
                Convert(tensor=tensor, src=src, dst=dst, backward=False,
                        implementation=choice.implementation)
            )  # fmt: skip
            src = dst if made == P else made
        return total, tuple(steps)

    # --- reading the program back ---

    def program(self, labelling: Labelling) -> Program:
        """Return the program of a labelling, with conversions before their first use."""
        labels = labelling.labels
        rows = {n: rows[labels[self._node[n]]] for n, rows in self.rows.items()}
        held = {t: h[labels[self._variable[t]]] for t, h in self.held.items()}
        stored = {t: p[labels[self._stored[t]]] for t, p in self.stored.items()}
        choices = Choices(rows=rows, held=held, stored=stored)
        return write_program(self.space, choices, self.conversions, self.at_once)


def _given(holding: Holding, need: Placement) -> int:
    """Return 0 if a holding gives the placement, directly or as a local part."""
    return 0 if need in holding or R in holding else FORBIDDEN


def _costs(seconds: Iterable[float]) -> Costs:
    return np.array([_scaled(s) for s in seconds], dtype=np.int64)


def _scaled(seconds: float) -> int:
    """Return integer picoseconds, up to :data:`FORBIDDEN`: ten hours for one operator."""
    return round(min(float(seconds) * PICOSECONDS, FORBIDDEN))
