"""What other packages would do wrong with a split model without an error: average its shards, save one for all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.parallel import DistributedDataParallel

from ..groups import GroupInfo, resolve

__all__ = ["ReplicaGuard", "install_replica_guard", "install_save_guard"]


def install_replica_guard(model: nn.Module, info: GroupInfo) -> None:
    """Make DistributedDataParallel over the ranks that hold the shards an error at its first forward."""
    if info.world_size == 1:
        return
    split = next((m for m in model.modules() if hasattr(type(m), "parameter_layouts")), None)
    if split is not None:
        split.register_forward_pre_hook(ReplicaGuard(info.name))


class ReplicaGuard:
    """Forward pre-hook of the first split module.

    DDP copies rank 0's parameters to all ranks of its group and averages their gradients. Over the group of a split
    model it would overwrite shards with those of another rank, and every number after that is wrong without an error.
    """

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name
        self._seen: set[int] = set()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        wrapper = None if torch.compiler.is_compiling() else DistributedDataParallel._active_ddp_module
        if wrapper is None or id(wrapper) in self._seen:
            return
        split = set(dist.get_process_group_ranks(_resolve_process_group(self.group_name)))
        shared = sorted(split & set(dist.get_process_group_ranks(wrapper.process_group)))
        if len(shared) > 1:
            raise ValueError(
                f"interlace: DistributedDataParallel is over ranks {shared}, which hold shards of one split model, not "
                "replicas: it has overwritten them with rank "
                f"{shared[0]}'s. Pass process_group=mesh['dp'].get_group(), or do not wrap when all ranks share one "
                "model; then load or parallelize the model again"
            )
        self._seen.add(id(wrapper))

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process."""
        return {"group_name": self.group_name, "_seen": set()}


def install_save_guard(model: nn.Module) -> None:
    """Make save_pretrained of the classes of `model` refuse a split model, of which it would write one rank's shards.

    It is the method of the class that is replaced, once: copies and pickles of the model are guarded too. With a
    state_dict that is given it goes on as before.
    """
    for module in model.modules():
        for owner in type(module).__mro__:
            method = vars(owner).get("save_pretrained")
            if inspect.isfunction(method) and not hasattr(method, "refuses_shards"):
                owner.save_pretrained = _refusing(method)  # type: ignore[attr-defined]


def _refusing(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**signature.bind_partial(self, *args, **kwargs).arguments, **kwargs}
        if given.get("state_dict") is None and isinstance(self, nn.Module) and _has_shards(self):
            raise RuntimeError(
                f"save_pretrained: {type(self).__name__} is split, and the files would hold the shards of one rank; "
                "call interlace.save_full(model, folder) on every rank, or pass "
                "state_dict=interlace.full_state_dict(model), made on every rank"
            )
        return method(self, *args, **kwargs)

    save_pretrained.refuses_shards = True  # type: ignore[attr-defined]
    return save_pretrained


def _has_shards(model: nn.Module) -> bool:
    return any(
        hasattr(type(m), "parameter_layouts") and resolve(m.group_name).world_size > 1  # type: ignore[arg-type]
        for m in model.modules()
    )
