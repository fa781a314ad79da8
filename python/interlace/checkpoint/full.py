"""State dict and gradients of the unsplit model, out of a split one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

from ..groups import resolve
from .entries import Entry, entries_of, layouts_by_tensor, original_name
from .gather import is_rank0, whole_tensor

__all__ = ["full_grads", "full_state_dict", "whole_entries"]


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False
) -> dict[str, Any]:
    """The state dict of the unsplit model: its names, shapes and dtypes, buffers and extra state too.

    model: split by `interlace.parallelize`, by hand, by torch's styles (DTensor), with fully_shard on top, or not at
    all. Every tensor is a copy; tied names share one. rank0_only: ranks but 0 get {}. cpu_offload: each tensor goes
    to the CPU before the next is gathered. Beside the result a shard and, on ranks that keep nothing, no whole is
    held. Collective: every rank of the model calls it.
    """
    state: dict[str, Any] = {}
    done: dict[int, Tensor | None] = {}  # by the tensor here: a tied one is gathered once
    for entry, whole in whole_entries(model, rank0_only=rank0_only, done=done):
        if isinstance(whole, Tensor) and cpu_offload and whole.device.type != "cpu":
            whole = whole.cpu()
            done[id(entry.value)] = whole
        if not rank0_only or is_rank0():
            state[entry.name] = whole
    return state


def whole_entries(
    model: nn.Module, *, rank0_only: bool, done: dict[int, Tensor | None]
) -> Iterator[tuple[Entry, Any]]:
    """(entry, whole value) one by one, gathered when asked for. done: what to reuse, by the id of the tensor here."""
    for entry in entries_of(model):
        if not isinstance(entry.value, Tensor):
            yield entry, entry.value
            continue
        if id(entry.value) not in done:
            done[id(entry.value)] = whole_tensor(entry.value, entry.layout, rank0_only=rank0_only)
        yield entry, done[id(entry.value)]


def full_grads(model: nn.Module, *, rank0_only: bool = False, cpu_offload: bool = False) -> dict[str, Tensor]:
    """Gradient of every parameter of the unsplit model that has one, by its name; copies, as in `full_state_dict`.

    A parameter whose gradient is None on some ranks only counts there as zero. Collective.
    """
    layouts, clean = layouts_by_tensor(model), original_name(model)
    params = {clean(name): param for name, param in model.named_parameters()}
    known = _with_gradient_somewhere(params, layouts)
    grads: dict[str, Tensor] = {}
    for name, param in params.items():
        layout = layouts.get(id(param))
        grad = param.grad
        if grad is None and name in known:
            grad = torch.zeros_like(param)
        if grad is None:
            continue
        whole = whole_tensor(grad, layout, rank0_only=rank0_only)
        if whole is not None:
            grads[name] = whole.cpu() if cpu_offload else whole
    return grads


def _with_gradient_somewhere(params: dict[str, nn.Parameter], layouts: dict[int, Any]) -> set[str]:
    """Names of cut parameters of which a rank of the group has a gradient: all must take part in its collective."""
    by_group: dict[str, list[str]] = {}
    for name, param in params.items():
        layout = layouts.get(id(param))
        if layout is not None:
            by_group.setdefault(layout.group_name, []).append(name)
    found: set[str] = set()
    for group_name, names in by_group.items():
        mine = [name for name in names if params[name].grad is not None]
        theirs: list[list[str]] = [mine] * resolve(group_name).world_size
        dist.all_gather_object(theirs, mine, group=_resolve_process_group(group_name))
        found.update(*theirs)
    return found
