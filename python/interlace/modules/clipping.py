"""Norm of the gradients of a split model: every element of the unsplit model counts once.

torch.nn.utils.clip_grad_norm_ sees local tensors only, and would give each rank another norm without a word. So
the first split module replaces the helper that it looks up at each call, by one that knows gradients of split
parameters and hands all others to torch's own.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import utils
from torch.nn.utils import clip_grad

from .held import as_dtensor, held_boxes, local_part
from .layout import ParameterLayout

__all__ = ["clip_grad_norm_", "install_total_norm", "restore_total_norm", "split_modules"]

# all that live: what torch calls knows gradients only, and these know whose they are
split_modules: weakref.WeakSet[Any] = weakref.WeakSet()
_torchs: Callable[..., Tensor] = clip_grad._get_total_norm
_wanted = True  # False once restore_total_norm was called


def install_total_norm(*, again: bool = False) -> None:
    """Make torch.nn.utils.clip_grad_norm_ and get_total_norm right for split parameters. Does nothing when it is done.

    Called by every split module that is made, so Trainer and accelerate need no change. A get_total_norm that was
    imported by name before stays torch's. again: also after `restore_total_norm`.
    """
    global _wanted
    _wanted = _wanted or again
    if not _wanted or clip_grad._get_total_norm is _total_norm:
        return
    if clip_grad._get_total_norm is not _torchs:
        _wanted = False
        warnings.warn(
            "interlace: torch.nn.utils.clip_grad_norm_ was replaced by another package, so its norm of a split model "
            "may be wrong; call interlace.clip_grad_norm_",
            stacklevel=3,
        )
        return
    clip_grad._get_total_norm = _total_norm
    if utils.get_total_norm is _torchs:
        utils.get_total_norm = _total_norm


def restore_total_norm() -> None:
    """Give torch.nn.utils its own norm back, which is wrong for split parameters; `install_total_norm(again=True)`
    undoes it.
    """
    global _wanted
    _wanted = False
    if clip_grad._get_total_norm is _total_norm:
        clip_grad._get_total_norm = _torchs
    if utils.get_total_norm is _total_norm:
        utils.get_total_norm = _torchs


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`; returns the norm as it was.

    parameters: of a split model, or the model itself; plain, split, DTensor, mixed. The norm is that of the unsplit
    model: split parameters are summed over their group, rows that several ranks hold and replicated parameters
    count once; all ranks get bitwise the same. g <- g * min(1, max_norm / (norm + 1e-6)). norm_type: p > 0 or inf.
    Collective: every rank of the groups calls it. RuntimeError, on every rank, when error_if_nonfinite and the norm
    is not finite.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    norm = _total_norm(grads, norm_type, error_if_nonfinite, foreach)
    norm = _whole(norm)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(local_part(grad))
    for device, local in by_device.items():
        torch._foreach_mul_(local, scale.to(device))
    return norm


@torch.no_grad()
def _total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As torch.nn.utils.get_total_norm, where gradients of split parameters count for all ranks of their group."""
    grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    norm_type = float(norm_type)
    layouts = _layouts_of_grads()
    cut = [(grad, *layouts[id(grad)][1:]) for grad in grads if id(grad) in layouts]
    if not cut:
        return _torchs(grads, norm_type, error_if_nonfinite, foreach)
    if not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_: norm_type={norm_type}; expected p > 0 or inf for split parameters"
        )
    plain: dict[Any, list[Tensor]] = {}
    for grad in grads:
        if id(grad) not in layouts:
            whole = as_dtensor(grad)
            plain.setdefault(None if whole is None else whole.device_mesh, []).append(grad)
    buckets: dict[Any, list[Tensor]] = {}
    for grad, layout, rank in cut:
        # in the order of the parameters, which all ranks share: each bucket is a collective
        buckets.setdefault((layout.group_name, _cut_axes(grad)), []).extend(_owned(grad, layout, rank))
    device = grads[0].device
    dtype = torch.promote_types(grads[0].dtype, torch.float32)
    norms = [_whole(_torchs(group, norm_type, False, foreach)).to(device, dtype) for group in plain.values()]
    replicated = _combine(norms, norm_type, device, dtype)
    total = [_over_group(replicated, cut[0][1].group_name, norm_type, first=True)]
    for (group_name, axes), owned in buckets.items():
        norms = [_torchs(owned, norm_type, False, foreach).to(device, dtype)] if owned else []
        part = _combine(norms, norm_type, device, dtype)
        for name in (*axes, group_name):
            part = _over_group(part, name, norm_type)
        total.append(part)
    norm = _combine(total, norm_type, device, dtype)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to scale them by it anyway"
        )
    if all(as_dtensor(grad) is not None for grad in grads):  # torch scales DTensors by a DTensor
        from torch.distributed.tensor import DTensor, Replicate

        mesh = cast(DTensor, grads[0]).device_mesh
        return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return norm


def _layouts_of_grads() -> dict[int, tuple[Tensor, ParameterLayout, int]]:
    """id of a gradient -> (gradient, layout, rank), for the split parameters of all modules that live."""
    found: dict[int, tuple[Tensor, ParameterLayout, int]] = {}
    for module in list(split_modules):
        params = module.__dict__.get("_parameters", {})
        if all(param is None or param.grad is None for param in params.values()):
            continue
        for name, layout in module.parameter_layouts().items():
            grad = params[name].grad if params.get(name) is not None else None
            if grad is not None and layout.dim is not None and len(layout.pieces) > 1:
                found[id(grad)] = (grad, layout, module.rank)
    return found


def _cut_axes(grad: Tensor) -> tuple[str, ...]:
    """Groups over which a DTensor is cut further."""
    split = as_dtensor(grad)
    if split is None:
        return ()
    placed = enumerate(split.placements)
    return tuple(split.device_mesh.get_group(axis).group_name for axis, p in placed if not p.is_replicate())


def _owned(grad: Tensor, layout: ParameterLayout, rank: int) -> list[Tensor]:
    """The parts of a gradient that count for this rank."""
    local = local_part(grad)
    if not layout.overlapping:
        return [local] if local.numel() else []
    return [box.of_local(local) for box in held_boxes(grad, layout, rank, owned=True)]


def _whole(norm: Tensor) -> Tensor:
    split = as_dtensor(norm)
    return norm if split is None else split.full_tensor()


def _combine(norms: list[Tensor], norm_type: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The norm of a vector whose parts have these norms."""
    if not norms:
        return torch.zeros((), device=device, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return norm


def _over_group(norm: Tensor, name: str, norm_type: float, *, first: bool = False) -> Tensor:
    """The norm over the ranks of a group, in rank order, so bitwise equal on all; `first`: that of its first rank."""
    group = _resolve_process_group(name)
    parts = [torch.empty_like(norm) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, norm, group=group)
    return parts[0] if first else _combine(parts, norm_type, norm.device, norm.dtype)
