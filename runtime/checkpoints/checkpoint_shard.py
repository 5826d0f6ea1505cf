"""``StoredShard``: a rank's block of a tensor, by the protocol of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hap.complex_tensors import as_real


class StoredShard:
    """A block of a tensor: ``tensor`` starts at ``offsets`` in a whole tensor of ``shape``.

    Blocks of the ranks may have unlike sizes and may be empty. They may be cut along one dim, or
    along two. DTensor is not used: its chunks are even. A complex tensor is stored as a pair of real ones, a
    view of its memory.

    Args:
        written: whether this rank writes the block. Exactly one of the ranks that hold the same
            elements does; see :func:`hap.runtime.checkpoints.checkpoint_layout.written_by`.
    """

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], offsets: Sequence[int], *, written: bool = True
    ) -> None:
        self.tensor = as_real(tensor)
        self.shape = torch.Size(shape)
        self.offsets = torch.Size(offsets)
        self.written = written

    @staticmethod
    def whole(tensor: Tensor, *, written: bool = True) -> StoredShard:
        """Return the shard that is the whole tensor."""
        block = as_real(tensor)
        return StoredShard(block, block.shape, [0] * block.dim(), written=written)

    def like(self, tensor: Tensor) -> StoredShard:
        """Return the same block with other values, such as an optimizer's state."""
        return StoredShard(tensor, self.shape, self.offsets, written=self.written)

    def size(self) -> torch.Size:
        """Return the shape of the whole tensor."""
        return self.shape

    def __create_write_items__(self, fqn: str, shard: Any) -> list[WriteItem]:
        if not self.written or (self.tensor.numel() == 0 and self.shape.numel() > 0):
            return []
        data = TensorWriteData(
            chunk=self._chunk(),
            properties=TensorProperties.create_from_tensor(self.tensor),
            size=self.shape,
        )
        index = MetadataIndex(fqn, self.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is not None and index.offset != self.offsets:
            raise AssertionError(f"{index.fqn} has no shard at {tuple(index.offset)} on this rank")
        return self.tensor

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.tensor.shape)


class ShardSavePlanner(DefaultSavePlanner):
    """Plans to write a flat dict of shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _found(self.state_dict, index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans to read into a flat dict of shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _found(self.state_dict, index)


def _found(shards: Mapping[str, StoredShard], index: MetadataIndex) -> Tensor:
    return shards[index.fqn].__get_tensor_shard__(index)
