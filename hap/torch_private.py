"""Every use of an API that PyTorch does not promise to keep, in one place.

Checked on torch 2.13.0 (2.11 and 2.12 have the same names).
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
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


def is_fake(tensor: torch.Tensor) -> bool:
    """Has ``tensor`` a shape and no data?"""
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


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
        with (
            warnings.catch_warnings(),
            dynamo.config.patch(ignore_logging_functions=loggers, allow_rnn=True),
            _without_hints(),
        ):
            warnings.simplefilter("ignore")
            captured: fx.GraphModule = dynamo_graph_capture_for_export(module)(*args)
    except capture_errors() as error:
        raise GraphBreak(error) from error
    return captured


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Two things that modules do for the sake of other ways to run them are passed over.

    ``nn.Transformer`` reads its masks to find causal ones, for a faster kernel; the mask itself
    says as much. Audio models ask for the gradient of their input, which reaches no parameter, so
    that reentrant checkpoints run.
    """
    from torch._dynamo.variables import builtin
    from torch._dynamo.variables.constant import ConstantVariable
    from torch.nn.modules import transformer

    owner: Any = builtin.BuiltinVariable
    name = "call_setattr"  # until torch 2.12
    if hasattr(builtin, "SetAttrBuiltinVariable"):
        owner, name = builtin.SetAttrBuiltinVariable, "_call_setattr"
    detect, assign = transformer._detect_is_causal_mask, getattr(owner, name)

    def given(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    def set_attribute(self: Any, tx: Any, obj: Any, key: Any, value: Any) -> Any:
        asks = obj.is_tensor() and key.as_python_constant() == "requires_grad"
        if asks and value.as_python_constant() is True:
            return ConstantVariable.create(None)
        return assign(self, tx, obj, key, value)

    transformer._detect_is_causal_mask = given
    setattr(owner, name, set_attribute)
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = detect
        setattr(owner, name, assign)


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


def checkpointed(node: fx.Node) -> int | None:
    """The number of the ``torch.utils.checkpoint`` that an operator of a joint graph runs in.

    What the checkpoint's own policy says to save counts as outside of it.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    policy = node.meta.get("recompute")
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("ac_graph_id", 0) if policy in again else None
