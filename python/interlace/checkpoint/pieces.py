"""A tensor that torch.distributed.checkpoint sees whole, though this rank holds pieces of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils._pytree import tree_map

from ..modules.held import Box, held_boxes, local_part
from ..modules.layout import ParameterLayout

__all__ = ["PiecesOfTensor"]

_MAPPED = (
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.copy_.default,
    torch.ops.aten.new_empty.default,
)


class PiecesOfTensor(Tensor):
    """Size and dtype of the whole; memory of what this rank holds: `local`, with its boxes in the whole.

    Speaks the protocol by which torch.distributed.checkpoint writes and reads objects in chunks. `owned` boxes are
    written, so that overlaps are written once; these and the `foreign` ones are read, straight into the memory of
    `local`. Other uses than copying raise RuntimeError.
    """

    local: Tensor
    owned: list[Box]
    foreign: list[Box]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], local: Tensor, owned: list[Box], foreign: list[Box]
    ) -> PiecesOfTensor:
        return Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, shape, dtype=local.dtype, device=local.device
        )

    def __init__(self, shape: tuple[int, ...], local: Tensor, owned: list[Box], foreign: list[Box]) -> None:
        self.local, self.owned, self.foreign = local, owned, foreign

    @classmethod
    def of(cls, tensor: Tensor, layout: ParameterLayout, rank: int) -> PiecesOfTensor:
        """Of a parameter, or a tensor of its shape, plain or a DTensor, that `layout` cuts."""
        owned, foreign = (held_boxes(tensor, layout, rank, owned=mine) for mine in (True, False))
        if 0 in layout.shape and rank == 0:  # an empty whole is a chunk too, or its name would be missing
            nothing = (0,) * len(layout.shape)
            owned = [Box(nothing, nothing, tuple(local_part(tensor).shape))]
        return cls(layout.shape, local_part(tensor), owned, foreign)

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.start)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.size()),
            )
            for box in self.owned
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in (*self.owned, *self.foreign)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in (*self.owned, *self.foreign):
            if tuple(index.offset or ()) == box.start:
                return box.of_local(self.local)
        raise ValueError(f"{index.fqn}: this rank holds no piece at {tuple(index.offset or ())}")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PiecesOfTensor({list(self.shape)}, {self.dtype}, owned={self.owned}, foreign={self.foreign})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _MAPPED:
            raise RuntimeError(
                f"{func}: a piece of a distributed state dict goes to torch.distributed.checkpoint only; "
                "use interlace.full_state_dict for tensors"
            )
        pieces = next(arg for arg in args if isinstance(arg, PiecesOfTensor))
        args, kwargs = tree_map(
            lambda t: t.local if isinstance(t, PiecesOfTensor) else t, (args, kwargs or {})
        )
        if (
            func is torch.ops.aten.new_empty.default
        ):  # asked for by asynchronous saves, which then put a copy in it
            out = pieces.local.new_empty(pieces.local.shape, **kwargs)
        else:
            out = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            return pieces
        return PiecesOfTensor(tuple(pieces.shape), out, pieces.owned, pieces.foreign)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.size))
