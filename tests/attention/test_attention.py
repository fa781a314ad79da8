"""Ring, all-gather, all-to-all and hierarchical attention against attention written out over the whole sequence."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import interlace
import interlace.functional as il
from interlace._native import _C as native
from interlace.functional.attention import LAYOUTS
from tests import oracle
from tests.attention.reference import Case, attention, held
from tests.distributed import run_distributed

WORLDS = (1, 2, 3, 4)
ALGORITHMS: dict[str, Callable] = {
    "ring": functools.partial(il.ring_attention, group=None),
    "all_gather": functools.partial(il.all_gather_attention, group=None),
    "all_to_all": functools.partial(il.all_to_all_attention, group=None),
}
CASES = (
    Case(),
    Case(causal=False),
    Case(heads=8, kv_heads=2),
    Case(heads=9, kv_heads=3, window=7),
    Case(heads=4, kv_heads=1, window=30),
    Case(batch=1, cu_seqlens=(0, 24, 48)),
    Case(batch=1, cu_seqlens=(0, 24, 24, 48), causal=False),
    Case(batch=1, cu_seqlens=(0, 24, 48), window=5, heads=4, kv_heads=2),
    Case(factor=50.0),
)
Values = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def ours(fn: Callable, case: Case, layout: str, rank: int, world_size: int) -> Values:
    """out, lse and gradients of this rank's tokens."""
    *inputs, grad = case.draw()
    mine = held(layout, case, world_size, rank)
    leaves = [t[:, :, mine].clone().requires_grad_() for t in inputs]
    out, lse = fn(
        *leaves,
        causal=case.causal,
        window=case.window,
        cu_seqlens=case.cu_seqlens,
        layout=layout,
        return_lse=True,
    )
    if lse.requires_grad:
        raise AssertionError("the log-sum-exp takes no gradient, and must say so")
    return out.detach(), lse, *torch.autograd.grad(out, leaves, grad[:, :, mine])


def wanted(case: Case, dtype: torch.dtype, mine: Tensor) -> Values:
    result = attention(*case.draw(), case.mask(), dtype)
    whole = (result.out, result.lse, *result.grads)
    return tuple(t[:, :, mine] for t in whole)  # type: ignore[return-value]


NAMES = ("out", "lse", "grad_q", "grad_k", "grad_v")


def exact_everywhere(rank: int, world_size: int, backend: str) -> None:
    """fp64: whatever is wrong with masks, merges, orders or gradients shows at 1e-12."""
    with interlace.backend(backend):
        for case, layout, (name, fn) in itertools.product(CASES, LAYOUTS, ALGORITHMS.items()):
            got = ours(fn, case, layout, rank, world_size)
            for what, a, b in zip(
                NAMES, got, wanted(case, torch.float64, held(layout, case, world_size, rank)), strict=True
            ):
                limit = 1e-11 * (1 + b.abs().max().item())
                if a.shape != b.shape or not (a - b).abs().max().item() < limit:
                    raise AssertionError(
                        f"{what} of {name}, {layout}, {case}: off by {(a - b).abs().max():.2e}"
                    )


def mixed(rank: int, world_size: int) -> None:
    for shape in ((2, 2), (1, 4), (4, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "heads"))
        fn = functools.partial(il.hierarchical_attention, mesh=mesh)
        for case, layout in itertools.product(CASES[:6], LAYOUTS):
            got = ours(fn, case, layout, rank, world_size)
            for what, a, b in zip(
                NAMES, got, wanted(case, torch.float64, held(layout, case, world_size, rank)), strict=True
            ):
                if not (a - b).abs().max().item() < 1e-11 * (1 + b.abs().max().item()):
                    raise AssertionError(
                        f"{what} over {shape}, {layout}, {case}: off by {(a - b).abs().max():.2e}"
                    )


def large_tiles(rank: int, world_size: int) -> None:
    """Tiles so large that the backward takes them in parts, and bands of several row blocks."""
    for case in (
        Case(heads=2, kv_heads=1, tokens=2048, batch=1),
        Case(heads=2, kv_heads=1, tokens=2048, batch=1, window=700),
        Case(heads=2, kv_heads=2, tokens=2048, batch=1, causal=False),
    ):
        for layout in LAYOUTS:
            mine = held(layout, case, world_size, rank)
            got = ours(ALGORITHMS["ring"], case, layout, rank, world_size)
            for what, a, b in zip(NAMES, got, wanted(case, torch.float64, mine), strict=True):
                if not (a - b).abs().max().item() < 1e-11 * (1 + b.abs().max().item()):
                    raise AssertionError(f"{what}, {layout}, {case}: off by {(a - b).abs().max():.2e}")


def within_bounds(rank: int, world_size: int) -> None:
    """The bound of every op: 1.5 x the error of unsharded attention in the same dtype, head sizes in use."""
    widths = (64, 80, 96, 128, 256)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for (width, dtype), (name, fn) in zip(
        itertools.product(widths, dtypes), itertools.cycle(ALGORITHMS.items()), strict=False
    ):
        case = Case(heads=8, kv_heads=2, width=width, tokens=96, dtype=dtype)
        mine = held("zigzag", case, world_size, rank)
        got = ours(fn, case, "zigzag", rank, world_size)
        exact, same = wanted(case, torch.float64, mine), sdpa(case, mine)
        for what, a, e, s in zip(
            ("out", "grad_q", "grad_k", "grad_v"),
            (got[0], *got[2:]),
            (exact[0], *exact[2:]),
            same,
            strict=True,
        ):
            oracle.check_close(f"{what} of {name} {dtype} {width}", a, e, s)
        if got[1].dtype != torch.float32 or not (got[1] - exact[1]).abs().max() < 2e-2:
            raise AssertionError(f"lse of {name} {dtype} {width}")


def sdpa(case: Case, mine: Tensor) -> tuple[Tensor, ...]:
    """torch's own attention over the whole sequence, in the dtype of the case."""
    q, k, v, grad = case.draw()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=True)
    return tuple(t[:, :, mine] for t in (out.detach(), *torch.autograd.grad(out, leaves, grad)))


def deterministic(rank: int, world_size: int) -> None:
    case = dataclasses.replace(CASES[2], dtype=torch.bfloat16)
    for (name, fn), layout in itertools.product(ALGORITHMS.items(), LAYOUTS):
        first = ours(fn, case, layout, rank, world_size)
        with oracle.poisoned():
            second = ours(fn, case, layout, rank, world_size)
        oracle.check_bitwise(f"{name}, {layout}", first, second)


def strides_and_sizes(rank: int, world_size: int) -> None:
    """[B, S, H, D] transposed as modules give it, other sizes in turn on one window, no tokens, no batch."""
    for tokens, batch in ((48, 2), (192, 1), (24, 3), (0, 2), (48, 0)):
        case = Case(tokens=tokens, batch=batch, dtype=torch.float64)
        q, k, v, _ = case.draw()
        mine = held("zigzag", case, world_size, rank) if tokens else torch.zeros(0, dtype=torch.int64)
        strided = [t[:, :, mine].transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
        exact = attention(*case.draw(), case.mask(), torch.float64).out[:, :, mine]
        for name, fn in ALGORITHMS.items():
            out = fn(*strided, causal=True, layout="zigzag")
            if out.shape != exact.shape or not torch.allclose(out, exact, atol=1e-12):
                raise AssertionError(f"{name}, {tokens} tokens, batch {batch}")


def counted(rank: int, world_size: int) -> dict[str, tuple]:
    """Ops as `count_ops` sees them, and how many collectives ran on the symmetric heap, forward and backward."""
    case = Case(dtype=torch.float32)
    *inputs, grad = (t[:, :, held("zigzag", case, world_size, rank)] for t in case.draw())
    name_of_group = dist.group.WORLD.group_name
    epoch = lambda: native.describe_group(name_of_group)["epoch"]  # noqa: E731
    found = {}
    for name, fn in ALGORITHMS.items():
        ours(fn, case, "zigzag", rank, world_size)  # the window is there from now on
        with interlace.count_ops() as counts:
            leaves = [t.clone().requires_grad_() for t in inputs]
            start = epoch()
            out = fn(*leaves, causal=True, layout="zigzag")
            middle = epoch()
            out.backward(grad)
            end = epoch()
        found[name] = dict(counts.forward), dict(counts.backward), middle - start, end - middle
    return found


def under_autocast(rank: int, world_size: int) -> None:
    case = Case(dtype=torch.float32)
    q, k, v, _ = (t[:, :, held("zigzag", case, world_size, rank)] for t in case.draw())
    with torch.autocast("cpu", torch.bfloat16):
        out = il.ring_attention(q, k.bfloat16(), v, group=None, causal=True, layout="zigzag")
    if out.dtype != torch.bfloat16:
        raise AssertionError(f"attention under autocast gave {out.dtype}; torch's gives bfloat16")


def compiled(rank: int, world_size: int) -> None:
    case = Case(dtype=torch.float32)
    for name, fn in ALGORITHMS.items():
        whole = torch.compile(
            functools.partial(fn, causal=True, layout="zigzag"), fullgraph=True, backend="aot_eager"
        )
        values = []
        for call in (functools.partial(fn, causal=True, layout="zigzag"), whole):
            *inputs, grad = (t[:, :, held("zigzag", case, world_size, rank)] for t in case.draw())
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = call(*leaves)
            values.append((out.detach(), *torch.autograd.grad(out, leaves, grad)))
        oracle.check_bitwise(f"compiled {name}", *values)
    arguments = ("ring_attention", "ring", True, None, "zigzag", None, None, 1, dist.group.WORLD.group_name)
    leaves = [t[:, :, : case.tokens // world_size].clone().requires_grad_() for t in case.draw()[:3]]
    torch.library.opcheck(torch.ops.interlace.context_attention.default, (*leaves, *arguments))


@pytest.mark.parametrize(
    ("backend", "world_size"), [*(("auto", w) for w in WORLDS), ("reference", 2), ("reference", 3)]
)
def test_exact(backend: str, world_size: int) -> None:
    run_distributed(world_size, exact_everywhere, backend, timeout=180)


def test_large_tiles() -> None:
    run_distributed(2, large_tiles, timeout=180)


def test_hierarchical() -> None:
    run_distributed(4, mixed, timeout=180)


@pytest.mark.parametrize("world_size", [2, 3])
def test_dtypes_and_head_sizes(world_size: int) -> None:
    run_distributed(world_size, within_bounds)


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_runs_are_bitwise_equal(world_size: int) -> None:
    run_distributed(world_size, deterministic)


@pytest.mark.parametrize("world_size", [1, 3])
def test_strides_and_sizes(world_size: int) -> None:
    run_distributed(world_size, strides_and_sizes)


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives(world_size: int) -> None:
    """One check of the call and one barrier forward; backward a barrier a step, or one reduce-scatter."""
    found = run_distributed(world_size, counted)[0]
    one = ({"context_attention": 1}, {"context_attention_backward": 1})
    assert found["ring"] == (*one, 2, 1 + world_size)
    assert found["all_gather"] == (*one, 2, 3)
    # an all-to-all is two: the sizes of its parts go first
    assert found["all_to_all"] == ({"all_gather": 1, "all_to_all": 2}, {"all_to_all": 2}, 1 + 2 * 2, 2 * 2)


def test_autocast() -> None:
    run_distributed(2, under_autocast)


def test_compile() -> None:
    run_distributed(2, compiled, timeout=180)
