"""All ranks of a group decide alike, or all of them raise."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from ..groups import GroupInfo
from .plan import Plan

__all__ = ["agree"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree(info: GroupInfo, model: nn.Module, plan: Plan | None, problem: Exception | None) -> None:
    """Raise on every rank when one of them has a problem, another plan, or other parameters. Collective.

    A split model takes its shards from the copies of all ranks, so these must be the same model: seeded
    alike, or loaded from one checkpoint.
    """
    if info.world_size > 1:
        mine = (str(problem) if problem else "", _digest(plan), None if problem else _parameters(model))
        theirs: list[tuple[str, str, list[tuple[str, str]] | None]] = [mine] * info.world_size
        dist.all_gather_object(theirs, mine, group=_resolve_process_group(info.name))
        if problem is None:
            for rank, (text, _, _) in enumerate(theirs):
                if text:
                    raise ValueError(f"parallelize: rank {rank} cannot: {text}")
            _check_parameters(info, [parameters or [] for _, _, parameters in theirs])
            _check_plans(info, [digest for _, digest, _ in theirs])
    if problem is not None:
        raise problem


def _digest(plan: Plan | None) -> str:
    """Of all that is the same on every rank; the numbers of local heads are not."""
    text = repr(plan and (plan.steps, plan.shared, plan.scatters, plan.gathers, plan.sequence_parallel))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parameters(model: nn.Module) -> list[tuple[str, str]]:
    """Name and fingerprint of every parameter: shape, dtype and the sum of its bits, exact in any order."""
    found = []
    for name, param in model.named_parameters():
        value = ""
        if not param.is_meta and param.layout == torch.strided and param.element_size() in _BITS:
            value = str(_words(param.detach()).sum(dtype=torch.int64).item())
        found.append((name, f"{tuple(param.shape)} {param.dtype} {value}"))
    return found


def _words(values: Tensor) -> Tensor:
    """The bits of a tensor as integers, as wide as fits: summing 8 bytes at a time is ten times faster than 4."""
    flat = values.contiguous().flatten()
    if flat.numel() * flat.element_size() % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64)
    return flat.view(_BITS[flat.element_size()])


def _check_parameters(info: GroupInfo, parameters: list[list[tuple[str, str]]]) -> None:
    for rank in range(1, info.world_size):
        for first, other in zip(parameters[0], parameters[rank], strict=False):
            if first != other:
                raise ValueError(
                    f"parallelize: ranks 0 and {rank} hold different models, first at {first[0]} ({first[1]} "
                    f"and {other[0]} {other[1]}); seed alike, load one checkpoint, or broadcast from rank 0"
                )
        if len(parameters[0]) != len(parameters[rank]):
            raise ValueError(f"parallelize: ranks 0 and {rank} hold models of different parameters")


def _check_plans(info: GroupInfo, digests: list[str]) -> None:
    for rank in range(1, info.world_size):
        if digests[rank] != digests[0]:
            raise ValueError(
                f"parallelize: ranks 0 and {rank} have different plans; pass the same one on every rank"
            )
