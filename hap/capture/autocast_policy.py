"""The casts of automatic mixed precision on CUDA, in a graph that is captured without a GPU.

A graph is traced with tensors of the CPU, whose autocast has other lists of operators than CUDA's: it
leaves a layer norm in half precision, which CUDA's kernel refuses beside single-precision weights. So,
while a graph is traced, the operators that only CUDA casts are cast on the CPU as well. Operators that
only the CPU casts, to single precision, keep that: not all of them have kernels in half precision.

Source: the lists in ATen's ``autocast_mode.h``; a test compares them with torch's registry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from hap.capture import torch_private

SINGLE: Final = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sinh", "tan"),
    *("pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "softplus"),
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "renorm", "logsumexp"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "dist", "pdist"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    *("upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
)  # fmt: skip
"""Operators whose arguments are cast to single precision."""

SINGLE_RESULT: Final = (
    *("softmax.int", "log_softmax.int", "sum", "sum.dim_IntList", "cumsum", "cumprod"),
    *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
)
"""Operators that get the argument ``dtype=torch.float32`` unless they have a dtype."""

SINGLE_NORM: Final = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
"""Norms -> the overload with a dtype, which is single precision."""

WIDEST: Final = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add"),
    *("tensordot", "vdot"),
)
"""Operators whose arguments are cast to the widest dtype among them."""

HALF: Final = (
    *("addmv", "addr", "mv", "chain_matmul", "linalg_multi_dot", "einsum", "convolution"),
    *("_convolution", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
)
"""Operators whose arguments are cast to half precision."""

TYPED_BY_PLACE: Final = ("softmax.int", "log_softmax.int")
"""Operators whose last positional argument is the dtype."""


@contextlib.contextmanager
def casts_of_cuda() -> Iterator[None]:
    """Let autocast on the CPU cast what autocast on CUDA casts, in this process, meanwhile."""
    kernels = {name: _casting(name, lambda tensors: torch.float32) for name in SINGLE}
    kernels |= {name: _casting(name, _widest) for name in WIDEST}
    kernels |= {name: _casting(name, lambda tensors: _half()) for name in HALF}
    kernels |= {name: _with_dtype(name, name) for name in SINGLE_RESULT}
    kernels |= {name: _with_dtype(name, f"norm.{own}") for name, own in SINGLE_NORM.items()}
    with torch_private.cpu_autocast_kernels(kernels):
        yield


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _half() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _is_cast(value: Any) -> bool:
    """Autocast leaves double precision, and all that is no float, as it is."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _widest(tensors: list[Tensor]) -> torch.dtype:
    dtypes = {x.dtype for x in tensors}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _casting(name: str, choose: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    """Return a kernel that casts tensors, also those in lists, and calls the operator."""
    operator = _operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        flat = [x for a in (*args, *kwargs.values()) for x in (a if _is_list(a) else [a])]
        tensors = [x for x in flat if _is_cast(x)]
        dtype = choose(tensors) if tensors else torch.float32

        def given(value: Any) -> Any:
            if _is_list(value):
                return [given(x) for x in value]
            return value.to(dtype) if _is_cast(value) else value

        with torch_private.below_autocast():
            return operator(*map(given, args), **{k: given(v) for k, v in kwargs.items()})

    return kernel


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _with_dtype(name: str, with_dtype: str) -> Callable[..., Any]:
    """Return a kernel that asks for a single-precision result, if the caller asks for no dtype."""
    operator, typed = _operator(name), _operator(with_dtype)
    defaults = [a.default_value for a in operator._schema.arguments if not a.kwarg_only]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        said = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype)]
        with torch_private.below_autocast():
            if said or not _is_cast(args[0]):
                return operator(*args, **kwargs)
            whole = [*args, *defaults[len(args) :]]
            if name in TYPED_BY_PLACE:
                return operator(*whole[:-1], torch.float32)
            return typed(*whole, **{**kwargs, "dtype": torch.float32})

    return kernel
