"""What to write in place of code that torch's tracer refuses."""

from __future__ import annotations


def remedy_of(reason: str) -> str:
    """Return what to do about code that can't be traced.

    Args:
        reason: the tracer's message and explanation.
    """
    found = (remedy for parts, remedy in REMEDIES.items() if any(part in reason for part in parts))
    return next(found, "compute this in __init__ or in batch(), or with torch's operators alone")


REMEDIES: dict[tuple[str, ...], str] = {
    (
        "torch.compiler.disable",
        "function `disable`",
    ): "leave out torch.compiler.disable: a plan has the whole forward",
    ("as_proxy", "opaque object", "Generator"): "pass torch's functions tensors and numbers alone, "
    "and no `generator=`: the run seeds all random numbers. Those that are the same in every step belong into a buffer",
    (
        "Random.",
        "random.",
    ): "draw by torch.rand; what chance decides is a factor of 0 or 1, in place of a branch",
    ("builtin `time.",): "measure the time around the step, outside of the forward",
    (
        "requires_grad",
    ): "use detach() in the forward, or set requires_grad of parameters in model()",
    (
        "setattr is not supported on type",
        "register_forward",
    ): "register hooks in __init__, and keep what they see in a list that each forward clears",
    (
        "torch.nn.Parameter",
    ): "make modules with parameters in __init__: those of the forward are not trained",
    ("copy.deepcopy",): "copy modules in __init__; of a tensor, use clone()",
    ("function `backward`",): "return the loss alone, or compute a gradient by torch.autograd.grad",
    (
        "context_fn",
    ): "pass a function that is defined outside of the forward as context_fn, or none",
}
"""Parts of the tracer's messages -> what to do."""
