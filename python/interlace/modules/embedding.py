"""`nn.Embedding` whose vocabulary is cut over a group, and the output head that goes with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..groups import Group, resolve
from .layout import ParameterLayout
from .linear import SEQUENCE_DIM, ColumnParallelLinear, check_splittable
from .products import column_products
from .shard import Shards
from .split import SplitModule

__all__ = ["VocabParallelEmbedding", "VocabParallelHead", "check_embedding", "split_class"]


class VocabParallelEmbedding(SplitModule, nn.Embedding):
    """Y = W[ids], with the rows of W, the vocabulary, cut as torch.chunk does; vocabularies of any size.

    ids [..], equal on all ranks, -> [.., embedding_dim], equal on all ranks and bitwise what the whole embedding
    gives; with sequence_parallel this rank's chunk along `sequence_dim` of it. weight [rows of this rank,
    embedding_dim]; the weight of a `VocabParallelHead` or `ColumnParallelLinear` of the same sizes may be the same
    Parameter. dW is local, or follows one gather of dY with sequence_parallel.
    `num_embeddings` is the whole vocabulary. padding_idx and scale_grad_by_freq mean what they mean in nn.Embedding.
    Raises ValueError for ids outside the vocabulary, for sparse=True (the gradient would be sparse on one rank's
    rows only) and for max_norm (it would renormalise rows in the forward, on each rank others).
    """

    style = "vocab_embedding"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        nn.Module.__init__(self)  # nn.Embedding's would allocate the whole weight
        if num_embeddings < 0 or embedding_dim < 0:
            raise ValueError(
                f"VocabParallelEmbedding: num_embeddings={num_embeddings}, embedding_dim={embedding_dim}; "
                "expected sizes >= 0"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        _check_options("VocabParallelEmbedding", self)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"VocabParallelEmbedding: padding_idx={padding_idx} is not within num_embeddings={num_embeddings}"
            )
        if padding_idx is not None:
            self.padding_idx = padding_idx % num_embeddings
        self._take_place(group, sequence_parallel, sequence_dim)
        rows = self.shards.sizes[self.rank]
        self.weight = nn.Parameter(torch.empty(rows, embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def _take_place(self, group: Group, sequence_parallel: bool, sequence_dim: int) -> None:
        info = resolve(group)
        self.group_name, self.rank, self.world_size = info.name, info.rank, info.world_size
        self.shards = Shards.chunk(self.num_embeddings, info.world_size)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """nn.Embedding's own draw, of which this rank keeps its rows: ranks seeded alike hold one embedding.

        Needs the memory of the whole weight for a moment.
        """
        if self.weight.is_meta:
            return
        whole = torch.empty(
            self.num_embeddings, self.embedding_dim, device=self.weight.device, dtype=self.weight.dtype
        )
        nn.init.normal_(whole)
        if self.padding_idx is not None:
            whole[self.padding_idx].zero_()
        start, end = self.shards.bounds(self.rank)
        self.weight.copy_(whole[start:end])

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        group: Group = None,
        *,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> VocabParallelEmbedding:
        """This rank's rows of `embedding`, copied; dtype, device, requires_grad and train mode are kept.

        A subclass of nn.Embedding keeps its own forward around the lookup that it gets from `super().forward`.
        Raises TypeError for what is no nn.Embedding or is split already, ValueError for sparse and max_norm.
        """
        check_embedding("from_embedding", embedding)
        module = split_class(type(embedding)).__new__(split_class(type(embedding)))
        assert isinstance(module, VocabParallelEmbedding)
        for name, value in vars(embedding).items():
            module.__dict__[name] = value.copy() if isinstance(value, dict) else value
        module._take_place(group, sequence_parallel, sequence_dim)
        start, end = module.shards.bounds(module.rank)
        weight = embedding.weight
        rows = weight.detach()[start:end].clone(memory_format=torch.contiguous_format)
        module._parameters["weight"] = nn.Parameter(rows, requires_grad=weight.requires_grad)
        return module

    def forward(self, ids: Tensor) -> Tensor:
        """ids -> their rows; see the class."""
        return functional.vocab_parallel_embedding(
            ids, self.weight, group=self.group_name, vocab_size=self.num_embeddings,
            padding_idx=self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq,
            scatter_dim=self.sequence_dim if self.sequence_parallel else None,
        )  # fmt: skip

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """How the whole weight is cut."""
        shape = (self.num_embeddings, self.embedding_dim)
        return {"weight": ParameterLayout.of_shards(shape, 0, self.shards, self.group_name)}

    def extra_repr(self) -> str:
        """nn.Embedding's, and what this rank holds."""
        return f"{super().extra_repr()}, local={tuple(self.weight.shape)}, rank={self.rank}/{self.world_size}"


def _check_options(op: str, embedding: nn.Embedding) -> None:
    if embedding.max_norm is not None:
        raise ValueError(
            f"{op}: max_norm={embedding.max_norm} changes rows in the forward, on each rank others; not supported"
        )
    if embedding.sparse:
        raise ValueError(f"{op}: sparse=True is not supported; the gradient of a shard is dense")


def check_embedding(op: str, embedding: nn.Module) -> None:
    """Raise TypeError or ValueError unless the vocabulary of `embedding` can be cut."""
    if isinstance(embedding, VocabParallelEmbedding):
        raise TypeError(f"{op}: the embedding is a {type(embedding).__name__} already; split the original")
    if not isinstance(embedding, nn.Embedding):
        raise TypeError(f"{op}: expected an nn.Embedding, got {type(embedding).__name__}")
    if hasattr(embedding, "parametrizations") or "forward" in vars(embedding):
        raise TypeError(
            f"{op}: {type(embedding).__name__} has a parametrized weight or a forward of its own; "
            "split before parametrizing or wrapping it"
        )
    _check_options(op, embedding)


@cache
def split_class(base: Any) -> Any:
    """`base`, a class of embeddings, with its lookup cut: its super().forward is VocabParallelEmbedding's."""
    if base is nn.Embedding:
        return VocabParallelEmbedding
    body = {"__reduce_ex__": _reduce, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(f"VocabParallel{base.__name__}", (base, VocabParallelEmbedding), body)


def _reduce(self: nn.Embedding, protocol: Any) -> tuple[Any, ...]:
    return _blank, (type(self).__bases__[0],), self.__dict__


def _blank(base: type[nn.Embedding]) -> nn.Embedding:
    """An instance without contents, for pickle: a class made at run time is not found by its name."""
    return split_class(base).__new__(split_class(base))


class VocabParallelHead(ColumnParallelLinear):
    """Output head: logits = X W^T + b with the rows of W, the vocabulary, cut as torch.chunk does.

    x [.., in_features], equal on all ranks (this rank's shard of the sequence with sequence_parallel), -> logits
    [.., out_features] on all ranks, or those of this rank with gather_output=False. weight [rows of this rank,
    in_features], which may be the Parameter of a `VocabParallelEmbedding`; bias [out_features], whole on every
    rank and added behind the gather, so it may be tied to any other parameter.
    `loss(x, target)` is the cross entropy of the logits, which are then neither gathered nor, with chunk_rows,
    held for all rows at a time.
    """

    style = "vocab_head"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group: Group = None,
        gather_output: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        super().__init__(
            in_features, out_features, False, device, dtype, group=group, gather_output=gather_output,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, return_bias=True,
        )  # fmt: skip
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            self._draw_bias()

    def reset_parameters(self) -> None:
        """nn.Linear's own draw, of which this rank keeps its rows of the weight and the whole bias."""
        super().reset_parameters()
        if self.bias is not None:
            self._draw_bias()

    def _draw_bias(self) -> None:
        if not self.bias.is_meta:
            bound = 1 / self.in_features**0.5 if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def _copy_shard(self, weight: Tensor, bias: Tensor | None) -> None:
        super()._copy_shard(weight, None)

    @classmethod
    def from_linear(  # type: ignore[override]
        cls,
        linear: nn.Linear,
        group: Group = None,
        *,
        gather_output: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> VocabParallelHead:
        """This rank's rows of the weight of `linear`, copied, and its bias itself: it stays tied where it is."""
        check_splittable("VocabParallelHead", linear)
        head = cls(
            linear.in_features, linear.out_features, False, "meta", linear.weight.dtype, group=group,
            gather_output=gather_output, sequence_parallel=sequence_parallel, sequence_dim=sequence_dim,
        )  # fmt: skip
        start, end = head.shards.bounds(head.rank)
        rows = linear.weight.detach()[start:end].clone(memory_format=torch.contiguous_format)
        head.weight = nn.Parameter(rows, requires_grad=linear.weight.requires_grad)
        head.bias = linear.bias
        return head.train(linear.training)

    def forward(self, x: Tensor, *, gather_size: int | None = None) -> Tensor:  # type: ignore[override]
        """x -> logits; see the class."""
        (logits,) = column_products([self], x, gather_size)
        if self.gather_output:
            logits = functional.gather_from_region(
                logits, group=self.group_name, dim=-1, size=self.out_features
            )
        bias = self.bias if self.gather_output else self._own_bias()
        return logits if bias is None else logits + bias.to(logits.dtype)

    def _own_bias(self) -> Tensor | None:
        if self.bias is None:
            return None
        start, end = self.shards.bounds(self.rank)
        return functional.copy_to_region(self.bias, group=self.group_name)[start:end]

    def loss(
        self,
        x: Tensor,
        target: Tensor,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        gather_size: int | None = None,
        chunk_rows: int | None = None,
    ) -> Tensor:
        """Cross entropy of the logits of x, without gathering them; see
        `functional.vocab_parallel_linear_cross_entropy`.
        """
        return functional.vocab_parallel_linear_cross_entropy(
            x, self.weight, target, self._own_bias(), group=self.group_name, vocab_size=self.out_features,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, reduction=reduction,
            gather_dim=self.sequence_dim if self.sequence_parallel else None, gather_size=gather_size,
            chunk_rows=chunk_rows,
        )  # fmt: skip

    def parameter_layouts(self) -> dict[str, ParameterLayout]:
        """How the whole weight is cut; the bias is whole."""
        shape = (self.out_features, self.in_features)
        return {"weight": ParameterLayout.of_shards(shape, 0, self.shards, self.group_name)}
