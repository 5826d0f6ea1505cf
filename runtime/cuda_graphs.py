"""Launch a rank's step as two CUDA graphs instead of one kernel after the other.

In half precision on a fast GPU, kernels take less time than the host needs to launch them. A graph launches all of
its kernels at once. The first step runs eagerly, which initialises libraries and communicators. The
next one is captured, with its collectives, and later ones replay it.

A graph reads and writes fixed memory. The batch, the loss's gradient, and the random numbers, which are
drawn before, are copied there. Parameters and buffers stay where they are. Backward and
forward share memory, as in an eager step: a forward overwrites the saved tensors and the gradients of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hap.capture import torch_private
from hap.errors import HapError, InputError, PlanError
from hap.ir.plan import Plan
from hap.runtime.apart import apart
from hap.runtime.collectives import Comm, LocalComm, ProcessGroupComm
from hap.runtime.compiled import Runnable
from hap.runtime.context import Context
from hap.runtime.draws_first import DrawsFirst
from hap.runtime.launch import release_before_leaving


def check_graphs(plan: Plan, comm: Comm) -> None:
    """Check that ranks of a plan can run as CUDA graphs.

    Raises:
        PlanError: the plan has stages, or carries rounding errors from step to step.
        InputError: the ranks are emulated.
    """
    instead = "use the backend 'eager' or 'inductor'"
    if plan.stages:
        raise PlanError("backend 'cudagraphs' does not run pipelines", hint=instead)
    if any(node.op == "hap.rounded_with_feedback.default" for node in plan.graph.nodes):
        raise PlanError(
            f"backend 'cudagraphs' does not run gradients in {plan.recipe.gradients}", hint=instead
        )
    if not isinstance(comm, LocalComm | ProcessGroupComm):
        raise InputError(
            "backend 'cudagraphs' does not run emulated ranks",
            hint="run each rank in a process of its own (--processes)",
        )


class Captured:
    """A forward or a backward as a CUDA graph.

    Args:
        function: takes ``(ctx, args)``.
        args: the inputs, which the graph reads where they are; the list is emptied.
        copied: indices of inputs that differ from step to step: they are copied into fixed memory.
        pool: the memory of the graph and of its results.
        separate: whether the results share no memory, as gradients may be changed in place.

    Raises:
        HapError: CUDA cannot capture the step, such as one that waits for a value on the host.
    """

    def __init__(
        self, function: DrawsFirst, ctx: Context, args: list[Tensor], copied: Sequence[int],
        pool: Any, *, separate: bool,
    ) -> None:  # fmt: skip
        for k in copied:
            args[k] = args[k].clone()
        self._copies = [args[k] for k in copied]
        self._draws = function.draws
        self._drawn = [draw(ctx) for draw in function.draws]
        args.extend((*self._drawn, *function.constants))
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                results = function.run(ctx, args)
                self.results = apart(results) if separate else list(results)
        except RuntimeError as error:
            raise HapError(
                f"the step cannot be captured as a CUDA graph: {str(error).partition(chr(10))[0]}",
                hint="use the backend 'eager'",
            ) from error
        self._fresh = True

    def replay(self, ctx: Context, given: Sequence[Tensor]) -> None:
        """Run the graph on new values of the copied inputs."""
        if not self._fresh:  # of a capture, the copies and the draws are those of this step
            for kept, x in zip(self._copies, given, strict=True):
                kept.copy_(x)
            for kept, draw in zip(self._drawn, self._draws, strict=True):
                kept.copy_(draw(ctx))
        self._fresh = False
        self._graph.replay()


class CudaGraphs:
    """The steps of a rank, which run as CUDA graphs in training once an eager one has run.

    Args:
        code: the rank's functions, which are :class:`DrawsFirst`.
        batch: indices of the forward's inputs that are entries of the batch.
    """

    def __init__(self, code: Runnable, ctx: Context, batch: Sequence[int]) -> None:
        self._code, self._ctx, self._batch = code, ctx, batch
        self._ran_eagerly: set[bool] = set()
        """With dropout, without, or both."""
        self._captured: tuple[Any, ...] = ()
        """Whether the capture drops, and the addresses that it reads."""
        self._forward: Captured | None = None
        self._backward: Captured | None = None
        self.number = 0
        """Of forwards, to recognise a backward that comes too late."""
        release_before_leaving(self)

    def release(self) -> None:
        """Destroy the graphs, as before the process group that they use; another step would be captured anew."""
        self._forward = self._backward = None
        self._captured = ()
        self.number += 1

    def ready(self) -> bool:
        """Return whether the step is captured or replayed; otherwise it runs eagerly."""
        ctx = self._ctx
        if not (ctx.training and ctx.wanted) or ctx.in_order:
            return False
        if ctx.dropping in self._ran_eagerly:
            return True
        self._ran_eagerly.add(ctx.dropping)
        return False

    def step(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the loss and the new buffers, as the forward does."""
        results: tuple[Tensor, ...] = _Replay.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return results

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Capture the forward if its tensors have moved, and run it."""
        fixed = [x for k, x in enumerate(tensors) if k not in self._batch]
        found = (self._ctx.dropping, *(x.data_ptr() for x in fixed))
        if found != self._captured:
            self._capture(tensors)
            self._captured = found
        self._keep_gradients(tensors)
        assert self._forward is not None
        self._forward.replay(self._ctx, [tensors[k] for k in self._batch])
        self.number += 1
        loss, *buffers = self._ends
        return loss.clone(), *(x.detach() for x in buffers)

    def _capture(self, tensors: Sequence[Tensor]) -> None:
        self._forward = self._backward = None  # frees the memory of an earlier capture
        self._pool = torch.cuda.graph_pool_handle()
        self._gradients: list[Tensor] = []
        self._places: set[int] = set()
        args = list(tensors)
        captured = self._record(self._code.forward, args, self._batch)
        count = 1 + len(self._code.buffers)
        results, captured.results = captured.results, []
        self._ends, self._saved, self._forward = results[:count], results[count:], captured
        known = {id(x) for y in self._saved for x in (y, y._base)}
        self.read = [k for k, x in enumerate(tensors) if id(x) in known]

    def _record(
        self, function: Any, args: list[Tensor], copied: Sequence[int], *, separate: bool = False
    ) -> Captured:
        assert isinstance(function, DrawsFirst)
        return Captured(function, self._ctx, args, copied, self._pool, separate=separate)

    def _keep_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Copy gradients that the user accumulates out of the graphs' memory."""
        for x in tensors:
            if x.grad is not None and x.grad.data_ptr() in self._places:
                x.grad = x.grad.clone()

    def backward(self, grad: Tensor) -> list[Tensor | None]:
        """Return a gradient per input of the forward."""
        with self._code.as_planned(grad.device):
            if self._backward is None:
                args = [*self._saved, grad]
                self._saved = []
                last = len(args) - 1
                self._backward = self._record(self._code.backward, args, [last], separate=True)
                self._gradients = self._backward.results
                self._places = {x.data_ptr() for x in self._gradients if x.numel()}
            self._backward.replay(self._ctx, [grad])
        # A parameter takes a gradient that nothing else holds; the memory stays the graph's.
        places = self._code.gradient_of
        return [None if k is None else self._gradients[k].detach() for k in places]


class _Replay(torch.autograd.Function):
    """The captured forward and backward as one autograd node."""

    @staticmethod
    def forward(fn: Any, graphs: CudaGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ends = graphs.forward(tensors)
        fn.graphs, fn.number = graphs, graphs.number
        fn.save_for_backward(*(tensors[k] for k in graphs.read))  # to detect changes in place
        fn.mark_non_differentiable(*ends[1:])
        return ends

    @staticmethod
    def backward(fn: Any, *grads: Tensor) -> Any:
        assert fn.saved_tensors is not None
        if fn.number != fn.graphs.number or torch_private.keeps_graph() or torch.is_grad_enabled():
            raise PlanError(
                "with backend 'cudagraphs' a step has one backward, before the next forward",
                hint="call backward once after each forward, or use the backend 'eager'",
            )
        fn.graphs.number += 1
        return None, *fn.graphs.backward(grads[0])
