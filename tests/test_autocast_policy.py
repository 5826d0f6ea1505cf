"""The casts of autocast in a captured graph are those of autocast on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hap.capture.autocast_policy import (
    HALF,
    SINGLE,
    SINGLE_NORM,
    SINGLE_RESULT,
    WIDEST,
    casts_of_cuda,
)
from hap.capture.torch_private import fake_mode
from hap.capture.tracing import capture

ALL = (*SINGLE, *WIDEST, *HALF, *SINGLE_RESULT, *SINGLE_NORM)
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def registered(key: str) -> set[str]:
    """Return the operators of ATen that autocast casts for a kind of device."""
    return {
        name.removeprefix("aten::").removesuffix(".")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if name.startswith("aten::")
    }


OF_ONE_KERNEL = ("cudnn", "miopen", "mps", "_thnn", "_scaled_dot_product", "_flash", "_efficient")
"""Operators of one library's kernels, which graphs that are traced on the CPU do not contain."""


def test_the_table_has_all_operators_that_only_cuda_casts() -> None:
    only = registered("AutocastCUDA") - registered("AutocastCPU")
    only = {
        n for n in only if not n.strip("_").startswith(tuple(k.strip("_") for k in OF_ONE_KERNEL))
    }
    only = {n for n in only if "names" not in n and "imname" not in n.lower()}  # of named dims
    assert only - set(ALL) == set()
    assert len(ALL) == len(set(ALL))
    assert set(ALL) - registered("AutocastCUDA") <= {"rms_norm"}  # since torch 2.12


def x(*shape: int, dtype: torch.dtype = BF16) -> tuple[tuple[int, ...], torch.dtype]:
    """A tensor to be made on a device."""
    return shape, dtype


I64 = torch.int64
CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "sinh",
         "tan", "reciprocal", "rsqrt", "softplus", "sum", "norm.Scalar", "linalg_vector_norm",
         "nuclear_norm", "pdist"),
        (x(4, 4),),
    ),
    "pow.Scalar": (2.0, x(4)), "pow.Tensor_Scalar": (x(4), 3), "pow.Tensor_Tensor": (x(4), x(4)),
    "layer_norm": (x(4, 6), [6], x(6, dtype=F32), x(6, dtype=F32)),
    "native_layer_norm": (x(4, 6), [6], x(6, dtype=F32), x(6, dtype=F32), 1e-5),
    "group_norm": (x(4, 6, 5), 2, x(6, dtype=F32), x(6, dtype=F32)),
    "rms_norm": (x(4, 6), [6], x(6, dtype=F32)),
    "renorm": (x(4, 6), 2, 0, 1.0), "logsumexp": (x(4, 6), [-1]),
    "frobenius_norm.dim": (x(4, 6), [0, 1]), "nuclear_norm.dim": (x(4, 6), [0, 1]),
    "cosine_similarity": (x(4, 6), x(4, 6)), "dist": (x(4), x(4)),
    "upsample_nearest1d": (x(1, 2, 4), [8]), "upsample_nearest2d": (x(1, 2, 4, 4), [8, 8]),
    "upsample_nearest3d": (x(1, 2, 4, 4, 4), [8, 8, 8]), "upsample_linear1d": (x(1, 2, 4), [8], False),
    "_upsample_nearest_exact1d": (x(1, 2, 4), [8]),
    "_upsample_nearest_exact2d": (x(1, 2, 4, 4), [8, 8]),
    "_upsample_nearest_exact3d": (x(1, 2, 4, 4, 4), [8, 8, 8]),
    "upsample_bilinear2d": (x(1, 2, 4, 4), [8, 8], False),
    "_upsample_bilinear2d_aa": (x(1, 2, 4, 4), [8, 8], False),
    "upsample_trilinear3d": (x(1, 2, 4, 4, 4), [8, 8, 8], False),
    "upsample_bicubic2d": (x(1, 2, 4, 4), [8, 8], False),
    "_upsample_bicubic2d_aa": (x(1, 2, 4, 4), [8, 8], False),
    "softmax.int": (x(4, 6), -1), "log_softmax.int": (x(4, 6), -1),
    "sum.dim_IntList": (x(4, 6), [1], True), "cumsum": (x(4, 6), 1), "cumprod": (x(4, 6), 1),
    "linalg_matrix_norm": (x(4, 6), 1), "linalg_matrix_norm.str_ord": (x(4, 6),),
    "norm.ScalarOpt_dim": (x(4, 6), 2, [1]),
    "addcdiv": (x(4, dtype=F32), x(4), x(4)), "addcmul": (x(4), x(4), x(4)),
    "atan2": (x(4), x(4, dtype=F32)), "bilinear": (x(4, 3), x(4, 5), x(2, 3, 5, dtype=F32)),
    "cross": (x(4, 3), x(4, 3, dtype=F32)), "dot": (x(4), x(4, dtype=F32)),
    "vdot": (x(4), x(4, dtype=F32)), "tensordot": (x(4, 3), x(3, 2, dtype=F32), [1], [0]),
    "scatter_add": (x(4, 3), 0, x(2, 3, dtype=I64), x(2, 3, dtype=F32)),
    "index_put": (x(4, 3), [x(2, dtype=I64)], x(2, 3, dtype=F32)),
    "addmv": (x(4, dtype=F32), x(4, 3, dtype=F32), x(3, dtype=F32)),
    "addr": (x(4, 3, dtype=F32), x(4, dtype=F32), x(3, dtype=F32)),
    "mv": (x(4, 3, dtype=F32), x(3, dtype=F32)),
    "chain_matmul": ([x(2, 3, dtype=F32), x(3, 4, dtype=F32)],),
    "linalg_multi_dot": ([x(2, 3, dtype=F32), x(3, 4, dtype=F32)],),
    "einsum": ("ij,jk->ik", [x(2, 3, dtype=F32), x(3, 4, dtype=F32)]),
    "convolution": (x(2, 3, 8, dtype=F32), x(4, 3, 3, dtype=F32), None, [1], [0], [1], False, [0], 1),
    "_convolution": (x(2, 3, 8, dtype=F32), x(4, 3, 3, dtype=F32), None, [1], [0], [1], False, [0], 1,
                     False, False, True, True),
    **dict.fromkeys(
        ("rnn_relu_cell", "rnn_tanh_cell"),
        (x(2, 3, dtype=F32), x(2, 4, dtype=F32), x(4, 3, dtype=F32), x(4, 4, dtype=F32)),
    ),
    "gru_cell": (x(2, 3, dtype=F32), x(2, 4, dtype=F32), x(12, 3, dtype=F32), x(12, 4, dtype=F32),
                 x(12, dtype=F32), x(12, dtype=F32)),
    "lstm_cell": (x(2, 3, dtype=F32), [x(2, 4, dtype=F32), x(2, 4, dtype=F32)],
                  x(16, 3, dtype=F32), x(16, 4, dtype=F32), x(16, dtype=F32), x(16, dtype=F32)),
}  # fmt: skip
"""Operator -> arguments; most tensors are in half precision, as after a product."""


@pytest.fixture
def fake() -> Iterator[None]:
    with fake_mode():
        yield


@pytest.mark.parametrize("name", ALL)
def test_each_result_has_the_dtype_that_it_has_on_cuda(name: str, fake: None) -> None:
    """Fake tensors of CUDA are cast by torch's own lists, also without a GPU."""
    if name == "gru_cell" and not torch.cuda.is_available():
        pytest.skip("no CUDA device, which torch opens for a GRU cell of fake tensors")
    if name not in registered("AutocastCUDA"):
        pytest.skip("this version of torch does not cast it on CUDA")
    compared = 0
    for double in (False, True):
        expected = dtypes(name, "cuda", double)
        if expected != [RuntimeError]:  # kernels refuse doubles beside others
            assert dtypes(name, "cpu", double) == expected
            compared += 1
    if not compared:
        assert name == "_convolution", "all others have a result of fake tensors on CUDA"
        pytest.skip("torch has no result of fake tensors of CUDA")


def dtypes(name: str, device: str, double: bool) -> list[torch.dtype]:
    """Return the dtypes of an operator's results under autocast, with or without a double in front."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
    first = double

    def made(value: Any) -> Any:
        nonlocal first
        if isinstance(value, list):
            return [made(v) for v in value]
        if not (isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)):
            return value
        dtype, first = F64 if first and value[1] != I64 else value[1], False
        return torch.empty(value[0], dtype=dtype, device=device)

    torch.set_autocast_dtype(device, BF16)
    torch.set_autocast_enabled(device, True)
    try:
        with casts_of_cuda():
            results = operator(*map(made, CALLS[name]))
    except RuntimeError:
        return [RuntimeError]  # type: ignore[list-item]
    finally:
        torch.set_autocast_enabled(device, False)
    return [r.dtype for r in (results if isinstance(results, tuple) else (results,))]


def test_a_dtype_that_the_caller_asks_for_stays() -> None:
    with casts_of_cuda(), torch.autocast("cpu", BF16):
        half = torch.ones(2, 3, dtype=BF16)
        assert half.softmax(-1, dtype=F64).dtype == F64
        assert half.sum(dtype=F64).dtype == F64
        assert half.sum(1, keepdim=True).shape == (2, 1)
        assert half.norm(dim=1, keepdim=True).shape == (2, 1)
        assert torch.norm(half).dtype == F32


def test_the_casts_end_with_the_capture() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(x).softmax(-1)).square().mean()

    graph = capture(Norm(), torch.randn(3, 4), autocast="bfloat16")
    found = {n.op: graph.tensors[n.outputs[0]].dtype for n in graph.nodes if n.outputs[0]}
    assert found["aten.addmm.default"] == "bfloat16"
    assert found["aten.native_layer_norm.default"] == "float32"
    with torch.autocast("cpu", BF16):
        assert torch.ones(2, 3, dtype=BF16).softmax(-1).dtype == BF16
