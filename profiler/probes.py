"""Probes: operators that the profiler times, and the work of each.

Each type of device has a table of sizes. Inputs are slices of an arena larger
than the caches, at another place for each call, since in a training step an operator's input is
written long before it is read. Work is counted as in
:mod:`hap.synthesizer.cost.operator_work`; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from hap.capture.attention import attention, attention_backward
from hap.capture.cross_entropy import cross_entropy_backward, cross_entropy_terms
from hap.capture.matmul_precision import matmul_precision
from hap.cluster.work import Work
from hap.profiler import fixed_costs
from hap.profiler.slow_kernels import SLOW_KERNELS, SlowKernel

aten = torch.ops.aten
LAUNCH, LOOPED = "launch", "launch looped"
"""Probes of the fixed cost of an operator, in a step and in a loop; CUDA has only the first."""
HOST = "host"
"""Probe of the time in which the host issues an operator; on CUDA only."""
UPDATE = "update"
"""Probe of the fixed cost of a parameter's update."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all probes on one type of device.

    ``--quick`` takes the first three layers, and one size of most other operators.

    Attributes:
        arena_bytes: Bytes of the arena's block of float32, several times the caches.
        products: Dtype -> linear layers as (rows, width, outputs); float32 is the first.
        quick: Dtypes of the products that ``--quick`` measures too.
        fused: Dtype of convolutions and attention.
        elements: Numbers of elements of tensors that are only moved.
        tables: Tensors of elementwise operators as (rows, width).
        losses: Logits as (rows, classes).
        updates: Parameters of a step as (rows, width, number of parameters).
        convolutions: Inputs as (batch, channels, height and width).
        attention: Queries, keys and values as (batch, heads, length, width).
    """

    arena_bytes: int
    products: Mapping[str, Sequence[tuple[int, int, int]]]
    quick: Sequence[str]
    fused: str
    elements: Sequence[int]
    tables: Sequence[tuple[int, int]]
    losses: Sequence[tuple[int, int]]
    updates: Sequence[tuple[int, int, int]]
    convolutions: Sequence[tuple[int, int, int]]
    attention: Sequence[tuple[int, int, int, int]]


_CPU_LAYERS = (
    (512, 512, 512), (64, 512, 8192), (64, 1024, 1024), (1024, 256, 1024), (2048, 128, 128),
)  # fmt: skip
CPU = Sizes(
    arena_bytes=96 * 2**20,
    products={"float32": _CPU_LAYERS, "float64": _CPU_LAYERS[:3]}, quick=("float32",), fused="float32",
    elements=(2**19, 2**21), tables=((1024, 512), (4096, 512)), losses=((128, 4096), (512, 4096)),
    updates=((256, 1024, 16), (1024, 1024, 4)),  # equal bytes, more than the caches hold
    convolutions=((8, 64, 16), (8, 128, 8), (4, 32, 32)), attention=((4, 8, 128, 64), (8, 4, 64, 64)),
)  # fmt: skip

_CUDA_LAYERS = (
    (8192, 1024, 4096), (8192, 4096, 4096), (512, 1024, 32768), (32768, 768, 768), (4096, 768, 3072),
    (64, 4096, 16384), (2048, 768, 50304),
)  # fmt: skip
_CUDA_DTYPES = ("float32", "float16", "bfloat16", "tfloat32")
# The same for all GPUs, because unlike ranks run the same probes together. Each takes 0.03 to 20 ms
# on an H200, which is longer than launching its kernels, and at most half a second on a P100.
CUDA = Sizes(
    arena_bytes=2**30,
    products=dict.fromkeys(_CUDA_DTYPES, _CUDA_LAYERS), quick=_CUDA_DTYPES, fused="float16",
    elements=(2**24, 2**26), tables=((16384, 1024), (65536, 1024)),
    losses=((2048, 32768), (4096, 32768)), updates=((1024, 4096, 16), (4096, 4096, 4)),
    convolutions=((64, 256, 56), (64, 64, 112), (128, 64, 56), (256, 256, 14)),
    attention=((32, 16, 512, 64), (512, 12, 128, 64), (8, 16, 1024, 64)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One operator at one size.

    Attributes:
        name: Unique name, by which a resumed run finds its record.
        work: The work of one repetition.
        make: Allocates tensors, and returns the call.
        quick: Whether ``--quick`` measures it too.
        after: Makes a call that runs before each timed one, and is not timed.
        count: Number of repetitions of the work in a call.
        clock: What is timed: calls one after the other (``device``), calls that are queued on the
            device (``queue``), or the issuing of calls by the host (``host``).
    """

    name: str
    work: Work
    make: Callable[[Arena], Call]
    quick: bool = False
    after: Callable[[Arena], Call] | None = None
    count: int = 1
    clock: str = "device"


class Arena:
    """A large block on one device; each cut returns a tensor at the next place in it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Small numbers of both signs: some kernels have another speed for zeros and denormals.
        few = torch.arange(977, device=device, dtype=torch.float32).sub_(488.5).div_(400)
        nbytes = sizes_on(device).arena_bytes
        if device.type == "cuda":
            nbytes = min(nbytes, torch.cuda.get_device_properties(device).total_memory // 8)
        count = nbytes // 4
        self._blocks = {torch.float32: few.repeat(-(-count // len(few)))[:count]}
        self._at = 0

    def cut(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor of ordinary numbers that is most likely in no cache."""
        if dtype not in self._blocks:
            block = self._blocks[torch.float32]
            self._blocks[dtype] = block[: 4 * len(block) // dtype.itemsize].to(dtype)
        block, count = self._blocks[dtype], math.prod(shape)
        if self._at + count > block.numel():
            self._at = 0
        start, self._at = self._at, self._at + -(-count // 64) * 64
        return block[start : start + count].view(shape)


def sizes_on(device: torch.device) -> Sizes:
    """Return the sizes of a type of device; fake tensors have those of CUDA."""
    return CPU if device.type == "cpu" else CUDA


def probes(device: torch.device) -> list[Probe]:
    """Return all probes, in the order in which they run; it needs no device of that type."""
    sizes = sizes_on(device)
    first, *others = sizes.products
    found = [*_products(sizes, first), *_memory(sizes), *_elementwise(sizes), *_losses(sizes)]
    found += [*_updates(sizes), *_convolutions(sizes), *_attention(sizes), *_launch(device)]
    for dtype in others:
        found += _products(sizes, dtype)
    return found


def product_probe(device: torch.device) -> Probe:
    """Return the probe that compares the speed of devices quickly."""
    return probes(device)[0]


def _nbytes(dtype: str, *counts: float) -> float:
    return float(sum(counts) * _torch_dtype(dtype).itemsize)


def _torch_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the tensors; ``tfloat32`` is a precision of float32 products."""
    found: torch.dtype = getattr(torch, "float32" if dtype == "tfloat32" else dtype)
    return found


def _products(sizes: Sizes, dtype: str) -> Iterator[Probe]:
    """Yield products of linear layers: forward, gradient of the input, gradient of the weight.

    The three have different layouts, but the same arithmetic and traffic. Thin layers (few rows,
    small width, a large vocabulary) have more traffic per flop.
    """
    of = _torch_dtype(dtype)
    precision = "high" if dtype == "tfloat32" else "highest"
    for number, (rows, width, out) in enumerate(sizes.products[dtype]):
        shapes = (rows, width), (out, width), (rows, out)

        def make(arena: Arena, shapes: Any = shapes) -> Call:
            def call() -> None:
                x, weight, grad = (arena.cut(*shape, dtype=of) for shape in shapes)
                with matmul_precision(precision, x.device):
                    torch.mm(x, weight.t())
                    torch.mm(grad, weight)
                    torch.mm(grad.t(), x)

            return call

        traffic = _nbytes(dtype, rows * width, width * out, rows * out)
        yield Probe(
            name=f"linear {dtype} {rows}x{width}x{out}", make=make, count=3,
            work=Work("matmul", dtype, 2.0 * rows * width * out, traffic),
            quick=number < 3 and dtype in sizes.quick,
        )  # fmt: skip


def _memory(sizes: Sizes) -> Iterator[Probe]:
    """Yield operators that only move data; one of them changes the layout."""

    def simple(function: Callable[..., Tensor], count: int, inputs: int) -> Callable[[Arena], Call]:
        return lambda arena: lambda: function(*(arena.cut(count) for _ in range(inputs)))

    def turned(count: int) -> Callable[[Arena], Call]:
        shape = (count // 2**14, 64, 4, 64)  # (batch, sequence, heads, width of a head)
        return lambda arena: lambda: arena.cut(*shape).transpose(1, 2).contiguous()

    for count in sizes.elements:
        quick = count == sizes.elements[-1]
        for name, function, inputs in (
            ("add", torch.add, 2), ("mul", torch.mul, 2), ("relu", torch.relu, 1),
        ):  # fmt: skip
            work = Work("memory", "float32", float(count), _nbytes("float32", count * (inputs + 1)))
            yield Probe(
                name=f"{name} {count}", work=work, make=simple(function, count, inputs),
                quick=quick and name != "mul",
            )  # fmt: skip
        work = Work("memory", "float32", float(count), _nbytes("float32", 2 * count))
        yield Probe(name=f"transposed copy {count}", work=work, make=turned(count))


def _elementwise(sizes: Sizes) -> Iterator[Probe]:
    """Yield operators that may be slower than their traffic."""

    def table(arena: Arena, shape: Any, kernel: SlowKernel) -> Call:
        return lambda: kernel.run(*(arena.cut(*shape) for _ in range(kernel.reads)))

    for shape in sizes.tables:
        (rows, width), count = shape, math.prod(shape)
        for each in SLOW_KERNELS:
            traffic = (each.reads + each.more) * _nbytes("float32", count)
            yield Probe(
                name=f"{each.name} {rows}x{width}",
                work=Work(each.kind, "float32", float(count * each.operations), traffic),
                make=partial(table, shape=shape, kernel=each),
                quick=shape == sizes.tables[-1] and each.quick,
            )  # fmt: skip


def _losses(sizes: Sizes) -> Iterator[Probe]:
    """Yield cross-entropy, which reads its logits several times; as in :func:`_attention`."""
    none = -100
    for rows, classes in sizes.losses:
        count = float(rows * classes)
        targets = 8.0 * rows  # bytes of class numbers; a row's result takes half of that

        def forward(arena: Arena, rows: int = rows, classes: int = classes) -> Call:
            target = torch.arange(rows, device=arena.device)
            return lambda: cross_entropy_terms(arena.cut(rows, classes), target, none)

        def backward(arena: Arena, rows: int = rows, classes: int = classes) -> Call:
            target = torch.arange(rows, device=arena.device)
            lse, _ = cross_entropy_terms(arena.cut(rows, classes), target, none)
            lse_grad, picked_grad = torch.ones_like(lse), -torch.ones_like(lse)
            return lambda: cross_entropy_backward(
                lse_grad, picked_grad, arena.cut(rows, classes), target, lse, none
            )

        for name, make, rows_bytes, tables in (
            ("cross_entropy", forward, 2 * targets, 1), ("cross_entropy_backward", backward, 2.5 * targets, 2),
        ):  # fmt: skip
            work = Work("loss", "float32", count, _nbytes("float32", tables * count) + rows_bytes)
            quick = (rows, classes) == sizes.losses[-1]
            yield Probe(name=f"{name} {rows}x{classes}", work=work, make=make, quick=quick)


def _updates(sizes: Sizes) -> Iterator[Probe]:
    """Yield steps of torch's default optimizers; a call is the step of several parameters.

    They call the functions of the optimizers: creating an optimizer imports torch's compiler,
    which takes longer on a slow rank than all steps here.
    """
    kinds: list[tuple[str, Callable[[Sequence[Tensor], Sequence[Tensor]], Call], int, int]] = [
        ("sgd momentum", _sgd, 1, 3), ("adamw", _adamw, 2, 9),
    ]  # fmt: skip
    for rows, width, several in sizes.updates:
        for name, step_of, states, kernels in kinds:
            count, shapes = rows * width, [(rows, width)] * several

            def make(arena: Arena, shapes: Any = shapes, step_of: Any = step_of) -> Call:
                two = ([arena.cut(*shape).clone() for shape in shapes] for _ in range(2))
                return cast(Call, step_of(*two))

            work = Work(
                "update", "float32", float(several * kernels * count),
                several * _nbytes("float32", (3 + 2 * states) * count),
            )  # fmt: skip
            quick = (rows, width, several) == sizes.updates[-1]
            yield Probe(name=f"{name} {rows}x{width}", work=work, make=make, quick=quick)

    def small(arena: Arena) -> Call:
        return _adamw(*([arena.cut(16).clone() for _ in range(64)] for _ in range(2)))

    work = Work("update", "float32", 9.0 * 16, _nbytes("float32", 7 * 16))
    yield Probe(name=UPDATE, work=work, make=small, quick=True, count=64)


def _sgd(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Call:
    momenta: list[Tensor | None] = [torch.zeros_like(each) for each in parameters]
    return lambda: sgd(
        list(parameters), list(gradients), momenta, weight_decay=0.0, momentum=0.9, lr=1e-3,
        dampening=0.0, nesterov=False, maximize=False,
    )  # fmt: skip


def _adamw(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Call:
    means, squares = ([torch.zeros_like(each) for each in parameters] for _ in range(2))
    steps = [torch.zeros(()) for _ in parameters]
    return lambda: adamw(
        list(parameters), list(gradients), means, squares, [], steps, amsgrad=False, beta1=0.9,
        beta2=0.999, lr=1e-3, weight_decay=1e-2, eps=1e-8, maximize=False,
    )  # fmt: skip


def _convolutions(sizes: Sizes) -> Iterator[Probe]:
    """Yield 3x3 convolutions, forward and backward."""
    dtype, of = sizes.fused, _torch_dtype(sizes.fused)
    for number, (batch, channels, size) in enumerate(sizes.convolutions):
        x, w = (batch, channels, size, size), (channels, channels, 3, 3)
        options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        pixels, weights = math.prod(x), math.prod(w)
        flops = 2.0 * pixels * channels * 9

        def forward(arena: Arena, x: Any = x, w: Any = w, options: Any = options) -> Call:
            def call() -> object:
                tensors = (arena.cut(*shape, dtype=of) for shape in (x, w, w[:1]))
                return aten.convolution(*tensors, *options)

            return call

        def backward(arena: Arena, x: Any = x, w: Any = w, options: Any = options) -> Call:
            def call() -> object:
                tensors = (arena.cut(*shape, dtype=of) for shape in (x, x, w))
                return aten.convolution_backward(*tensors, [w[0]], *options, [True, True, True])

            return call

        name = f"{dtype} {batch}x{channels}x{size}x{size}"
        yield Probe(
            name=f"conv {name}", make=forward, quick=number == 0,
            work=Work("conv", dtype, flops, _nbytes(dtype, 2 * pixels, weights)),
        )  # fmt: skip
        yield Probe(
            name=f"conv_backward {name}", make=backward, quick=number == 0,
            work=Work("conv_backward", dtype, 2 * flops, _nbytes(dtype, 3 * pixels, 2 * weights)),
        )  # fmt: skip


def _attention(sizes: Sizes) -> Iterator[Probe]:
    """Yield fused attention, forward and backward.

    They call the functions, since the first call of a custom operator imports torch's compiler.
    """
    dtype, of = sizes.fused, _torch_dtype(sizes.fused)
    for number, (batch, heads, length, width) in enumerate(sizes.attention):
        shape = (batch, heads, length, width)
        count, scores = math.prod(shape), batch * heads * length * length

        def forward(arena: Arena, shape: Any = shape) -> Call:
            def call() -> object:
                q, k, v = (arena.cut(*shape, dtype=of) for _ in range(3))
                return attention(q, k, v, None, False, shape[-1] ** -0.5)

            return call

        def backward(arena: Arena, shape: Any = shape) -> Call:
            scale = shape[-1] ** -0.5
            q, k, v, grad = (arena.cut(*shape, dtype=of) for _ in range(4))
            out, lse = attention(q, k, v, None, False, scale)
            return lambda: attention_backward(grad, q, k, v, None, out, lse, False, scale)

        name = f"{dtype} {'x'.join(map(str, shape))}"
        lse_bytes = 4.0 * batch * heads * length
        yield Probe(
            name=f"attention {name}", make=forward, quick=number == 0,
            work=Work("attention", dtype, 4.0 * scores * width, _nbytes(dtype, 4 * count) + lse_bytes),
        )  # fmt: skip
        yield Probe(
            name=f"attention_backward {name}", make=backward, quick=number == 0,
            work=Work(
                "attention_backward", dtype, 10.0 * scores * width,
                _nbytes(dtype, 8 * count) + lse_bytes,
            ),
        )  # fmt: skip


def _launch(device: torch.device) -> Iterator[Probe]:
    """Yield tiny operators with two views each, to measure the launch cost.

    On a CPU, a step's products evict everything else from the caches, including code: an operator
    after one takes ten times as long to start as in a loop. So they run in both ways: between
    products, as in a step, and in a loop, as all other probes. A GPU runs them from its queue.
    """
    launch = Probe(
        name=LAUNCH, work=Work("memory", "float32", 16.0, 192.0), quick=True,
        make=lambda arena: fixed_costs.small(arena.cut),
    )  # fmt: skip
    if device.type == "cpu":
        yield replace(launch, after=lambda arena: fixed_costs.product(arena.cut))
        yield replace(launch, name=LOOPED)
        return
    yield replace(launch, after=lambda arena: fixed_costs.long(arena.cut), clock="queue")
    half = _torch_dtype(sizes_on(device).fused)
    yield replace(
        launch, name=HOST, make=lambda arena: fixed_costs.layer(arena.cut, half),
        count=fixed_costs.KERNELS, clock="host",
    )  # fmt: skip
