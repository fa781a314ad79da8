"""nn.Embedding by rows of its table."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .. import functional
from ..groups import resolve
from .linear import SEQUENCE_DIM
from .parameters import SplitForward, check_untouched, distribute, local

__all__ = ["VocabEmbedding", "VocabForward"]


class VocabForward(SplitForward):
    """The lookup in this rank's rows, summed over the ranks; see VocabEmbedding."""

    style = "vocab_embedding"

    def __init__(self, module: nn.Embedding, group_name: str, *, scatter_dim: int | None = None) -> None:
        super().__init__(module, group_name)
        self.scatter_dim, self.sequence_parallel = scatter_dim, scatter_dim is not None

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [..], equal on all ranks, -> [.., embedding_dim]."""
        self.check_ties()
        table = cast(nn.Embedding, self.module)
        return functional.vocab_parallel_embedding(
            ids, cast(Tensor, local(table.weight)), group=self.group_name, vocab_size=table.num_embeddings,
            padding_idx=table.padding_idx, scale_grad_by_freq=table.scale_grad_by_freq,
            scatter_dim=self.scatter_dim,
        )  # fmt: skip


class VocabEmbedding(ParallelStyle):
    """Rows of an nn.Embedding split over the mesh: weight Shard(0), in the convention of torch.chunk.

    ids [..], equal on all ranks, -> [.., embedding_dim], equal on all ranks, or this rank's chunk of `sequence_dim`
    with sequence_parallel. Exact: one rank adds a row, the others zeros. dW_r: the rows of this rank. An output head
    tied to it takes ColumnLinear, and stays tied. Raises TypeError for anything but a plain nn.Embedding, ValueError
    for max_norm and sparse, which need the whole table.
    """

    def __init__(self, *, sequence_parallel: bool = False, sequence_dim: int = SEQUENCE_DIM) -> None:
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_untouched("VocabEmbedding", module)
        if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
            raise TypeError(
                f"VocabEmbedding: expected an nn.Embedding with its own forward, got {type(module).__name__}"
            )
        if module.max_norm is not None or module.sparse:
            raise ValueError(
                "VocabEmbedding: max_norm and sparse need the whole table on one rank; leave this embedding out of "
                "the plan"
            )
        forward = VocabForward(
            module,
            resolve(device_mesh).name,
            scatter_dim=self.sequence_dim if self.sequence_parallel else None,
        )
        distribute("VocabEmbedding", module, {"weight": Shard(0)}, device_mesh, self.src_data_rank, forward)
        return module
