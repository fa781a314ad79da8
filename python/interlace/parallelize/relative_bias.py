"""Relative attention biases learned per head: an embedding of which a rank holds the columns of its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..groups import GroupInfo
from ..modules.holders import sum_over_holders
from ..modules.layout import ParameterLayout, take
from ..modules.shard import Shards
from ..modules.split import SplitModule

if TYPE_CHECKING:
    from .plan import Make, Plan

__all__ = ["HeadEmbedding", "make_head_embedding"]


class HeadEmbedding(SplitModule, nn.Embedding):
    """An embedding of one column per head, of which this rank holds those of its heads.

    ids [..] -> [.., heads of this rank]; weight [num_embeddings, heads of this rank]. Columns that several ranks
    hold (more ranks than heads) have the sum of their gradients.
    """

    style = "head_columns"

    def __init__(self, embedding: nn.Embedding, shards: Shards, info: GroupInfo) -> None:
        nn.Module.__init__(self)
        self.group_name, self.rank, self.world_size = info.name, info.rank, info.world_size
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.shards = shards
        with torch.no_grad():
            own = take(embedding.weight, 1, shards.ranges(info.rank)).clone()
        self.weight = nn.Parameter(own, requires_grad=embedding.weight.requires_grad)
        self.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        """ids -> biases of this rank's heads."""
        weight: Tensor | None = self.weight
        if self.shards.overlapping:
            held = sum_over_holders([weight], [self.shards], group=self.group_name, rank=self.rank, dims=[1])
            weight = held[0]
        assert weight is not None
        return F.embedding(ids, weight)

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """How the whole weight is cut."""
        shape = (self.num_embeddings, self.embedding_dim)
        return {"weight": ParameterLayout.of_shards(shape, 1, self.shards, self.group_name)}

    def extra_repr(self) -> str:
        """Global and local sizes, as `print(model)` shows them."""
        return f"{self.num_embeddings}, {self.embedding_dim}, local={tuple(self.weight.shape)}"


def make_head_embedding(shards: Shards) -> Make:
    """What builds a HeadEmbedding of these shards in place of an nn.Embedding."""

    def make(old: nn.Module, info: GroupInfo, plan: Plan) -> nn.Module:
        assert isinstance(old, nn.Embedding)  # the finder saw to it
        return HeadEmbedding(old, shards, info)

    return make
