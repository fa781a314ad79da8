"""ContextParallelAttention and decoding with a cache that is split over ranks, against one process, in fp64."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import interlace.functional as il
from interlace.context_parallel import ContextParallelAttention, ShardedKVCache
from interlace.functional.attention import LAYOUTS
from tests.attention.reference import Case, held
from tests.distributed import run_distributed

HIDDEN = 24


def build(algorithm: str, layout: str, case: Case, world_size: int) -> ContextParallelAttention:
    mesh = None
    if algorithm == "hierarchical":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("ring", "heads"))
    torch.manual_seed(0)
    return ContextParallelAttention(
        HIDDEN, case.heads, case.kv_heads, head_dim=case.width, bias=True, rope_theta=1e4, qk_norm_eps=1e-6,
        sliding_window=case.window, group=mesh, algorithm=algorithm, layout=layout, dtype=torch.float64,
    )  # fmt: skip


def unsplit(module: ContextParallelAttention, x: Tensor, case: Case) -> Tensor:
    q, k, v = module._projected(x)
    ends = case.cu_seqlens or (0, x.shape[1])
    positions = torch.cat([torch.arange(e - b) for b, e in itertools.pairwise(ends)])
    q, k = module._turned(q, k, positions)
    readers = case.heads // case.kv_heads
    out = F.scaled_dot_product_attention(
        q, k.repeat_interleave(readers, 1), v.repeat_interleave(readers, 1), attn_mask=case.mask()
    )
    return module.o_proj(out.transpose(1, 2).flatten(2))


def near(what: str, ours: Tensor, exact: Tensor) -> None:
    if ours.shape != exact.shape or not torch.allclose(ours, exact, rtol=1e-11, atol=1e-11):
        raise AssertionError(f"{what} is off by {(ours - exact).abs().max():.2e}")


def forward_backward(rank: int, world_size: int, algorithm: str) -> None:
    second = 24 * (world_size != 3) or 18  # a border that zigzag over 3 ranks can have
    cases = (
        Case(heads=6, kv_heads=3, width=8, window=11),
        Case(heads=6, kv_heads=3, width=8, cu_seqlens=(0, second, 48), batch=1),
        Case(heads=5, kv_heads=1, width=8),
    )
    for case, layout in itertools.product(cases, LAYOUTS):
        module = build(algorithm, layout, case, world_size)
        whole = copy.deepcopy(module)
        generator = torch.Generator().manual_seed(1)
        x, grad = (
            torch.randn(case.batch, 48, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        exact_x = x.clone().requires_grad_()
        exact = unsplit(whole, exact_x, case)
        exact.backward(grad)
        mine = held(layout, case, world_size, rank)
        own = x[:, mine].clone().requires_grad_()
        out = module(own, cu_seqlens=case.cu_seqlens)
        out.backward(grad[:, mine])
        what = f"{algorithm}, {layout}, {case}"
        near(f"out of {what}", out, exact[:, mine])
        near(f"grad_x of {what}", own.grad, exact_x.grad[:, mine])
        for (name, ours), unsplit_param in zip(module.named_parameters(), whole.parameters(), strict=True):
            total = ours.grad.clone()
            dist.all_reduce(total)
            near(f"{name} of {what}", total, unsplit_param.grad)


def decoding(rank: int, world_size: int, algorithm: str) -> None:
    """A prompt split over the ranks, then one token, then two at once; with a window too."""
    for window, layout in itertools.product((None, 11), LAYOUTS):
        case = Case(heads=6, kv_heads=3, width=8, window=window)
        module = build(algorithm, layout, case, world_size)
        x = torch.randn(2, 51, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            cache = ShardedKVCache()
            module(x[:, held(layout, case, world_size, rank)], cache=cache)
            first = module.decode(x[:, 48:49], cache)
            rest = module.decode(x[:, 49:], cache)
            longer = Case(heads=6, kv_heads=3, width=8, window=window, tokens=51)
            exact = unsplit(module, x, longer)[:, 48:]
        near(f"decoded, {algorithm}, {layout}, window {window}", torch.cat([first, rest], 1), exact)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(lengths, torch.tensor([cache.keys.shape[2]]))
        if int(torch.cat(lengths).sum()) != 51:
            raise AssertionError(f"the caches hold {lengths} of 51 tokens")


def empty_shards(rank: int, world_size: int) -> None:
    """Only the last rank holds keys; and nobody does: 0, no NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, t, 8, generator=generator) for h, t in ((4, 1), (2, 5), (2, 5)))
    exact = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    count = 5 if rank == world_size - 1 else 0
    out = il.decode_attention(q, k[:, :, :count], v[:, :, :count], group=None)
    if not torch.allclose(out, exact, atol=1e-6):
        raise AssertionError("one rank holds all keys")
    nothing = il.decode_attention(q, k[:, :, :0], v[:, :, :0], group=None)
    later = {"query_positions": torch.zeros(1).long(), "key_positions": torch.arange(1, 6)}
    blind = il.decode_attention(q, k, v, group=None, **later)
    if not bool((nothing == 0).all() and (blind == 0).all()):
        raise AssertionError("queries that see no key must give 0")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_module(world_size: int) -> None:
    for algorithm in ("ring", "all_gather", "all_to_all"):
        run_distributed(world_size, forward_backward, algorithm, timeout=180)


def test_hierarchical_module() -> None:
    run_distributed(4, forward_backward, "hierarchical", timeout=180)
    run_distributed(4, decoding, "hierarchical")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_decoding(world_size: int) -> None:
    for algorithm in ("ring", "all_to_all"):
        run_distributed(world_size, decoding, algorithm)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_without_keys(world_size: int) -> None:
    run_distributed(world_size, empty_shards)
