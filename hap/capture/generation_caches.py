"""Keys and values that models of ``transformers`` keep for the next token: no part of a training step."""

from __future__ import annotations

from typing import Any

from torch import nn


def leave_out_caches(module: nn.Module) -> None:
    """Let a model, which is a copy, return none of them. Its loss is the same, and its layers write nowhere."""
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
