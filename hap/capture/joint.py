"""The forward of a step as one graph, and its backward."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from hap.capture import dynamo_private, regions_private, torch_private
from hap.capture.hidden_tensors import not_differentiated
from hap.capture.known_tensors import name_known
from hap.capture.layer_calls import LayerCall
from hap.capture.local_counts import DECOMPOSITIONS
from hap.capture.logical_operators import name_logical
from hap.capture.padding import keep_all_rows
from hap.capture.read_numbers import numbers_as_tensors
from hap.capture.repeated_layers import copy_repeated
from hap.capture.source_lines import line_of, source_of
from hap.errors import HapError, ModelError, PlanningStopped

_LOGGER = logging.getLogger(__name__)

Kinds = tuple[type[nn.Module], ...]


def joint_of(
    step: nn.Module, tensors: Any, kinds: Kinds, calls: Sequence[LayerCall]
) -> torch_private.Joint:
    """Return the forward of a step with its backward.

    Args:
        step: calls the user's model, its submodule ``module``.
        kinds: classes of its layers that are traced once.
        calls: what each call of their forwards ran before; see :func:`hap.capture.layer_calls.watched`.

    Raises:
        ModelError, GraphBreak: the forward can't be traced as one graph, or not be differentiated.
    """
    if kinds:
        try:
            return _traced(step, tensors, kinds, calls)
        except PlanningStopped:
            raise
        except Exception as error:  # Not all that a layer may do can be traced once.
            # The whole trace raises the errors of the model.
            _LOGGER.info("layers are traced one by one: %s: %s", type(error).__name__, error)
    return _traced(step, tensors)


def _traced(
    step: nn.Module, tensors: Any, kinds: Kinds = (), calls: Sequence[LayerCall] = ()
) -> torch_private.Joint:
    graph = dynamo_private.dynamo_graph(step, tensors, kinds, calls)
    if asked := graph.meta["sizes"].asked:
        _check_rows_needed(step, tensors, len(asked))
    _check_replaced_data(graph.graph)
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target) in _PROGRAMS:
            raise programs_inside(node)
    name_known(graph)
    keep_all_rows(graph)
    numbers_as_tensors(graph)
    name_logical(graph)
    once = regions_private.differentiated_once(tensors) if kinds else contextlib.nullcontext()
    with once:
        joint = _differentiated(graph, tensors, step.get_submodule("module"))
    copy_repeated(joint.graph)
    return joint


def _check_rows_needed(step: nn.Module, tensors: Any, asked: int) -> None:
    """Raise ``GraphBreak`` unless the loss has no gradient where a mask chooses no rows.

    One device cannot train such a batch either, so the branch for chosen rows is all that a program needs.

    Args:
        asked: the number of masks of which the forward asks whether they choose any.
    """
    if asked == 1:
        without = dynamo_private.dynamo_graph(step, tensors, no_rows=True)
        (returned,) = without.graph.find_nodes(op="output")[0].args
        losses = [n.meta["example_value"] for n in returned if isinstance(n, fx.Node)]
        if not any(loss.requires_grad for loss in losses):
            return
    dynamo_private.dynamo_graph(step, tensors, no_rows=None)


_PROGRAMS = ("cond", "while_loop", "scan", "map_impl")
"""Operators that run programs which stay programs in the graph; torch can't differentiate all of them."""


def programs_inside(node: fx.Node) -> ModelError:
    """Return the error for an operator that runs programs."""
    return ModelError(
        f"the step runs programs inside of an operator ({node.target}), which hap can't split",
        where=source_of(node),
        hint="compute both branches and choose by torch.where; write a loop in Python, with the same "
        "number of iterations for every batch",
    )


def _check_replaced_data(graph: fx.Graph) -> None:
    """Raise ``ModelError`` if the forward gives new memory to a tensor that the model holds."""
    for node in graph.nodes:
        given: Any = node.args[0] if node.target == Tensor.set_ else None
        if given is not None and given.op == "placeholder":
            raise ModelError(
                "the forward replaces the data of a parameter, a buffer or the batch",
                where=source_of(node),
                hint="write into it by self.b.copy_(...), not by self.b.data = ...; of the parameters, the forward "
                "may change those that require no grad, and only the optimizer the others",
            )


def _differentiated(traced: fx.GraphModule, tensors: Any, module: nn.Module) -> torch_private.Joint:
    """Return the forward of a module with its backward.

    Raises:
        ModelError: an operator has no derivative, for example.
    """
    with warnings.catch_warnings(record=True) as forward:  # the line in the forward, if it is known
        warnings.simplefilter("always")
        try:
            return torch_private.joint_graph(traced, tensors, DECOMPOSITIONS)
        except torch_private.data_dependent_errors():
            raise
        except (RuntimeError, NotImplementedError) as error:
            lines = [line_of(str(given.message)) for given in forward]
            raise ModelError(
                f"the step can't be differentiated: {str(error).partition(chr(10))[0]}",
                where=next((line for line in reversed(lines) if line), ""),
                hint="detach the tensor there, or compute it with operators that have a derivative",
            ) from error
        except HapError:
            raise
        except Exception as error:
            raise not_differentiated(module, error) from error
