"""Imports of the packages that models come from, which are optional."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

EXTRAS = {
    "transformers": "models", "torchvision": "zoo", "timm": "zoo", "diffusers": "libraries", "monai": "libraries",
    "open_clip": "libraries", "peft": "libraries", "segmentation_models_pytorch": "libraries",
    "torch_geometric": "libraries", "x_transformers": "libraries",
}  # fmt: skip
"""Optional package -> the extra of this project that installs it."""


def missing(package: str) -> str:
    """Return why entries of a package can't be built here; empty if they can.

    Args:
        package: its name; empty: torch alone.
    """
    if not package or find_spec(package):
        return ""
    return f"the package {package} is not installed: pip install -e '.[{EXTRAS[package]}]'"


@cache
def package(name: str) -> ModuleType:
    """Import a package beside any build of PyTorch.

    A torchvision for CUDA describes operators that its library does not define beside a PyTorch for
    CPUs. No model of the table uses them. The other packages import torchvision, if it is there.
    """
    if name != "torchvision" and find_spec("torchvision"):
        package("torchvision")
    with _without_missing_operators():
        return import_module(name)


@contextlib.contextmanager
def _without_missing_operators() -> Iterator[None]:
    register = torch.library.register_fake

    def register_if_there(op: Any, *args: Any, **kwargs: Any) -> Any:
        def decorate(function: Any) -> Any:
            try:
                return register(op, *args, **kwargs)(function)
            except RuntimeError as error:
                if "does not exist" not in str(error):
                    raise
                return function

        return decorate

    torch.library.register_fake = register_if_there  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.library.register_fake = register
