"""The ops behind `functional.exchange`: where products meet the exchange of features for tokens.

On one host a rank writes its products into the group's window, and every rank reads its features of all tokens from
there: one pass. Elsewhere the product is made rank by rank, each part on its way while the next one is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from .._native import _C as native
from ..groups import GroupInfo, resolve
from ..ops import OPS
from ..windows import window
from ._check import peers_told

__all__ = ["Features", "flat"]

Features: TypeAlias = "Sequence[tuple[int, int]]"  # by rank: [begin, end)
_PIECES = 2  # of the tokens in all_to_all_gemm: one is on its way while the other is multiplied

_LIB = torch.library.Library("interlace", "FRAGMENT")
_LIB.define(
    "gemm_all_to_all(Tensor x, Tensor[] weights, Tensor?[] biases, int[] features, str group_name) -> Tensor[]"
)
_LIB.define("exchange_features(Tensor[] parts, int[] features, int[] totals, str group_name) -> Tensor[]")
_LIB.define(
    "all_to_all_gemm(Tensor x, Tensor weight, Tensor? bias, int[] features, str group_name) -> (Tensor, Tensor)"
)


def flat(features: Sequence[Features]) -> list[int]:
    """Features of several weights as the ops take them: begin and end by weight and rank."""
    return [bound for by_rank in features for bounds in by_rank for bound in bounds]


def _nested(features: Sequence[int], size: int) -> list[list[tuple[int, int]]]:
    pairs = list(zip(features[::2], features[1::2], strict=True))
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _in_place(info: GroupInfo, x: Tensor) -> bool:
    return not x.is_cuda and native.is_fused("all_reduce", info.name)


def _meet(info: GroupInfo, x: Tensor, *numbers: int) -> None:
    """Barrier before anything is written, and the check that every rank makes the same call."""
    mine = torch.tensor([*x.shape[:2], *numbers], dtype=torch.int64, device=x.device)
    everyone = (
        OPS.all_gather(mine, 0, info.name, mine.numel() * info.world_size).view(info.world_size, -1).tolist()
    )
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(
                f"exchange of features: ranks 0 and {rank} differ in batch, tokens or features "
                f"({everyone[0]} and {other}); every rank makes the same call"
            )


def _barrier(info: GroupInfo) -> None:
    OPS.all_reduce(torch.zeros(1), info.name)


def _gemm_all_to_all(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], features: list[int], group_name: str
) -> list[Tensor]:
    info = resolve(group_name)
    bounds = _nested(features, info.world_size)
    if info.world_size == 1:
        wholes = [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        return [whole[..., b:e].contiguous() for whole, [(b, e)] in zip(wholes, bounds, strict=True)]
    _meet(info, x, *features)
    with peers_told(info, "linear_all_to_all"):
        if _in_place(info, x):
            return _written(x, weights, biases, bounds, info)
        return [_sent(x, w, b, by_rank, info) for w, b, by_rank in zip(weights, biases, bounds, strict=True)]


def _written(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    bounds: list[list[tuple[int, int]]],
    info: GroupInfo,
) -> list[Tensor]:
    """Products into the own part of the window; of every peer's the own features."""
    batch, tokens, _ = x.shape
    width = sum(weight.shape[0] for weight in weights)
    shared = window(info, batch * tokens * width * x.element_size())
    rows = x.reshape(batch * tokens, -1)
    outs, offset = [], 0
    for weight, bias in zip(weights, biases, strict=True):
        shape = (batch * tokens, weight.shape[0])
        mine = shared.tensor(info.rank, offset * x.element_size(), shape, x.dtype)
        if bias is None:
            torch.mm(rows, weight.t(), out=mine)
        else:
            torch.addmm(bias, rows, weight.t(), out=mine)
        offset += mine.numel()
    _barrier(info)
    offset = 0
    for weight, by_rank in zip(weights, bounds, strict=True):
        begin, end = by_rank[info.rank]
        out = x.new_empty(batch, info.world_size, tokens, end - begin)
        for peer in range(info.world_size):
            theirs = shared.tensor(peer, offset * x.element_size(), (batch, tokens, weight.shape[0]), x.dtype)
            out[:, peer].copy_(theirs[..., begin:end])
        outs.append(out.flatten(1, 2))
        offset += batch * tokens * weight.shape[0]
    return outs


def _sent(x: Tensor, weight: Tensor, bias: Tensor | None, by_rank: Features, info: GroupInfo) -> Tensor:
    """Rank by rank: the part of one rank is on its way while that of the next is computed."""
    group = _resolve_process_group(info.name)
    begin, end = by_rank[info.rank]
    parts = [x.new_empty(*x.shape[:2], end - begin) for _ in range(info.world_size)]
    works = []
    for step in range(1, info.world_size + 1):
        to, of = (info.rank + step) % info.world_size, (info.rank - step) % info.world_size
        low, high = by_rank[to]
        product = F.linear(x, weight[low:high], None if bias is None else bias[low:high])
        if to == info.rank:
            parts[to] = product
            continue
        works += _swap(product, to, parts[of], of, group)
    for work in works:
        work.wait()
    return torch.cat(parts, 1)


def _swap(out: Tensor, to: int, into: Tensor, of: int, group: dist.ProcessGroup) -> list[dist.Work]:
    messages = []
    if out.numel():
        messages.append(dist.P2POp(dist.isend, out.contiguous(), dist.get_global_rank(group, to), group))
    if into.numel():
        messages.append(dist.P2POp(dist.irecv, into, dist.get_global_rank(group, of), group))
    return dist.batch_isend_irecv(messages) if messages else []


def _placed(received: Sequence[Tensor], by_rank: Features, total: int, dtype: torch.dtype) -> Tensor:
    """Features of every rank [B, s, n_r] -> [B, s, total]; places that several ranks give are summed."""
    sizes = [end - begin for begin, end in by_rank]
    shape = (*received[0].shape[:2], total)
    if sum(sizes) == total and all(b == e for (_, b), (e, _) in itertools.pairwise(by_rank)):
        whole = received[0].new_empty(shape, dtype=dtype)
        for part, (begin, end) in zip(received, by_rank, strict=True):
            whole[..., begin:end].copy_(part)
        return whole
    half = dtype in (torch.float16, torch.bfloat16)
    whole = received[0].new_zeros(shape, dtype=torch.float32 if half else dtype)
    for part, (begin, end) in zip(received, by_rank, strict=True):
        whole[..., begin:end] += part
    return whole.to(dtype)


def _meet_for(parts: list[Tensor], bounds: list[list[tuple[int, int]]], info: GroupInfo) -> None:
    _meet(info, parts[0], *(bound for by_rank in bounds for pair in by_rank for bound in pair))


def _read(parts: list[Tensor], bounds: list[list[tuple[int, int]]], info: GroupInfo) -> list[list[Tensor]]:
    """By part and rank: that rank's features of the own tokens, views of what it wrote into its window."""
    rank, size, itemsize = info.rank, info.world_size, parts[0].element_size()
    batch, everything, _ = parts[0].shape
    widths = [sum(by_rank[peer][1] - by_rank[peer][0] for by_rank in bounds) for peer in range(size)]
    shared = window(info, max(widths) * batch * everything * itemsize)
    offset = 0
    for part in parts:
        shared.tensor(rank, offset * itemsize, part.shape, part.dtype).copy_(part)
        offset += part.numel()
    _barrier(info)
    offsets = [0] * size
    received: list[list[Tensor]] = []
    for part, by_rank in zip(parts, bounds, strict=True):
        received.append([])
        for peer, (begin, end) in enumerate(by_rank):
            shape = (batch, everything, end - begin)
            theirs = (
                part if peer == rank else shared.tensor(peer, offsets[peer] * itemsize, shape, part.dtype)
            )
            offsets[peer] += batch * everything * (end - begin)
            received[-1].append(theirs.chunk(size, 1)[rank])
    return received


def _start(
    part: Tensor, by_rank: Features, info: GroupInfo, begin: int, end: int
) -> tuple[list[dist.Work], list[Tensor]]:
    """Send every rank its tokens [begin, end) of `part`; what arrives, by rank, is there when the works are done."""
    rank, size, group = info.rank, info.world_size, _resolve_process_group(info.name)
    own = [tokens[:, begin:end] for tokens in part.chunk(size, 1)]
    received = [part.new_empty(part.shape[0], end - begin, e - b) for b, e in by_rank]
    received[rank] = own[rank]
    works = []
    for step in range(1, size):
        to, of = (rank + step) % size, (rank - step) % size
        works += _swap(own[to], to, received[of], of, group)
    return works, received


def _exchange_features(
    parts: list[Tensor], features: list[int], totals: list[int], group_name: str
) -> list[Tensor]:
    """The opposite way: parts [B, R s, n_i] -> [B, s, totals_i] of the own tokens, summed where ranks overlap."""
    info = resolve(group_name)
    bounds = _nested(features, info.world_size)
    if info.world_size == 1:
        received = [[part] for part in parts]
    else:
        _meet_for(parts, bounds, info)
        if _in_place(info, parts[0]):
            with peers_told(info, "exchange of features"):
                received = _read(parts, bounds, info)
        else:
            tokens = parts[0].shape[1] // info.world_size
            started = [_start(p, by_rank, info, 0, tokens) for p, by_rank in zip(parts, bounds, strict=True)]
            for works, _ in started:
                for work in works:
                    work.wait()
            received = [arrived for _, arrived in started]
    dtype = parts[0].dtype
    return [_placed(r, b, total, dtype) for r, b, total in zip(received, bounds, totals, strict=True)]


def _all_to_all_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, features: list[int], group_name: str
) -> tuple[Tensor, Tensor]:
    """(product, exchanged x)"""
    info = resolve(group_name)
    if info.world_size == 1 or _in_place(info, x):
        [whole] = _exchange_features([x], features, [weight.shape[1]], group_name)
        return F.linear(whole, weight, bias), whole
    [by_rank] = bounds = _nested(features, info.world_size)
    _meet_for([x], bounds, info)
    tokens = x.shape[1] // info.world_size
    cuts = [tokens * i // _PIECES for i in range(_PIECES + 1)]
    started = [_start(x, by_rank, info, begin, end) for begin, end in itertools.pairwise(cuts)]
    wholes, outs = [], []
    for works, received in started:
        for work in works:
            work.wait()
        wholes.append(_placed(received, by_rank, weight.shape[1], x.dtype))
        outs.append(F.linear(wholes[-1], weight, bias))
    return torch.cat(outs, 1), torch.cat(wholes, 1)


def _fake_gemm_all_to_all(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None], features: list[int], group_name: str
) -> list[Tensor]:
    info = resolve(group_name)
    own = [by_rank[info.rank] for by_rank in _nested(features, info.world_size)]
    return [x.new_empty(x.shape[0], x.shape[1] * info.world_size, end - begin) for begin, end in own]


def _fake_exchange_features(
    parts: list[Tensor], features: list[int], totals: list[int], group_name: str
) -> list[Tensor]:
    size = resolve(group_name).world_size
    return [p.new_empty(p.shape[0], p.shape[1] // size, n) for p, n in zip(parts, totals, strict=True)]


def _fake_all_to_all_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, features: list[int], group_name: str
) -> tuple[Tensor, Tensor]:
    tokens = x.shape[1] // resolve(group_name).world_size
    return x.new_empty(x.shape[0], tokens, weight.shape[0]), x.new_empty(x.shape[0], tokens, weight.shape[1])


for _name, _kernel, _fake in (
    ("gemm_all_to_all", _gemm_all_to_all, _fake_gemm_all_to_all),
    ("exchange_features", _exchange_features, _fake_exchange_features),
    ("all_to_all_gemm", _all_to_all_gemm, _fake_all_to_all_gemm),
):
    _LIB.impl(_name, _kernel, "CPU")
    _LIB.impl(_name, _kernel, "CUDA")
    torch.library.register_fake(f"interlace::{_name}", _fake, lib=_LIB)
