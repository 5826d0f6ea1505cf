"""Compile a rank's graphs with TorchInductor, in segments between its collectives.

Calls of the context's methods start collectives, or wait for one. They are not compiled: they keep
the program's order and cut the graph into pieces. A call that draws a mask cuts nothing: it needs
no tensor, and runs before the piece that uses it. A piece is compiled at its first run, for the
strides of its inputs; repeated layers share compiled code.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hap.capture import torch_private
from hap.capture.matmul_precision import matmul_precision
from hap.errors import HapError, InputError
from hap.runtime.context import Context
from hap.runtime.draws_first import Boxed, DrawsFirst, boxed, draw_masks_apart
from hap.runtime.emit import Emitted
from hap.runtime.fused_operators import FUSED

Compiled = Callable[[list[Any]], Sequence[Tensor]]
"""A compiled piece, which empties its list of arguments."""

BACKENDS = ("eager", "inductor", "cudagraphs", "inductor-cudagraphs")
DRAWN = frozenset({"mask", "kept_factor", "trains"})
"""Methods of the context that need no tensor and may run in any order."""

FEWEST = 2
"""Fewest kernels of a piece that is compiled: a single kernel cannot be fused."""


def compiles(backend: str) -> bool:
    """Does TorchInductor compile the operators between collectives?"""
    return backend.startswith("inductor")


def captures(backend: str) -> bool:
    """Do steps run as CUDA graphs (:mod:`hap.runtime.cuda_graphs`)?"""
    return backend.endswith("cudagraphs")


def check_backend(backend: str, device: torch.device) -> None:
    """Check that the backend exists and can compile for ``device``.

    Raises:
        InputError: the backend is unknown, or a tool that it needs is not installed.
    """
    if backend not in BACKENDS:
        raise InputError(f"unknown backend {backend!r}", hint=f"use one of {', '.join(BACKENDS)}")
    if compiles(backend) and (lack := torch_private.inductor_lacks(device)):
        raise InputError(
            f"backend {backend!r} cannot compile for {device.type}: {lack[0]}",
            hint=f"{lack[1]}, or use the backend 'eager'",
        )
    if captures(backend) and device.type != "cuda":
        raise InputError(
            f"backend {backend!r} runs on CUDA devices, not on {device.type}",
            hint="use the backend 'eager' or 'inductor'",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Runnable:
    """The functions of a rank: both take ``(ctx, arguments)`` and empty the list.

    The fields are those of :class:`hap.runtime.emit.Emitted`.
    """

    forward: Callable[[Context, list[Any]], Sequence[Tensor]]
    backward: Callable[[Context, list[Any]], Sequence[Tensor]]
    buffers: tuple[str, ...]
    gradient_of: tuple[int | None, ...]
    precision: str = ""
    """Of float32 products: see :func:`hap.capture.matmul_precision.matmul_precision`."""

    @contextlib.contextmanager
    def as_planned(self, device: torch.device) -> Iterator[None]:
        """Run the functions, which convert dtypes themselves, with the plan's precision."""
        products = matmul_precision(self.precision, device)
        with products, torch.autocast(device.type, enabled=False):
            yield


def runnable(emitted: Emitted, backend: str, device: torch.device) -> Runnable:
    """Return an emitted rank's functions for a backend; the two graphs are modified."""
    library = Library()
    return Runnable(
        forward=executable(emitted.forward, backend, device, library),
        backward=executable(emitted.backward, backend, device, library),
        buffers=emitted.buffers, gradient_of=emitted.gradient_of,
    )  # fmt: skip


def executable(graph: fx.Graph, backend: str, device: torch.device, library: Library) -> Boxed:
    """Return a graph's function ``(ctx, arguments)``, which empties the list; modifies the graph."""
    if captures(backend):
        return DrawsFirst(graph, device, lambda rest: _run(rest, backend, device, library))
    return _run(graph, backend, device, library)


def _run(graph: fx.Graph, backend: str, device: torch.device, library: Library) -> Boxed:
    return Staged(graph, library, device) if compiles(backend) else boxed(graph)


class Library:
    """A cache of compiled code. The key is all that the code depends on."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Compiled] = {}

    def __len__(self) -> int:
        return len(self._made)

    def compile(self, piece: fx.GraphModule, described: Hashable, args: list[Tensor]) -> Compiled:
        """Return the code of a piece for inputs with the shapes, strides and dtypes of ``args``.

        Raises:
            HapError: the compiler failed; its error is the ``__cause__``.
        """
        layouts = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in args)
        key = described, layouts
        if key not in self._made:
            try:
                self._made[key] = torch_private.inductor(piece, args, FUSED)
            except Exception as error:
                raise HapError(
                    f"inductor failed on a piece of {len(piece.graph.nodes)} operators: "
                    f"{type(error).__name__}: {error}",
                    hint="use the backend 'eager', and report this with the plan file",
                ) from error
        return self._made[key]


class Piece:
    """Operators without calls of the context, as one function; compiled at its first run."""

    def __init__(self, graph: fx.Graph, library: Library) -> None:
        self._module = fx.GraphModule(torch.nn.Module(), graph, "Piece")
        self._described = describe(graph)
        self._library = library
        self._made: dict[tuple[tuple[int, ...], ...], Compiled] = {}
        self.alone = sum(map(_is_kernel, graph.nodes)) < FEWEST

    def __call__(self, ctx: Context, args: list[Any]) -> Sequence[Any]:
        if self.alone:
            return self._module(*args)  # type: ignore[no-any-return]
        strides = tuple([x.stride() for x in args])
        made = self._made.get(strides)
        if made is None:
            made = self._library.compile(self._module, self._described, args)
            self._made[strides] = made
        return made(args)


class ValueSlot(int):
    """A placeholder in a call's arguments: the index of a value that the segment reads."""


@dataclass(frozen=True, slots=True)
class ContextCall:
    """A call of a method of the context."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, ctx: Context, values: list[Any]) -> Sequence[Any]:
        args, kwargs = _filled(self.args, values), _filled(self.kwargs, values)
        return (getattr(ctx, self.method)(*args, **kwargs),)


@dataclass(frozen=True, slots=True)
class ResultAt:
    """The selection of one of several results of a call."""

    place: int

    def __call__(self, ctx: Context, values: list[Any]) -> Sequence[Any]:
        return (values[0][self.place],)


@dataclass(frozen=True, slots=True)
class Segment:
    """A function, the slots that it reads and writes, and the slots that are dead after it."""

    run: Piece | ContextCall | ResultAt
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    last: tuple[int, ...]


class Staged:
    """A forward or a backward as pieces and calls of the context, in the program's order.

    ``staged(ctx, args)`` returns the results of the emitted graph, and empties ``args``.

    Args:
        graph: the emitted graph, whose first argument is the context; it is modified.
        library: the cache of compiled pieces.
        device: the device of dropout masks.
    """

    def __init__(self, graph: fx.Graph, library: Library, device: torch.device) -> None:
        draw_masks_apart(graph, device)
        _choose_by_tensor(graph, device)
        slots = {node: k for k, node in enumerate(graph.nodes)}
        self._size = len(slots)
        self._given = [slots[n] for n in graph.nodes if n.op == "placeholder"][1:]
        self._results = [slots[n] for n in _results(graph)]
        self.stages = _stages(graph, slots, library)

    def __call__(self, ctx: Context, args: list[Any]) -> list[Any]:
        kept: list[Any] = [None] * self._size
        for slot in reversed(self._given):
            kept[slot] = args.pop()
        for stage in self.stages:
            values = [kept[slot] for slot in stage.reads]
            for slot in stage.last:
                kept[slot] = None
            results = stage.run(ctx, values)
            for place, slot in enumerate(stage.writes):
                kept[slot] = results[place]
            del values, results
        return [kept[slot] for slot in self._results]


def _choose_by_tensor(graph: fx.Graph, device: torch.device) -> None:
    """Replace the context's choices between training and ``eval()``, so that they cut no piece."""
    ctx = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in ("by_mode", "in_training"):
            continue
        _, training, *otherwise = node.args
        with graph.inserting_before(node):
            trains = graph.call_method("trains", (ctx, device))
            chosen = graph.call_function(torch.where, (trains, training, *(otherwise or (0.0,))))
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)


def _results(graph: fx.Graph) -> list[fx.Node]:
    results: Any = graph.output_node().args[0]
    return list(results)


def _stages(graph: fx.Graph, slots: dict[fx.Node, int], library: Library) -> list[Segment]:
    """Return the segments of the graph, cut at its calls of the context."""
    ctx = next(iter(graph.nodes))
    found: list[Segment] = []
    run: list[fx.Node] = []

    def close() -> None:
        if run:
            found.append(_piece(run, slots, library))
            run.clear()

    asked = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "call_method" and node.args[0] is ctx:
            if node.target not in DRAWN:
                close()
            asked.add(node)
            found.append(_ask(node, slots))
        elif node.target is operator.getitem and node.args[0] in asked:
            # The call with several results ran before, so this need not wait for the piece.
            asked.add(node)
            read = (slots[node.args[0]],)
            found.append(Segment(ResultAt(node.args[1]), read, (slots[node],), ()))
        else:
            run.append(node)
    close()
    return _with_last(found, {slots[n] for n in _results(graph)})


def _ask(node: fx.Node, slots: dict[fx.Node, int]) -> Segment:
    read: dict[fx.Node, ValueSlot] = {}

    def hole(given: fx.Node) -> Any:
        return read.setdefault(given, ValueSlot(len(read)))

    args = fx.node.map_arg(node.args[1:], hole)
    asked = ContextCall(str(node.target), args, fx.node.map_arg(node.kwargs, hole))
    return Segment(asked, tuple(slots[n] for n in read), (slots[node],), ())


def _piece(run: list[fx.Node], slots: dict[fx.Node, int], library: Library) -> Segment:
    inside = set(run)
    given = dict.fromkeys(n for node in run for n in node.all_input_nodes if n not in inside)
    results = [node for node in run if any(user not in inside for user in node.users)]
    piece = fx.Graph()
    env = {node: piece.placeholder(f"given_{k}") for k, node in enumerate(given)}
    for node in run:
        env[node] = piece.node_copy(node, env.__getitem__)
    piece.output(tuple(env[node] for node in results))
    reads, writes = (tuple(slots[n] for n in ends) for ends in (given, results))
    return Segment(Piece(piece, library), reads, writes, ())


def _with_last(stages: list[Segment], results: set[int]) -> list[Segment]:
    """Return the segments with the slots that each reads last and may free."""
    later, found = set(results), []
    for stage in reversed(stages):
        last = tuple(slot for slot in stage.reads if slot not in later)
        later.update(stage.reads)
        found.append(Segment(stage.run, stage.reads, stage.writes, last))
    return found[::-1]


def describe(graph: fx.Graph) -> Hashable:
    """Return a key of a graph's computation that does not depend on the names of its values."""
    number = {node: ("value", k) for k, node in enumerate(graph.nodes)}
    return tuple(
        (n.op, None if n.op == "placeholder" else n.target, _plain(n.args, number),
         _plain(n.kwargs, number))
        for n in graph.nodes
    )  # fmt: skip


def _plain(arg: Any, number: dict[fx.Node, tuple[str, int]]) -> Hashable:
    match arg:
        case fx.Node():
            return number[arg]
        case list() | tuple():
            return tuple(_plain(a, number) for a in arg)
        case dict():
            return tuple((k, _plain(a, number)) for k, a in arg.items())
        case slice():
            return "slice", *(_plain(a, number) for a in (arg.start, arg.stop, arg.step))
        case float() | bool():
            return type(arg), arg  # 1, 1.0 and True are equal in Python, but not to an operator
    return arg  # type: ignore[no-any-return]


def _filled(arg: Any, values: list[Any]) -> Any:
    match arg:
        case ValueSlot():
            return values[arg]
        case list() | tuple():
            return type(arg)(_filled(a, values) for a in arg)
        case dict():
            return {k: _filled(a, values) for k, a in arg.items()}
    return arg


def _is_kernel(node: fx.Node) -> bool:
    """Return whether the node writes memory; views do not."""
    if node.op not in ("call_function", "call_method") or node.target is operator.getitem:
        return False
    return not getattr(node.target, "is_view", False)
