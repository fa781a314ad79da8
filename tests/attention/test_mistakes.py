"""Calls that cannot be: the same clear error on every rank, and a group that goes on working."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch

import interlace
import interlace.functional as il
from interlace.functional.attention import kernels
from tests.distributed import run_distributed


def tensors(
    heads: int = 4, kv_heads: int = 4, tokens: int = 8, width: int = 8, batch: int = 1, dtype=torch.float32
):
    shape = (batch, kv_heads, tokens, width)
    return (
        torch.randn(batch, heads, tokens, width, dtype=dtype),
        torch.randn(shape, dtype=dtype),
        torch.randn(shape, dtype=dtype),
    )


def ring(*qkv: torch.Tensor, **options) -> torch.Tensor:
    return il.ring_attention(*qkv, group=None, **options)


def decode(*qkv: torch.Tensor, **options) -> torch.Tensor:
    return il.decode_attention(*qkv, group=None, **options)


def mistakes(rank: int) -> list[tuple[str, Callable]]:
    other = 8 - 4 * rank
    return [
        ("needs a multiple of 4 tokens, the sequence has 14", lambda: ring(*tensors(tokens=7), layout="zigzag")),
        ("4 query heads are no multiple of 3", lambda: ring(*tensors(kv_heads=3))),
        ("ranks 0 and 1 differ in tokens per rank (8 and 4)", lambda: ring(*tensors(tokens=other))),
        ("ranks 0 and 1 differ in mask and scale", lambda: ring(*tensors(), causal=bool(rank))),
        ("ranks 0 and 1 differ in mask and scale", lambda: ring(*tensors(), scale=1.0 + rank)),
        ("differ in mask and scale", lambda: ring(*tensors(), cu_seqlens=[0, 4 + rank, 16])),
        ("ranks 0 and 1 differ in query heads", lambda: ring(*tensors(heads=4 * (1 + rank)))),
        ("window=3 with causal=False", lambda: ring(*tensors(), window=3)),
        ("window=0", lambda: ring(*tensors(), window=0, causal=True)),
        ("cu_seqlens with a batch of 2", lambda: ring(*tensors(batch=2), cu_seqlens=[0, 16])),
        ("does not describe 16 tokens", lambda: ring(*tensors(), cu_seqlens=[0, 15])),
        ("layout='spiral'", lambda: ring(*tensors(), layout="spiral")),
        ("scale=nan", lambda: ring(*tensors(), scale=float("nan"))),
        ("expected one of float32", lambda: ring(*tensors()[:2], torch.zeros(1, 4, 8, 8).half())),
        ("expected q [B, Hq, S/R, D]", lambda: ring(*(t[0] for t in tensors()))),
        ("1 query heads for 2 ranks", lambda: il.all_to_all_attention(*tensors(heads=1, kv_heads=1), group=None)),
        ("expected a DeviceMesh of two axes", lambda: il.hierarchical_attention(*tensors(), mesh=None)),
        ("pass query_positions and key_positions", lambda: decode(*tensors(), key_positions=torch.arange(8))),
        ("8 queries, window=None: say which positions", lambda: decode(*tensors())),
    ]  # fmt: skip


def all_raise(rank: int, world_size: int) -> list[str]:
    wrong = []
    for part, call in mistakes(rank):
        try:
            call()
            wrong.append(f"{part}: nothing raised")
        except (ValueError, TypeError, RuntimeError) as error:
            if part not in str(error):
                wrong.append(f"{part}: got {error}")
        if not bool((il.all_reduce(torch.ones(2), group=None) == world_size).all()):
            wrong.append(f"{part}: the group is out of step")
    return wrong


def one_refuses(rank: int, world_size: int) -> str:
    """Rank 1 has a bad argument, rank 0 a good one: both raise, with the reason."""
    try:
        ring(*tensors(kv_heads=4 if rank == 0 else 3))
    except (ValueError, RuntimeError) as error:
        out = ring(*tensors(), causal=True)
        return f"{error!s} {bool(out.isfinite().all())}"
    return "nothing raised"


def fails_inside(rank: int, world_size: int) -> list[str]:
    """The kernel of rank 1 runs out of memory, in the forward and in the backward: nobody waits for the deadline."""
    texts = []
    q, k, v = (t.requires_grad_() for t in tensors())
    for name in ("_forward", "_backward"):
        out = ring(q, k, v, causal=True) if name == "_backward" else None
        before = getattr(kernels, name)
        if rank == 1:
            setattr(kernels, name, out_of_memory)
        try:
            ring(q, k, v, causal=True) if out is None else out.sum().backward()
            texts.append("nothing raised")
        except (MemoryError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        finally:
            setattr(kernels, name, before)
        if not bool(ring(q, k, v, causal=True).isfinite().all()):
            texts.append("the group is out of step")
    return texts


def out_of_memory(*_: object) -> None:
    raise MemoryError("no memory for a tile")


def dies_inside(rank: int, world_size: int) -> str:
    if rank == 1:
        kernels._forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        ring(*tensors(), causal=True)
        return "nothing raised"
    except interlace.CollectiveAborted as error:
        return str(error)


def test_a_rank_fails_inside() -> None:
    first, second = run_distributed(2, fails_inside)
    for text in first:
        assert "CollectiveAborted" in text and "no memory for a tile" in text, first
    assert second == ["MemoryError: no memory for a tile"] * 2


def test_a_rank_dies_inside() -> None:
    first = run_distributed(2, dies_inside, expect_death=(1,))[0]
    assert "rank 1" in first, first


@pytest.mark.parametrize("world_size", [2])
def test_every_mistake(world_size: int) -> None:
    for wrong in run_distributed(world_size, all_raise):
        assert not wrong, "\n".join(wrong)


def test_one_rank_refuses() -> None:
    for text in run_distributed(2, one_refuses):
        assert "4 query heads are no multiple of 3" in text and text.endswith("True"), text
