"""Build a model and a batch without data, or with data where the user's code needs it. (torch)"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from hap.capture import torch_private
from hap.capture.fixed_entries import NoData, fix_entries
from hap.capture.model_file import ModelFile
from hap.errors import ModelError
from hap.ir.batch import Batch

Made = TypeVar("Made")
Progress = Callable[[str], None]


def build_without_data(file: ModelFile, progress: Progress) -> tuple[nn.Module, Batch]:
    """Return model and batch without data; with data if the file's code reads tensor values."""

    def batch() -> Batch:
        with torch_private.known_numbers():
            return fix_entries(file.batch(), file.fixed)

    return without_data(file.model, progress), without_data(batch, progress)


def without_data(make: Callable[[], Made], progress: Progress = lambda text: None) -> Made:
    """Return the result of ``make`` without data; with data if it reads tensor values."""
    needs_data: tuple[type[Exception], ...] = (NoData, *torch_private.data_dependent_errors())
    try:
        with torch_private.known_numbers(), torch_private.building_without_data():
            return make()
    except needs_data:
        progress("model() or batch() reads tensor data: building them with data")
        return make()
    except ModelError as error:
        if "FakeTensor" not in str(error.__cause__):
            raise
        progress("model() or batch() needs tensors with data: building them with data")
        return make()
