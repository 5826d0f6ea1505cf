"""Remedies for code that torch's tracer refuses, and for a plain forward that fails."""

from __future__ import annotations

import re

from hap.capture.padding import HINT as ROWS_HINT
from hap.errors import ModelError

_READ = "aten._local_scalar_dense"


def not_one_graph(reason: str, where: str, on_data: bool = True) -> ModelError:
    """Return the error for code that can't be traced.

    Args:
        reason: the tracer's message and explanation.
        where: the user's line.
        on_data: it depends on the numbers of tensors.
    """
    hint = (
        "the program must not depend on tensor data: no `if` on a tensor's value, "
        "no .item(), no shapes made from data; torch.where often replaces them. "
    )
    if re.search(r"\bu\d+\b|aten.nonzero", reason):  # a size that is data
        reason = reason.replace("Consider annotating your code using torch._check*(). ", "")
        reason = f"it decides by a number that is data ({reason})"
        hint = (
            "the number of rows of x[mask] is data. Let a loop over experts run for all of them, and leave out the "
            f"branch for an expert without rows: torch also computes with no rows. Or {ROWS_HINT}. "
        )
    if _READ in reason:
        reason = (
            f"Python reads the value of a tensor, as a size, an index, a key or a result ({_READ})"
        )
        hint += (
            "An index may be a tensor: queue[(self.begin + torch.arange(n)) % len(queue)] = keys. "
        )
    hint += "Entries of the batch that are always the same may be named in `fixed`"
    if not on_data:
        hint = remedy_of(reason)
    return ModelError(
        f"the forward can't be captured as one graph: {reason}", where=where, hint=hint
    )


def remedy_of_failure(error: Exception) -> str:
    """Return what to do about a plain forward that fails, before any trace."""
    found = (remedy for part, remedy in FAILURES.items() if part in str(error))
    return next(found, "the model must run on the batch that batch() returns")


def remedy_of(reason: str) -> str:
    """Return what to do about code that can't be traced.

    Args:
        reason: the tracer's message and explanation.
    """
    found = (remedy for parts, remedy in REMEDIES.items() if any(part in reason for part in parts))
    return next(found, "compute this in __init__ or in batch(), or with torch's operators alone")


REMEDIES: dict[tuple[str, ...], str] = {
    ("torch.compiler.disable", "function `disable`"):
        "leave out torch.compiler.disable: the whole forward must be captured",
    ("as_proxy", "opaque object", "Generator"):
        "pass only tensors and numbers to functions of torch, and no `generator=`: the run seeds all random numbers. "
        "Keep random numbers that are the same in every step in a buffer",
    ("Random.", "random."):
        "draw by torch.rand; in place of a random branch, multiply by a factor of 0 or 1",
    ("builtin `time.",): "measure the time around the step, outside of the forward",
    ("requires_grad",): "use detach() in the forward, or set requires_grad of parameters in model()",
    ("setattr is not supported on type", "`setattr` with argument types ['type'", "register_forward"):
        "register hooks in __init__, and keep what they see in a list that each forward clears",
    ("torch.nn.Parameter",):
        "make modules with parameters in __init__: those of the forward are not trained",
    ("copy.deepcopy",): "copy modules in __init__; of a tensor, use clone()",
    ("function `backward`",): "return the loss alone, or compute a gradient by torch.autograd.grad",
    ("context_fn",): "pass a function that is defined outside of the forward as context_fn, or none",
}  # fmt: skip
"""Parts of the tracer's messages -> what to do."""

_ARGUMENTS = (
    "the forward gets every entry of the batch: let it take the labels too, as in "
    "forward(self, x, y=None), even if only loss(output, batch) reads them"
)
_DEVICE = "name no device in the forward: make tensors on that of its inputs (device=x.device)"
NESTED = "use padded tensors with a mask: pad in batch()"
SPARSE = (
    "use dense tensors: a product with a sparse matrix of the entries values at (row, column) is "
    "torch.zeros(rows, D).index_add(0, row, values[:, None] * x[column])"
)
FAILURES: dict[str, str] = {
    "positional argument": _ARGUMENTS,
    "unexpected keyword": _ARGUMENTS,
    "FlexAttention": "a plan is made and verified on the CPU: call scaled_dot_product_attention, with a mask",
    "Sparse": SPARSE,
    "NestedTensor": NESTED,
    "nested_tensor": NESTED,
    ".numpy() is not supported": "compute with torch: NumPy needs the values of a tensor, but a plan is made "
    "without data",
    "not linked with support for cuda": _DEVICE,
    "Found no NVIDIA driver": _DEVICE,
    "found two different devices": _DEVICE,
    "Couldn't swap": "cast tensors in the forward, not modules: F.linear(x, self.linear.weight.to(dtype)); or set "
    "`autocast` in the model file",
    "process group": "write the forward for one device: the plan adds the collectives",
}
"""Parts of the messages of a plain forward that fails -> what to do."""
