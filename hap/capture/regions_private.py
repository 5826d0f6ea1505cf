"""All uses of private APIs of torch's *regions*: programs that a graph calls by name, several times.

Checked on torch 2.13.0 alone. The tracer's other private APIs are in :mod:`hap.capture.dynamo_private`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from hap.capture.layer_calls import LayerCall, as_regions

_LOGGER = logging.getLogger(__name__)

HAS_REGIONS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether torch compares layers, and traces a region once. Checked on torch 2.13.0 alone."""


@contextlib.contextmanager
def repeated_once(kinds: Sequence[type[nn.Module]], calls: Sequence[LayerCall]) -> Iterator[None]:
    """Let the tracer trace the forward of these classes once for all modules and inputs that are alike.

    A graph then has calls of regions. The tracer compares what it assumed of the first module, and traces another
    region where something differs. It does not see all: modes of autograd and autocast, for example, and globals
    that the model changes meanwhile. So the calls are compared, too.
    """
    if not kinds:
        yield
        return
    mark = _module("torch._higher_order_ops.invoke_subgraph").mark_compile_region
    compared = _ComparedCalls(calls)
    with (
        compared.by_tracer(), _short_fingerprints(), _caches_without_use(),
        as_regions(kinds, calls, functools.partial(mark, max_reuse_entries=sys.maxsize)),
    ):  # fmt: skip
        yield
    _LOGGER.info("%d of %d calls of layers were traced", compared.traced, compared.number)


class _ComparedCalls:
    """A region is used again only for calls that are alike, in what the tracer does not compare.

    Attributes:
        number: calls of this trace so far.
        traced: those that were traced.
    """

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        self.number = self.traced = 0
        self._calls, self._output, self._now = calls, None, object()
        self._known: dict[int, tuple[object, object]] = {}  # of a region, or what was assumed of it

    def _next(self, output: Any) -> None:
        """Begin the next call of a trace, which may begin again."""
        if output is not self._output:
            self._output, self.number, self.traced = output, 0, 0
        more = self.number < len(self._calls)
        self._now = self._calls[self.number].alike() if more else object()
        self.number += 1

    def _note(self, made: Any) -> Any:
        self._known[id(made)] = made, self._now
        return made

    def _is_like(self, made: Any) -> bool:
        return self._known[id(made)][1] == self._now

    @contextlib.contextmanager
    def by_tracer(self) -> Iterator[None]:
        """Let the tracer note and compare calls."""
        higher_order = _module("torch._dynamo.variables.higher_order_ops")
        regions = _module("torch._dynamo.variables.invoke_subgraph")
        variable = regions.InvokeSubgraphHigherOrderVariable
        called, traced = variable._call_function, variable.create_wrapped_node
        install = variable.install_subgraph_in_output_graph
        are_same = higher_order.are_same_graph_modules
        condition_of, is_reusable = regions.build_reuse_condition, regions.is_reusable

        def call(own: Any, tx: Any, *args: Any) -> Any:
            self._next(tx.output)
            with mock.patch.object(tx.output, "export", False):  # else no region is used again
                return called(own, tx, *args)

        def trace(own: Any, *args: Any, **named: Any) -> Any:
            self.traced += 1
            with mock.patch.object(self._output, "export", True):
                return traced(own, *args, **named)

        def installed(own: Any, *args: Any, **named: Any) -> Any:
            self._note(args[4])
            return install(own, *args, **named)

        def same(name: str, before: Any, body: Any, mode: Any) -> bool:
            return self._is_like(before) and are_same(name, before, body, mode)

        def assumed(*args: Any) -> Any:
            return self._note(condition_of(*args))

        def reusable(tx: Any, condition: Any, *args: Any) -> bool:
            if not self._is_like(condition):
                return False
            with _cloned_once():
                found: bool = is_reusable(tx, condition, *args)
            return found

        with (
            mock.patch.object(variable, "_call_function", call),
            mock.patch.object(variable, "create_wrapped_node", trace),
            mock.patch.object(variable, "install_subgraph_in_output_graph", installed),
            mock.patch.multiple(regions, build_reuse_condition=assumed, is_reusable=reusable),
            mock.patch.object(higher_order, "are_same_graph_modules", same),
        ):
            yield


@contextlib.contextmanager
def _cloned_once() -> Iterator[None]:
    """Let a path that the tracer rewrites share its parts with other paths, of which many have the same ones."""
    sources = _module("torch._guards").ChainedSource
    clone, clones = sources.clone, dict[int, Any]()

    def once(self: Any, *args: Any) -> Any:
        if id(self) not in clones:
            clones[id(self)] = clone(self, *args)
        return clones[id(self)]

    with mock.patch.object(sources, "clone", once):
        yield


@contextlib.contextmanager
def _short_fingerprints() -> Iterator[None]:
    """Describe the inputs of a call without tracing torch's function for that, if they are tensors in lists."""
    regions = _module("torch._dynamo.variables.invoke_subgraph")
    lists = _module("torch._dynamo.variables.lists").BaseListVariable
    flatten = regions.build_fingerprint_with_pytree

    def inputs(tx: Any, given: Any, named: Any) -> Any:
        leaves, others = list[Any](), list[Any]()

        def form(value: Any) -> Any:
            value = value.realize()
            if (tag := regions.classify_vt(value)) is not None:
                leaves.append((tag, value))
            elif isinstance(value, lists):
                return type(value), tuple(map(form, value.items))
            else:
                others.append(value)
            return None

        forms = [*map(form, given)], {key: form(value) for key, value in named.items()}
        if others:
            return flatten(tx, given, named)  # the same by tracing torch's function
        sources = [getattr(value, "source", None) for _, value in leaves]
        return regions.InputFingerprint(leaves, sources, False, forms)

    with mock.patch.object(regions, "build_fingerprint_with_pytree", inputs):
        yield


@contextlib.contextmanager
def _caches_without_use() -> Iterator[None]:
    """Let a layer clear a cache to which nothing was written: that is no side effect."""
    dicts = _module("torch._dynamo.variables.dicts").ConstDictVariable
    constant = _module("torch._dynamo.variables.constant").ConstantVariable
    method = dicts.call_method

    def unless_empty(self: Any, tx: Any, name: str, *args: Any) -> Any:
        if name == "clear" and not self.items:
            self.install_dict_keys_match_guard()
            return constant.create(None)
        return method(self, tx, name, *args)

    with mock.patch.object(dicts, "call_method", unless_empty):
        yield


def _module(name: str) -> Any:
    """Import a part of torch's tracer, which takes seconds, when it is needed."""
    return importlib.import_module(name)


@contextlib.contextmanager
def differentiated_once(args: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let a joint graph be traced with one backward for each kind of region.

    Whether a region writes into its inputs is computed once. A backward runs in the modes of the step's, its forward
    again in those of the first time, and results without a gradient have none.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing

    # The package has the operator under the module's name.
    regions = importlib.import_module("torch._higher_order_ops.invoke_subgraph")
    run, region = regions.InvokeSubgraphAutogradOp, regions.InvokeSubgraphHOP
    forward, backward = run.forward, run.backward
    schema_of, joint_of = region.gen_schema, regions.trace_joint_graph_as_bwd
    schemas: dict[tuple[int, str], tuple[Any, Any]] = {}
    differentiated: Any = None  # the region's call whose backward is traced

    def schema(self: Any, body: Any, name: str, *operands: Any) -> Any:
        inner = getattr(body, "subgraph", body)
        if (id(inner), name) not in schemas:
            schemas[id(inner), name] = schema_of(self, body, name, *operands), inner
        return schemas[id(inner), name][0]

    def run_forward(ctx: Any, *given: Any) -> Any:
        enabled, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        ctx.autocast = functools.partial(torch.autocast, "cpu", dtype, enabled)
        ctx.set_materialize_grads(False)
        return forward(ctx, *given)

    def run_backward(ctx: Any, *gradients: Any) -> Any:
        nonlocal differentiated
        differentiated = ctx
        ctx.unused = [k for k, gradient in enumerate(gradients) if gradient is None]
        if ctx.unused:
            ctx._non_differentiable_indices = [*ctx._non_differentiable_indices, *ctx.unused]
            ctx._identifier = f"{ctx._identifier} without {ctx.unused}"
        return backward(ctx, *gradients)

    def joint(body: Any, count: int, tensors: Any, included: Any, excluded: Any) -> Any:
        ctx = differentiated

        def whole(*inputs: Any) -> Any:
            with ctx.autocast(), fx.traceback.preserve_node_meta():
                results = fx.Interpreter(body).run(*inputs)
            return tuple(r.detach() if k in ctx.unused else r for k, r in enumerate(results))

        # torch's own runs the backward under the forward's autocast, too.
        off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
        return joint_of(whole, count, tensors, included, excluded | off)

    with (
        tracing(TracingContext(detect_fake_mode(args))),
        mock.patch.object(region, "gen_schema", schema),
        mock.patch.object(run, "forward", staticmethod(run_forward)),
        mock.patch.object(run, "backward", staticmethod(run_backward)),
        mock.patch.object(regions, "trace_joint_graph_as_bwd", joint),
    ):
        yield


def is_region_call(node: fx.Node) -> bool:
    """Whether a node of a graph calls a region."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def region_number(call: fx.Node) -> Any:
    """Return what the call of a region in the forward of a joint graph has in common with that in the backward."""
    return call.meta.get("custom", {}).get("call_id", call)  # without gradients there is one call
