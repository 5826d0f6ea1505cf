"""Run one rank's stage: forwards and backwards in turns, sums over microbatches, transfers.

The forward of the module runs the whole step, since forwards and backwards of microbatches alternate;
its backward returns the gradients that the forward computed, times the gradient of the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hap.ir.graph import Graph
from hap.ir.graph_builder import RANDOM
from hap.ir.mesh import offsets
from hap.ir.microbatch_sizes import size_of, sized_stages
from hap.ir.pipeline_order import AHEAD, Turn, first_turns, turns
from hap.ir.plan import Plan
from hap.ir.program import Value
from hap.ir.stages import Stage, Transfer
from hap.runtime.collectives import Comm, Waiting
from hap.runtime.compiled import Library, Runnable
from hap.runtime.context import Context
from hap.runtime.emit import Emitter
from hap.runtime.lanes import Pending
from hap.runtime.pipeline.boundary import (
    Arrival,
    Arrivals,
    Boundary,
    Incoming,
    direction_comms,
    receive_stream,
    receives_ahead,
)
from hap.runtime.pipeline.piecewise import Pieces
from hap.runtime.pipeline.segments import (
    AFTER,
    PER_PART,
    Run,
    SegmentLayout,
    StageSegment,
    emitted,
    executables,
)
from hap.runtime.pipeline.segments import layout as layout_of
from hap.runtime.pipeline.stage_inputs import dtype_of, inputs_of
from hap.runtime.pipeline.sums import Env, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """A stage's work on one microbatch."""

    graph: Graph
    stage: Stage
    boundaries: Sequence[Boundary]
    runs: Mapping[StageSegment, Run]


@dataclass(frozen=True, slots=True)
class Now:
    """The place on the mesh axis over time: the microbatch that runs."""

    rank: int
    world_size: int


def pipeline(
    plan: Plan, comm: Comm, device: torch.device, *, widen: bool, backend: str
) -> Runnable:
    """Return the functions of a rank of a plan with stages."""
    stage = PipelineStage(plan, comm, device, widen, backend)
    buffers = tuple(o.target for o in plan.graph.outputs if o.role == "buffer")
    return Runnable(
        forward=stage.forward, backward=stage.backward, buffers=buffers,
        gradient_of=stage.gradient_of,
    )  # fmt: skip


Sent = list[tuple[Tensor, Waiting]]
"""Tensors that are on their way, which must live until they have arrived."""


class PipelineStage:
    def __init__(
        self, plan: Plan, comm: Comm, device: torch.device, widen: bool, backend: str
    ) -> None:
        assert plan.stages is not None
        self._plan, self._comm, self._device, self._widen = plan, comm, device, widen
        self._number, self.place = plan.stages.place(comm.rank)
        graphs, transfers = plan.cut
        self._stage, self._graph = plan.stages.stages[self._number], graphs[self._number]
        delayed = self._stage.delay > 0
        self._layout = layout_of(
            self._graph,
            self._stage.program,
            delayed=delayed,
            world_size=len(self._stage.ranks),
            gather_each=self._stage.gather_each,
        )
        self._transfers = [t for t in transfers if self._number in (t.src, t.dst)]
        self._receiving = receive_stream(device)
        comms = direction_comms(plan, transfers, comm, device)
        self._microbatches = self._made(comms, backend)
        first = self._microbatches[0]
        self.pieces = {
            v: Pieces(step, count, first.stage.program.sizes(first.graph, v, first.stage.shares))
            for v, (step, count) in self._layout.pieces.items()
        }
        parameters = {i.target for i in self._graph.role("parameter")}
        own = [o for o in self._graph.outputs if o.role == "gradient" and o.target in parameters]
        self._gradients = {o.target: k for k, o in enumerate(own)}
        targets = {i.tensor: i.target for i in plan.graph.role("parameter")}
        inputs = [i.tensor for i in plan.graph.inputs if i.role != "tangent"]
        self._inputs = tuple(inputs)
        trained = [t for i in inputs if (t := targets.get(i)) in plan.graph.gradients]
        self._trained = {t: k for k, t in enumerate(trained) if t is not None}
        self.gradient_of = tuple(self._trained.get(targets.get(i, "")) for i in inputs)
        after = {value for segment in AFTER for value in self._layout.given[segment]}
        ends = zip(self._graph.outputs, self._stage.program.outputs, strict=True)
        self.kept = [*after, *(Value(o.tensor, p) for o, p in ends if o.role == "gradient")]
        """Values of a microbatch that are read after all of them; each makes the same."""
        self._count = plan.microbatches
        self._half = any(t.dtype == "float16" for t in self._graph.tensors.values())
        self.loss_scale = 1.0
        """The gradient of the loss in the backwards of microbatches."""
        self._ahead = receives_ahead(device)
        self._warm = self._ahead > 0
        """Whether the host waits no longer for the whole device, as GPUs' hosts do in the first step."""

    def turns(self) -> Iterator[Turn]:
        """Yield the turns of a step."""
        stages, own = self._plan.stages, self._stage
        assert stages is not None
        if self._warm:
            return turns(self._count, own.in_flight, own.delay)
        return first_turns(self._count, own.in_flight, own.delay, self._number, len(stages.stages))

    def _made(self, comms: Mapping[tuple[int, int], Comm], backend: str) -> list[Microbatch]:
        """Return the microbatches; those of equal size share one unless they draw random numbers."""
        plan, library, found = self._plan, Library(), dict[object, Microbatch]()
        assert plan.stages is not None
        sized = sized_stages(plan.graph, plan.program, plan.shares, plan.stages)
        alike = not any(n.op in RANDOM for n in self._graph.nodes)
        sizes = [size_of(plan.shares, number) for number in range(plan.microbatches)]
        keys = [size if alike else number for number, size in enumerate(sizes)]
        for number, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            if key in found:
                continue
            graphs, stages = sized[size]
            stage = stages[self._number]
            emitter = Emitter(
                graph=graphs[self._number], program=stage.program, shares=stage.shares,
                rank=self.place, device=self._device, widen=self._widen,
                alone=len(stage.ranks) == 1, over_time=True,
                offsets=offsets(
                    plan.graph, plan.program, plan.shares, number, plan.microbatch(number)
                ),
            )  # fmt: skip
            found[key] = Microbatch(
                graph=graphs[self._number], stage=stage,
                boundaries=[
                    Boundary(
                        graphs, stages, t, self._comm.rank, comms[t.src, t.dst], self._receiving
                    )
                    for t in self._transfers
                ],
                runs=executables(
                    emitted(emitter, self._layout, last=key == keys[-1]), backend, self._device,
                    library,
                ),
            )  # fmt: skip
        return [found[key] for key in keys]

    def forward(self, ctx: Context, tensors: list[Any]) -> Sequence[Tensor]:
        """Run a step; return the loss, the buffers and, if they are wanted, the gradients."""
        if ctx.loss_scale is not None and not self._widen:
            self.loss_scale = ctx.loss_scale()
        elif self._half and ctx.wanted and not self._widen:
            warnings.warn(
                "gradients of float16 may vanish in a pipeline: create hap.GradScaler(module) "
                "before the first step",
                stacklevel=2,
            )
        step = _Step(self, ctx, dict(zip(self._inputs, tensors, strict=True)))
        tensors.clear()
        return step.run()

    def backward(self, ctx: Context, given: list[Any]) -> Sequence[Tensor]:
        """Return the gradients that the forward computed, times what the loss's gradient lacks."""
        *gradients, tangent = given
        given.clear()
        if not gradients:
            raise RuntimeError("the forward of a pipeline ran without gradients, as under no_grad")
        factor = tangent / self.loss_scale
        return [g * factor.to(g.dtype) for g in gradients]


class _Step:
    """One step of a stage on one rank."""

    def __init__(self, stage: PipelineStage, ctx: Context, given: dict[str, Tensor]) -> None:
        self._s, self._ctx, self._given = stage, ctx, given
        self._layout: SegmentLayout = stage._layout
        self._env: Env = {}
        self._parts: list[Env] = []
        sent = {b.sends for b in stage._microbatches[0].boundaries}
        self._sums = Sums(self._layout, sent)
        self._reached: list[torch.cuda.Event] = []
        """Where the GPU is at the begin of the latest turns."""
        self._sending: list[Sent] = []
        """Gradients on their way to earlier stages, and tensors that cross once per step."""
        self._activations: dict[int, Sent] = {}
        """Activations on their way to later stages, by microbatch."""
        self._sent: set[Transfer] = set()
        self._kept: Env = {}
        self._pending: dict[Value, Pending] = {}
        """Results of the last turn for which nothing has waited."""

    def run(self) -> Sequence[Tensor]:
        s, wanted, across = self._s, self._ctx.wanted, self._ctx.across
        self._ctx.total, total = self._sums.total, self._ctx.total
        try:
            sized = [(each.graph, each.stage) for each in s._microbatches]
            self._env, self._parts = inputs_of(
                s._plan, sized, s.place, self._given, self._tangent()
            )
            weights = self._crossing(backward=False, once=True, sending=False)
            before = self._receive(weights)
            coming = {False: self._incoming(backward=False)}
            if wanted:
                coming[True] = self._incoming(backward=True)
            self._run(StageSegment.ONCE, self._env)
            self._send_once(backward=False)
            self._arrived(before)
            self._run(StageSegment.SHARED, self._env)
            self._send_once(backward=False)  # what is made of other stages' weights
            for number, part in enumerate(self._parts):
                self._run(StageSegment.COUNT, part, number)
            self._sums.finish(self._env)
            self._run(StageSegment.COUNTED, self._env)
            for turn in s.turns():
                if wanted or not turn.backward:
                    self._take_turn(turn, coming[turn.backward])
            self._env |= self._kept
            self._sums.finish(self._env)
            self._run(StageSegment.END, self._env)
            gradients = self._end(coming[True].once) if wanted else []
            for sent in (*self._sending, *self._activations.values()):
                self._wait(sent)
            s._warm |= wanted
            return [self._ctx.idle(self._loss), *gradients]
        finally:
            self._ctx.across, self._ctx.microbatch, self._ctx.total = across, None, total

    def _take_turn(self, turn: Turn, coming: Incoming) -> None:
        """Run the forward or the backward of a microbatch, or what was delayed of the backward."""
        number, part = turn.microbatch, self._parts[turn.microbatch]
        self._keep_pace()
        if turn.weights:
            self._run_turn(turn, part)
        else:
            part.update(self._ctx.idle(lambda: coming.take(number)))
            if turn.backward and self._s._stage.recompute:
                self._run(StageSegment.FORWARD, part, number, again=True)
            self._run_turn(turn, part)
            # They have arrived: their gradients are here.
            self._wait(self._activations.pop(number, []))
            sent = []
            for b in self._crossing(turn.backward, once=False, sending=True, number=number):
                sent += b.send(self._value(b.sends, part))
            if turn.backward or not self._ctx.wanted:
                self._sending.append(sent)
                if len(self._sending) > AHEAD:
                    self._wait(self._sending.pop(0))
            else:
                self._activations[number] = sent
        if not turn.backward and self._s._stage.recompute:
            for value in self._layout.results[StageSegment.FORWARD]:
                part.pop(value, None)
        last = turn.backward and turn.weights == (self._s._stage.delay > 0)
        if last or not self._ctx.wanted:
            self._parts[number] = {}
            self._kept = {v: part[v] for v in self._s.kept if v in part}

    def _keep_pace(self) -> None:
        """Let the host be a few turns ahead of its GPU, no more: messages that arrive early take memory."""
        if self._s._device.type == "cuda":
            self._reached.append(torch.cuda.current_stream(self._s._device).record_event())
            if len(self._reached) > AHEAD:
                self._reached.pop(0).synchronize()

    def _run_turn(self, turn: Turn, part: Env) -> None:
        segment = StageSegment.BACKWARD if turn.backward else StageSegment.FORWARD
        segment = StageSegment.WEIGHTS if turn.weights else segment
        last = turn.microbatch == self._s._count - 1 and segment is self._layout.last
        if last and self._layout.complete:
            segment = StageSegment.LAST_TURN
        self._run(segment, part, turn.microbatch)

    def _end(self, after: Arrivals) -> list[Tensor]:
        """Run what makes the gradients of the sums over the microbatches; return them."""
        self._run(StageSegment.RETURNED, self._env)
        self._return_in_pieces()
        self._send_once(backward=True)
        self._arrived(after)
        self._env.update((v, self._ctx.wait(pending)) for v, pending in self._pending.items())
        self._run(StageSegment.GRADIENTS, self._env)
        self._sums.finish(self._env)
        self._send_once(backward=True)
        self._run(StageSegment.LAST, self._env)
        return self._own_gradients()

    def _crossing(
        self, backward: bool, *, once: bool, sending: bool, number: int = 0
    ) -> list[Boundary]:
        """Return a microbatch's boundaries of one direction that this stage sends to, or receives from."""
        mine = self._s._number
        found = [
            b for b in self._s._microbatches[number].boundaries
            if (b.transfer.backward, b.transfer.once) == (backward, once)
            and (b.transfer.src if sending else b.transfer.dst) == mine
        ]  # fmt: skip
        return sorted(found, key=lambda b: b.pieces == 1)  # those in pieces are sent first

    def _receive(self, boundaries: Sequence[Boundary]) -> Arrivals:
        return {b.arrives: b.receive(self._dtype(b), self._s._device) for b in boundaries}

    def _incoming(self, *, backward: bool) -> Incoming:
        def arrivals(number: int = 0, *, once: bool = False) -> Arrivals:
            return self._receive(self._crossing(backward, once=once, sending=False, number=number))

        # Weights that cross once are received before: see run().
        after = (lambda: arrivals(once=True)) if backward else dict[Value, Arrival]
        return Incoming(self._s._count, arrivals, after, self._s._ahead)

    def _arrived(self, arrivals: Arrivals) -> None:
        for value, arrival in arrivals.items():
            if each := self._s.pieces.get(value):
                self._env[each.result] = each.gathered(self._ctx, arrival)
            self._env[value] = self._ctx.idle(arrival.wait)

    def _return_in_pieces(self) -> None:
        """Reduce sums that the stage returns, and send each piece while the next one is reduced."""
        for b in self._crossing(backward=True, once=True, sending=True):
            if each := self._s.pieces.get(b.sends):
                for number, rows in enumerate(each.reduced(self._ctx, self._env[each.source])):
                    self._sending.append(b.send_piece(number, rows))
                self._sent.add(b.transfer)

    def _wait(self, sent: Sent) -> None:
        for _, wait in sent:
            self._ctx.idle(wait)

    def _send_once(self, *, backward: bool) -> None:
        """Send the values that exist by now and were not sent before.

        A stage receives them in one order. So those to one stage are sent once all of them exist.
        """
        crossing = self._crossing(backward, once=True, sending=True)
        unsent = [b for b in crossing if b.transfer not in self._sent]
        short = {b.transfer.dst for b in unsent if b.sends not in self._env}
        for b in unsent:
            if b.transfer.dst not in short:
                self._sent.add(b.transfer)
                self._sending.append(b.send(self._env[b.sends]))

    def _value(self, value: Value, part: Env) -> Tensor:
        if value in self._pending:
            part[value] = self._ctx.wait(self._pending.pop(value))
        return part[value] if value in part else self._env[value]

    def _dtype(self, b: Boundary) -> torch.dtype:
        tensor = b.transfer.tensor
        if self._s._widen and "float" in self._s._graph.tensors[tensor].dtype:
            return torch.float64
        return dtype_of(self._s._graph, tensor)

    def _run(
        self, segment: StageSegment, part: Env, number: int = 0, *, again: bool = False
    ) -> None:
        """Run a segment; its results go to ``part``, and terms to the sums unless it runs ``again``."""
        layout, run = self._layout, self._s._microbatches[number].runs.get(segment)
        if run is not None:
            self._ctx.across = Now(number, self._s._count)  # type: ignore[assignment]
            self._ctx.microbatch = number
            given = [self._value(v, part) for v in layout.given[segment]]
            for value, made in zip(layout.results[segment], run(self._ctx, given), strict=True):
                env = self._pending if isinstance(made, Pending) else part
                env[value] = made
        if segment in (*PER_PART, StageSegment.LAST_TURN) and not again:
            self._sums.add({term: self._value(term, part) for term in layout.added[segment]})

    def _tangent(self) -> Tensor:
        """Return the gradient of the loss, a scalar."""
        s = self._s
        dtype = torch.float64 if s._widen else dtype_of(s._plan.graph, s._plan.graph.loss)
        return torch.full((), s.loss_scale, dtype=dtype, device=s._device)

    def _own_gradients(self) -> list[Tensor]:
        s = self._s
        ends = dict(zip(s._graph.outputs, s._stage.program.outputs, strict=True))
        own = {o.target: Value(o.tensor, p) for o, p in ends.items() if o.role == "gradient"}
        found = []
        for target in s._trained:
            if target in own:
                found.append(self._env[own[target]].contiguous())
            else:  # of another stage: this rank holds no rows of it
                tensor = next(
                    i.tensor for i in s._plan.graph.role("parameter") if i.target == target
                )
                found.append(torch.zeros_like(self._given[tensor]))
        return found

    def _loss(self) -> Tensor:
        """Return the loss, which the first rank of the last stage sends to all ranks."""
        s = self._s
        assert s._plan.stages is not None
        last = s._plan.stages.stages[-1]
        tensor = s._plan.graph.loss
        dtype = torch.float64 if s._widen else dtype_of(s._plan.graph, tensor)
        mine = torch.empty(0, dtype=dtype, device=s._device)
        if s._comm.rank == last.ranks[0]:
            ends = zip(s._graph.outputs, last.program.outputs, strict=True)
            value = next(Value(o.tensor, p) for o, p in ends if o.role == "loss")
            mine = self._env[value].reshape(1)
        sizes = [int(r == last.ranks[0]) for r in range(s._comm.world_size)]
        return s._comm.all_gather(mine, 0, sizes, "padded").reshape(())
