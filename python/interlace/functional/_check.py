"""Argument checks of the public functions: on a mistake, tell the peers (they are inside the call), then raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import checks, cuda_dispatch, symmetric_memory
from ..errors import CollectiveAborted, CollectiveTimeout, translated
from ..groups import GroupInfo
from ..reference import chunk_range

__all__ = [
    "autocast",
    "check_dim",
    "check_gather_size",
    "check_product",
    "check_splits",
    "peers_told",
    "refuse",
    "refused",
]


def refuse(info: GroupInfo, error: type[Exception], text: str) -> NoReturn:
    """Raise `error`; peers that make this call with good arguments raise CollectiveAborted with the same text.

    On CUDA tensors they raise CollectiveTimeout instead: see cuda_dispatch.arguments.
    """
    if _shares_memory(info):
        symmetric_memory.refuse(info.name, f"{error.__name__}: {text}")
    raise error(text)


def _shares_memory(info: GroupInfo) -> bool:
    """Whether peers in this call wait in shared memory, where they can be told."""
    return info.world_size > 1 and not info.fallback and not cuda_dispatch.is_used(info.name)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype of autocast when it is on, as F.linear and attention take them; else unchanged."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or not t.is_floating_point() else t.to(dtype) for t in tensors]


@contextmanager
def peers_told(info: GroupInfo, op: str) -> Iterator[None]:
    """An error inside, between collectives of one call, ends the peers' wait: they raise CollectiveAborted with it."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError):
            error = translated(error)
        of_a_collective = isinstance(error, CollectiveAborted | CollectiveTimeout)
        if _shares_memory(info) and not of_a_collective:
            symmetric_memory.refuse(info.name, f"{type(error).__name__}: {op}: {error}")
        raise error from None


def refused(info: GroupInfo, check: Callable[..., object], *args: Any, **options: Any) -> None:
    """Run a check of `checks`; what it raises, the peers are told first."""
    try:
        check(*args, **options)
        return
    except (ValueError, TypeError) as error:
        mistake = error
    refuse(info, type(mistake), str(mistake))


def check_dim(op: str, what: str, dim: int, ndim: int, info: GroupInfo) -> None:
    refused(info, checks.wrap_dim, op, what, dim, ndim)


def check_product(
    op: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    info: GroupInfo,
    inner_is_gathered: bool,
) -> None:
    """x [.., K], weights [N_i, K], biases [N_i] or None, one dtype (autocast casts) and one device.

    inner_is_gathered: K of the weights is that of the gathered x, which this rank does not know yet.
    """
    cast = torch.is_autocast_enabled(x.device.type)
    refused(
        info, checks.check_products, op, [x], weights, biases, inner_is_gathered=inner_is_gathered, cast=cast
    )


def check_gather_size(op: str, x: Tensor, dim: int, gather_size: int | None, info: GroupInfo) -> None:
    """gather_size is the total along `dim`; this rank must hold its chunk of it."""
    if gather_size is None:
        return
    begin, end = chunk_range(gather_size, info.world_size, info.rank)
    if x.shape[dim] != end - begin:
        refuse(
            info,
            ValueError,
            f"{op}: gather_size={gather_size} gives rank {info.rank} of {info.world_size} {end - begin} of dim {dim}, "
            f"x has {x.shape[dim]}; pass the total length, cut as torch.chunk does",
        )


def check_splits(
    op: str, x: Tensor, outputs: Sequence[int] | None, inputs: Sequence[int] | None, info: GroupInfo
) -> None:
    if x.dim() < 1:
        refuse(info, ValueError, f"{op}: x is a scalar; expected [S, ..]")
    for name, sizes in (("output_split_sizes", outputs), ("input_split_sizes", inputs)):
        if sizes is None:
            if x.shape[0] % info.world_size:
                refuse(
                    info,
                    ValueError,
                    f"{op}: {x.shape[0]} rows do not divide by world_size={info.world_size}; give {name}",
                )
        elif len(sizes) != info.world_size or any(s < 0 for s in sizes):
            refuse(info, ValueError, f"{op}: {name}={list(sizes)}; expected {info.world_size} sizes >= 0")
    if inputs is not None and sum(inputs) != x.shape[0]:
        refuse(
            info,
            ValueError,
            f"{op}: input_split_sizes={list(inputs)} add up to {sum(inputs)}, x has {x.shape[0]} rows",
        )
