"""The stock styles of transformers with our forwards: how parameters are cut and loaded is inherited."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed import tensor_parallel as stock

from .. import functional
from ..groups import GroupInfo, resolve
from ..styles.embedding import VocabForward
from ..styles.linear import ColumnForward, RowForward
from ..styles.parameters import SplitForward, local, run_with
from ..styles.replicated import ReplicatedForward
from .table import REASON

__all__ = ["NOTHING_TO_FUSE", "ours_for"]


NOTHING_TO_FUSE = {
    "replicate": "no collective",
    "local_params": "no collective",
    "packed_rowwise": "cuts a parameter, runs nothing",
    "moe_identity_expert": "no collective",
    "sequence_parallel": "not wired up in transformers",
}


def _plain(x: Any) -> Any:
    """The whole tensor behind a DTensor that another style left."""
    return (
        x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
        if isinstance(x, DTensor)
        else x
    )


class _ColumnForward(ColumnForward):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(_plain(x))


class _RowForward(RowForward):
    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Replicate() if self.split_input else Shard(-1)]).to_local()
        return super().__call__(x)


class _HiddenForward(SplitForward):
    """A lookup whose vectors are cut: every rank has a slice of each, and the slices are gathered."""

    def __call__(self, ids: Tensor) -> Tensor:
        table = self.module
        rows = F.embedding(
            ids,
            cast(Tensor, local(table.weight)),
            table.padding_idx,
            scale_grad_by_freq=table.scale_grad_by_freq,
        )
        return functional.gather_from_region(rows, group=self.group_name, dim=-1, size=table.embedding_dim)


class _ReducedForward(SplitForward):
    """What the module returns is a part of a sum over the ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = _plain(type(self.module).forward(self.module, *args, **kwargs))
        return out if out is None else functional.reduce_from_region(out, group=self.group_name)


class _ExpertsForward(SplitForward):
    """Experts of which every rank holds a slice: inputs are equal on all ranks, outputs parts of a sum."""

    style = "experts"

    def __call__(self, hidden: Tensor, *routing: Any, **kwargs: Any) -> Any:
        routing_args = list(routing)
        if len(routing_args) >= 2:  # (indices, weights, ..): the weights have gradients
            routing_args[1] = functional.copy_to_region(_plain(routing_args[1]), group=self.group_name)
        hidden = functional.copy_to_region(_plain(hidden), group=self.group_name)
        params = {name: local(param) for name, param in self.module._parameters.items()}
        out = run_with(self.module, params, (hidden, *routing_args), kwargs)
        return out if out is None else functional.reduce_from_region(out, group=self.group_name)


class _LatentForward(SplitForward):
    """The compressed keys and values of multi-head latent attention: the rotary part feeds this rank's heads."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out = type(self.module).forward(self.module, *args, **kwargs)
        width = self.module.config.qk_rope_head_dim
        rest, rotary = out.split([out.shape[-1] - width, width], dim=-1)
        return torch.cat([rest, functional.copy_to_region(rotary, group=self.group_name)], dim=-1)


class _OnInterlace:
    """A stock style whose forward is ours where the module is what it takes it for, and stock elsewhere."""

    plain_class: type[nn.Module] | None = None  # the class whose forward ours replaces

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        reason = self._why_stock(module)
        if reason:
            setattr(module, REASON, reason)
            warnings.warn(
                f"interlace.hf: {type(module).__name__} keeps its stock forward: {reason}", stacklevel=2
            )
            return super().install_forward(module, mesh)  # type: ignore[misc]
        group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
        forward = self.forward_for(module, resolve(group))
        forward.plan_source = "transformers"
        module.forward = forward  # type: ignore[assignment]
        return module

    def _why_stock(self, module: nn.Module) -> str:
        if "forward" in vars(module):
            return "its forward was replaced before"
        if getattr(module, "_hf_quantized_needs_local_tp", False):
            return "its weight is quantised"
        expected = self.plain_class
        if expected is not None and type(module).forward is not expected.forward:
            return f"its forward is not that of nn.{expected.__name__}"
        return ""

    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        """What to call for this module."""
        raise NotImplementedError


class _Colwise(_OnInterlace, stock.ColwiseParallel):
    plain_class = nn.Linear

    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        gather = isinstance(self.output_layouts, Replicate)
        return _ColumnForward(module, info, module.out_features, gather_output=gather)


class _Rowwise(_OnInterlace, stock.RowwiseParallel):
    plain_class = nn.Linear

    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return _RowForward(module, info, split_input=isinstance(self.input_layouts, Replicate))


class _PackedColwise(_OnInterlace, stock.PackedColwiseParallel):
    plain_class = nn.Linear

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """As stock, but a bias is cut like the rows it belongs to; stock cuts it in one piece."""
        bias = module._parameters.get(param)
        if bias is None or bias.dim() != 1:
            super().shard_param(module, param, mesh)
            return
        placed = distribute_tensor(
            bias, mesh, [_StridedShard(dim=0, split_factor=self.split_factor)], src_data_rank=None
        )
        module._parameters[param] = nn.Parameter(placed, requires_grad=bias.requires_grad)

    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return _ColumnForward(module, info, module.out_features)


class _Embedding(_OnInterlace, stock.EmbeddingParallel):
    plain_class = nn.Embedding

    def _why_stock(self, module: nn.Module) -> str:
        if getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False):
            return "max_norm and sparse need the whole table"
        return super()._why_stock(module)

    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return VocabForward(module, info.name) if self.shard_dim == 0 else _HiddenForward(module, info.name)


class _Summed(_OnInterlace, stock.ReplicatedWithGradAllReduce):
    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return ReplicatedForward(module, info.name, summed=True)


class _AllReduced(_OnInterlace, stock.AllReduceParallel):
    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return _ReducedForward(module, info.name)


class _Latent(_OnInterlace, stock.MlaKvAProjParallel):
    plain_class = nn.Linear

    def _why_stock(self, module: nn.Module) -> str:
        if not hasattr(module.config, "qk_rope_head_dim"):
            return "its config has no qk_rope_head_dim"
        return super()._why_stock(module)

    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return _LatentForward(module, info.name)


class _Experts(_OnInterlace, stock.MoeExpertsParallel):
    def forward_for(self, module: Any, info: GroupInfo) -> SplitForward:
        return _ExpertsForward(module, info.name)


_OURS: dict[type, type] = {
    stock.ColwiseParallel: _Colwise,
    stock.RowwiseParallel: _Rowwise,
    stock.PackedColwiseParallel: _PackedColwise,
    stock.EmbeddingParallel: _Embedding,
    stock.ReplicatedWithGradAllReduce: _Summed,
    stock.AllReduceParallel: _AllReduced,
    stock.MlaKvAProjParallel: _Latent,
    stock.MoeExpertsParallel: _Experts,
}


def ours_for(style: Any) -> Any | None:
    """The same style with our forward; None for a class that is not exactly a stock one that we know."""
    kind = _OURS.get(type(style))
    if kind is None or not getattr(style, "use_local_output", True):
        return None
    if isinstance(style, stock.ColwiseParallel) and not isinstance(style.input_layouts, Replicate):
        return None
    if isinstance(style, stock.RowwiseParallel) and not isinstance(style.output_layouts, Replicate):
        return None
    ours = copy.copy(style)
    ours.__class__ = kind
    return ours
