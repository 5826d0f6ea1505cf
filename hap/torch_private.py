"""Every use of an API that PyTorch does not promise to keep, in one place.

Checked on torch 2.13.0 (2.11 and 2.12 have the same names).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import get_decompositions as get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Raise ``RuntimeError`` unless ``condition`` is true, without waiting for a GPU to tell."""
    torch._assert_async(condition, message)


def fake_mode() -> Any:
    """A mode under which tensors have shapes and no data; real tensors may mix in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise when Python asks for data that they don't have."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


def dynamo_graph(module: nn.Module, args: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """The torch-level graph of ``module(*args)``; parameters stay attributes of the result.

    Raises:
        GraphBreak: the Python code depends on tensor data, or can't be traced.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    dynamo.reset()
    # Libraries hang methods of their own on Logger (warning_once); none changes the program.
    loggers = {f for f in vars(logging.Logger).values() if callable(f)}
    try:
        with warnings.catch_warnings(), dynamo.config.patch(ignore_logging_functions=loggers):
            warnings.simplefilter("ignore")
            captured: fx.GraphModule = dynamo_graph_capture_for_export(module)(*args)
    except capture_errors() as error:
        raise GraphBreak(error) from error
    return captured


def capture_errors() -> tuple[type[Exception], ...]:
    """What a capture raises when the code can't be one graph."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException, *data_dependent_errors())


class GraphBreak(Exception):
    """Capture met code that it can't trace; ``line`` is the user's line where known."""

    def __init__(self, error: Exception) -> None:
        text = str(error).strip()
        super().__init__(text.splitlines()[0] if text else type(error).__name__)
        self.detail = text
        stack = getattr(error, "real_stack", None) or ()
        frames = [f for f in stack if "/torch/" not in f.filename]
        self.line = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


@dataclass(frozen=True, slots=True)
class Joint:
    """A joint forward and backward at ATen level and what its ends mean.

    ``inputs`` and ``outputs`` are (role, target) in the order of placeholders and results;
    an output without a tensor (the gradient of an unused parameter) is ``None`` in the graph.
    """

    graph: fx.Graph
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


def joint_graph(
    module: fx.GraphModule,
    args: tuple[torch.Tensor, ...],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Joint:
    """Forward and backward of a captured module whose single output is the loss."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    def name(end: Any) -> tuple[str, str]:
        match end:
            case None:
                return "unused", ""
            case d.ParamAOTInput():
                return "parameter", end.target
            case d.BufferAOTInput():
                return "buffer", end.target
            case d.PlainAOTInput():
                return "input", str(end.idx)
            case d.TangentAOTInput():
                return "tangent", "loss"
            case d.PlainAOTOutput():
                return "loss", "loss"
            case d.GradAOTOutput():
                role, target = name(end.grad_of)
                return ("gradient" if role == "parameter" else "unused"), target
            case d.InputMutationAOTOutput():
                return "buffer", name(end.mutated_input)[1]
        raise AssertionError(f"unknown end of a joint graph: {end!r}")

    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(
            stack, module, args, decompositions=dict(decompositions)
        )
        graph = joint.graph_module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    return Joint(
        graph=graph,
        inputs=tuple(name(n.meta["desc"]) for n in placeholders),
        outputs=tuple(name(end) for end in graph.output_node().meta["desc"]),
    )


_UNSPLITTABLE = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.dynamic_output_shape: "the shapes of its results depend on the data",
    torch.Tag.data_dependent_output: "its result is a number that depends on the data",
}


def unsplittable(op: Any) -> str:
    """Why no row can describe an operator, as far as it says so itself; else nothing."""
    if op._schema.is_mutable:
        return "it writes into its inputs"
    if not any("Tensor" in str(r.type) for r in op._schema.returns):
        return "it returns no tensor, so all it does is a side effect"
    return next((why for tag, why in _UNSPLITTABLE.items() if tag in op.tags), "")


def takes_tensor(argument: Any) -> bool:
    """Is an argument of a schema one tensor that must be given?"""
    return str(argument.type) == "Tensor"


def plain_example(argument: Any) -> Any:
    """A value for an argument of a schema that is no tensor: a dim, a factor, a flag."""
    text = str(argument.type)
    if text.startswith("Optional"):
        return None
    simple = {"int": 1, "SymInt": 1, "float": 0.5, "number": 0.5, "bool": False}
    return simple.get(text, [1])
