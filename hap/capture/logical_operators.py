"""Functions of torch that a captured graph calls by logical operators.

They do not depend on the capturing machine, have rows that torch's own operators lack, and run by the
best kernel of each device. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from hap.capture import (
    attention,
    batch_norm,
    cross_entropy,
    embedding_bag,
    instance_norm,
    masked_scatter,
    recurrence,
    replaced_functions,
    tensor_constants,
)

LOGICAL: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention.scaled_dot_product_attention,
    F.cross_entropy: cross_entropy.cross_entropy,
    F.batch_norm: batch_norm.batch_norm,
    F.embedding_bag: embedding_bag.embedding_bag,
    F.instance_norm: instance_norm.instance_norm,
    torch.masked_scatter: masked_scatter.masked_scatter,
    torch.tensor: tensor_constants.tensor,
    F.dropout1d: attention.channel_dropout,
    F.dropout2d: attention.channel_dropout,
    F.dropout3d: attention.channel_dropout,
    # Modules call these by dynamo_private.in_one_piece, other code as torch.lstm.
    **{getattr(torch, kind): function for kind, function in recurrence.LAYERS.items()},
    **replaced_functions.REPLACED,
}
"""Functions of torch -> the functions that replace them."""


METHODS: dict[Any, Callable[..., Any]] = {"masked_scatter": torch.masked_scatter}
"""Methods of tensors -> the functions that do the same."""


def name_logical(traced: fx.GraphModule) -> None:
    """Replace torch's functions in the graph, also inside of checkpoints."""
    for graph in (m for m in traced.modules() if isinstance(m, fx.GraphModule)):
        for node in graph.graph.nodes:
            if node.op == "call_method" and node.target in METHODS:
                node.op, node.target = "call_function", METHODS[node.target]
            node.target = LOGICAL.get(node.target, node.target)
        graph.recompile()
