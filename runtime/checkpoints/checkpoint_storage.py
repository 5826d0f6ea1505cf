"""Storage of torch.distributed.checkpoint: a safetensors file per rank and an index in JSON.

torch's own writer keeps its index in a pickle. Nothing here is pickled or unpickled from a file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from hap.errors import CheckpointError
from hap.runtime.checkpoints.checkpoint_folder import VERSION, CheckpointFolder, damaged, sync_file

_FILE = MetadataIndex("")  # the result that stands for a whole file


class SafetensorsWriter(StorageWriter):
    """Writes one checkpoint into a :class:`CheckpointFolder`.

    Args:
        state: everything but tensors, as JSON; that of rank 0 is written.
        own: what differs between ranks, as JSON; it goes into the header of the rank's file.
        keep: the number of checkpoints that stay; ``None``: all.
        part: the folder of the unpublished checkpoint, if rank 0 is not to make one.
    """

    def __init__(
        self, folder: CheckpointFolder, step: int, rank: int, state: Mapping[str, Any],
        own: Mapping[str, Any], keep: int | None, part: Path | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._step, self._rank = folder, step, rank
        self._part = part
        self._state, self._own, self._keep = state, own, keep

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:
            self._part = self._folder.begin(self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans with the name of the folder that rank 0 made."""
        assert self._part is not None
        return [replace(plan, storage_data=self._part.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        folder = self._part or self._folder.path / str(plan.storage_data)
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {self._rank} does not see the folder that rank 0 made", where=str(folder),
                hint="all machines must see the folder, so put it on a shared file system; no other run may "
                "save into it",
            )  # fmt: skip
        tensors = {item.index.fqn: _resolved(planner, item) for item in plan.items}
        path = folder / file_of(self._rank)
        starts = {i.index.fqn: {"saved_offsets": list(i.index.offset or ())} for i in plan.items}
        header = {
            "format": "pt",
            "DCP_SHARDING_INFO": json.dumps(starts),  # as torch's HuggingFaceStorageReader reads it
            "rank": json.dumps(self._own),
        }
        save_file(tensors, path, header)
        sync_file(path)
        results = [
            WriteResult(item.index, tensors[item.index.fqn].nbytes, path.name)
            for item in plan.items
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, WriteResult(_FILE, path.stat().st_size, path.name)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        every = [result for of_rank in results for result in of_rank]
        file = {r.index: r.storage_data for r in every if r.index != _FILE}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            tensors[name] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "shape": list(entry.size),
                "chunks": [
                    [list(c.offsets), list(c.sizes), file[MetadataIndex(name, c.offsets)]]
                    for c in entry.chunks
                ],
            }
        index = {
            "version": VERSION,
            **self._state,
            "files": {r.storage_data: r.size_in_bytes for r in every if r.index == _FILE},
            "tensors": tensors,
        }
        assert self._part is not None
        self._folder.publish(self._part, self._step, index, self._keep)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class SafetensorsReader(StorageReader):
    """Reads one checkpoint; ``index`` is that of :func:`checkpoint_folder.read_index`."""

    def __init__(self, path: Path, index: Mapping[str, Any]) -> None:
        self._path = path
        with damaged(path):
            self._metadata, self._files = metadata_of(index)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._files[item.storage_index], []).append(item)
        for name, items in by_file.items():
            with opened(self._path / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_block(file, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{rank:05d}.safetensors"


def own_state(path: Path, rank: int, world_size: int, index: Mapping[str, Any]) -> Any:
    """Return what a rank saved in its own file; rank 0's if the number of ranks differs."""
    name = file_of(rank if world_size == index["world_size"] else 0)
    with opened(path / name) as file:
        return json.loads((file.metadata() or {}).get("rank", "{}"))


def opened(path: Path) -> Any:
    """Open a safetensors file.

    Raises:
        CheckpointError: the file is damaged or of another format.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"damaged, or no safetensors file: {error}", where=str(path),
            hint="load an older checkpoint, by its own folder",
        ) from None  # fmt: skip


def metadata_of(index: Mapping[str, Any]) -> tuple[Metadata, dict[MetadataIndex, str]]:
    """Return an index as torch.distributed.checkpoint has it, and the file of each chunk."""
    tensors: dict[str, Any] = {}
    files = {}
    for name, entry in index["tensors"].items():
        chunks = []
        for offsets, sizes, file in entry["chunks"]:
            if file not in index["files"]:
                raise ValueError(f"{name} is in the unknown file {file}")
            files[MetadataIndex(name, offsets)] = file
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        if sum(math.prod(c.sizes) for c in chunks) != math.prod(entry["shape"]):
            raise ValueError(f"{name} is not whole")
        dtype = getattr(torch, entry["dtype"])
        tensors[name] = TensorStorageMetadata(
            TensorProperties(dtype), torch.Size(entry["shape"]), chunks
        )
    return Metadata(tensors), files


def _block(file: Any, item: ReadItem) -> torch.Tensor:
    name = item.storage_index.fqn
    if not item.lengths:
        whole: torch.Tensor = file.get_tensor(name)
        return whole
    places = zip(item.storage_offsets, item.lengths, strict=True)
    part: torch.Tensor = file.get_slice(name)[tuple(slice(start, start + n) for start, n in places)]
    return part


def _resolved(planner: SavePlanner, item: Any) -> torch.Tensor:
    data = planner.resolve_data(item)
    assert isinstance(data, torch.Tensor)
    return data
