"""Weights of a checkpoint as ordinary safetensors, and a checkpoint of ordinary weights."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hap.complex_tensors import as_real
from hap.errors import CheckpointError, InputError
from hap.runtime.checkpoints.checkpoint_folder import (
    VERSION,
    CheckpointFolder,
    damaged,
    newest,
    read_index,
    sync_file,
)
from hap.runtime.checkpoints.checkpoint_match import MODEL
from hap.runtime.checkpoints.checkpoint_storage import file_of, metadata_of, opened

LARGEST_FILE_BYTES = 4 * 2**30
"""One file is in memory at a time."""

_SINGLE, _LIST = "model.safetensors", "model.safetensors.index.json"


def export(checkpoint: str, to: str) -> tuple[int, int, int]:
    """Write whole tensors under the model's names, in the layout of ``save_pretrained``.

    Returns the step, the number of tensors, and the number of files.

    Raises:
        CheckpointError: there is no complete checkpoint, or the disk is full.
        InputError: the folder is not empty.
    """
    path, _ = newest(checkpoint)
    index = read_index(path)
    with damaged(path):
        metadata_of(index)
        entries = index["tensors"]
        same = index["same"] or {n.removeprefix(MODEL): n.removeprefix(MODEL) for n in entries}
        sizes = {name: _nbytes(entries[MODEL + first]) for name, first in same.items()}
    parts: list[list[str]] = [[]]
    room = LARGEST_FILE_BYTES
    for name, size in sizes.items():
        if size > room and parts[-1]:
            parts.append([])
            room = LARGEST_FILE_BYTES
        parts[-1].append(name)
        room -= size
    count = len(parts)
    where: dict[str, str] = {}
    with _new_folder(to) as folder:
        for number, names in enumerate(parts, 1):
            file = _SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            with damaged(path):
                tensors = {n: _whole(path, MODEL + same[n], entries) for n in names}
                for name in (n for n in names if same[n] in index.get("complex", ())):
                    tensors[name] = _numbers(name, tensors[name])
            save_file(tensors, folder / file, {"format": "pt"})
            where |= dict.fromkeys(names, file)
        if count > 1:
            listed = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
            (folder / _LIST).write_text(json.dumps(listed, indent=2))
    return index["step"], len(same), count


def import_(weights: str, to: str) -> int:
    """Make the checkpoint ``step-0`` of weights, without an optimizer; returns their number.

    Raises:
        InputError: there are no weights in the file or folder, or ``to`` has checkpoints.
        CheckpointError: a file is damaged, or the disk is full.
    """
    folder = CheckpointFolder(Path(to).absolute())
    if folder.steps():
        raise InputError("there are checkpoints already", where=to, hint="give another folder")
    entries: dict[str, Any] = {}
    files: dict[str, int] = {}
    pairs: list[str] = []
    with _disk(to):
        folder.path.mkdir(parents=True, exist_ok=True)
        begun = folder.begin(0)
        try:
            for number, tensors in enumerate(_sources(Path(weights))):
                part = begun / file_of(number)
                for name, tensor in tensors.items():
                    _check_stored(name, tensor, weights)
                pairs += [name for name, t in tensors.items() if t.is_complex()]
                renamed = {
                    MODEL + n: as_real(t.detach().contiguous().clone()) for n, t in tensors.items()
                }
                save_file(renamed, part, {"format": "pt"})
                sync_file(part)
                files[part.name] = part.stat().st_size
                for key, tensor in renamed.items():
                    if key in entries:
                        what = f"two files hold {key.removeprefix(MODEL)}"
                        raise InputError(what, where=weights, hint="remove one of them")
                    entries[key] = _entry(tensor, part.name)
            if not entries:
                raise InputError("there are no tensors in it", where=weights)
            state = dict.fromkeys(("module", "optimizer", "scheduler", "scaler"))
            index = {
                "version": VERSION, "step": 0, "plan": "", "batch_size": 0, "world_size": 1,
                "same": {}, "complex": pairs, "extra": {}, **state, "files": files, "tensors": entries,
            }  # fmt: skip
            folder.publish(begun, 0, index, None)
        except BaseException:
            shutil.rmtree(begun, ignore_errors=True)
            raise
    return len(entries)


def _check_stored(name: str, tensor: torch.Tensor, where: str) -> None:
    """Raise ``InputError`` for a tensor that a checkpoint can't hold."""
    kind = str(tensor.layout) if tensor.layout != torch.strided else ""
    kind = kind or ("on the meta device, without data" if tensor.is_meta else "")
    kind = kind or (f"quantized ({tensor.dtype})" if tensor.is_quantized else "")
    if kind:
        raise InputError(
            f"the tensor {name!r} is {kind.removeprefix('torch.')}", where=where,
            hint="save it as a dense tensor of numbers",
        )  # fmt: skip


def _numbers(name: str, pairs: torch.Tensor) -> torch.Tensor:
    """Return complex numbers of pairs.

    Raises:
        InputError: safetensors have no such numbers in double precision.
    """
    if pairs.dtype != torch.float32:
        raise InputError(
            f"the tensor {name!r} is of dtype complex128, which safetensors can't hold",
            hint="load the checkpoint in one process with hap.load, and save it with torch.save",
        )
    return torch.view_as_complex(pairs)


def _entry(tensor: torch.Tensor, file: str) -> dict[str, Any]:
    """Return the entry of a whole tensor in an index."""
    shape = list(tensor.shape)
    chunks = [[[0] * tensor.dim(), shape, file]]
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape, "chunks": chunks}


def _sources(weights: Path) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors of each file."""
    if weights.is_dir():
        files = sorted(weights.glob("*.safetensors"))
        if not files:
            raise InputError(
                "there are no safetensors in this folder", where=str(weights),
                hint="give the folder that save_pretrained or hap export wrote, or a file",
            )  # fmt: skip
    elif weights.is_file():
        files = [weights]
    else:
        raise InputError("there is no such file or folder", where=str(weights))
    for path in files:
        if path.suffix == ".safetensors":
            with opened(path) as file:
                yield {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            yield _state_dict(path)


def _state_dict(path: Path) -> Mapping[str, torch.Tensor]:
    """Read a file of ``torch.save`` without running anything that is pickled in it."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many kinds for a damaged file
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise InputError(
            f"this file holds no state_dict that can be read safely: {first}", where=str(path),
            hint="save model.state_dict() alone with torch.save, or use safetensors",
        ) from None  # fmt: skip
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor) for name, t in found.items()
    ):  # fmt: skip
        raise InputError(
            "this file holds no state_dict: not names and tensors alone", where=str(path),
            hint="save model.state_dict() with torch.save",
        )  # fmt: skip
    return found


def _whole(path: Path, name: str, entries: Mapping[str, Any]) -> torch.Tensor:
    entry = entries[name]
    try:
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for offsets, sizes, file in entry["chunks"]:
            with opened(path / file) as chunks:
                part = whole
                for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
                    if start < 0:
                        raise ValueError(f"a chunk of {name} begins at {start}")
                    part = part.narrow(dim, start, size)
                part.copy_(chunks.get_tensor(name))
    except (RuntimeError, OverflowError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(f"the shape or a chunk of {name} is wrong: {first}") from error
    return whole


def _nbytes(entry: Mapping[str, Any]) -> int:
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return int(math.prod(entry["shape"])) * dtype.itemsize


@contextmanager
def _new_folder(to: str) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``to`` if nothing fails."""
    final = Path(to).absolute()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise InputError("this is a file, or a folder with files", where=to, hint="change --to")
    part = final.with_name(f"{final.name}.tmp")
    with _disk(to):
        part.mkdir(parents=True)
        try:
            yield part
            os.replace(part, final)
        except BaseException:
            shutil.rmtree(part)
            raise


@contextmanager
def _disk(to: str) -> Iterator[None]:
    """Report errors of the disk for people."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot be written: {error}", where=to,
            hint="free the disk, or give another folder",
        ) from None  # fmt: skip
