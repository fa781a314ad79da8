"""The CUDA kernels of a tile without a GPU: torch's under fake tensors, calls of flash-attn against those of the CPU.

Neither has run on a device. What is tested of flash-attn is how it is called: names of arguments, dims, windows.
"""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from interlace.functional.attention import kernels, kernels_cuda, kernels_flash_attn
from interlace.functional.attention.tiles import Tile


def test_shapes_of_cuda_kernels() -> None:
    with FakeTensorMode():
        for dtype, masked, width in itertools.product(
            (torch.bfloat16, torch.float32), (False, True), (20, 64, 80, 96, 128, 256)
        ):
            keys = 100 if masked else 128
            q = torch.empty(2, 8, 128, width, device="cuda", dtype=dtype)
            k = torch.empty(2, 2, keys, width, device="cuda", dtype=dtype)
            mask = torch.empty(128, keys, device="cuda", dtype=dtype) if masked else None
            out, lse = kernels_cuda.forward(q, k, k, not masked, mask, 0.1)
            assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, 128), torch.float32)
            grads = kernels_cuda.backward(out, q, k, k, out, lse, not masked, mask, 0.1)
            assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    """flash-attn's forward (2.7 and later) by its documentation, in fp32 and plain torch."""
    assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * softmax_scale
    rows, columns = scores.shape[-2:]
    off = torch.arange(columns) - torch.arange(rows).unsqueeze(1) - (columns - rows)
    if causal:
        window_size_right = 0
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    if window_size_left >= 0:
        hidden |= off < -window_size_left
    if window_size_right >= 0:
        hidden |= off > window_size_right
    scores = scores.masked_fill(hidden, float("-inf"))
    return (
        (scores.softmax(-1) @ v.repeat_interleave(repeats, 1)).transpose(1, 2),
        scores.logsumexp(-1),
        None,
        None,
    )


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor,
    dv: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> None:  # fmt: skip
    """Into dq, dk, dv, as flash-attn's backward."""
    assert deterministic
    with torch.enable_grad():
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        result = flash_forward(
            *leaves,
            dropout_p,
            softmax_scale,
            causal,
            window_size_left,
            window_size_right,
            softcap,
            alibi_slopes,
            False,
        )[0]
        for into, grad in zip((dq, dk, dv), torch.autograd.grad(result, leaves, dout.float()), strict=True):
            into.copy_(grad)


TILES = (
    Tile(0, 8, 0, 8, causal=True),
    Tile(0, 8, 0, 6),
    Tile(0, 8, 0, 8, band=(-3, 0)),
    Tile(0, 6, 0, 9, band=(-1, 4)),
    Tile(0, 9, 0, 6, band=(-6, 1)),
)


@pytest.mark.parametrize("tile", TILES)
def test_calls_of_flash_attn(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = types.SimpleNamespace(_flash_attn_forward=flash_forward, _flash_attn_backward=flash_backward)
    monkeypatch.setattr(kernels_flash_attn, "library", lambda: stand_in)
    generator = torch.Generator().manual_seed(0)
    q, grad = (torch.randn(2, 4, tile.rows, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, tile.columns, 16, generator=generator) for _ in range(2))
    assert kernels_flash_attn.serves(q.bfloat16(), tile) and not kernels_flash_attn.serves(q, tile)
    out, lse = kernels_flash_attn.forward(q, k, v, tile, 0.3)
    exact, exact_lse = kernels._forward(q, k, v, tile, 0.3)  # the CPU's, tested against fp64
    torch.testing.assert_close(out, exact)
    torch.testing.assert_close(lse, exact_lse)
    ours = kernels_flash_attn.backward(grad, q, k, v, out, lse, tile, 0.3)
    for got, want in zip(ours, kernels._backward(grad, q, k, v, exact, exact_lse, tile, 0.3), strict=True):
        torch.testing.assert_close(got, want)


def test_bands_that_flash_attn_cannot_say() -> None:
    q = torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16)
    assert not kernels_flash_attn.serves(q, Tile(0, 8, 0, 8, band=(-6, -2)))


def test_absent_package() -> None:
    if kernels_flash_attn.library.__wrapped__() is not None:
        pytest.skip("flash-attn is installed here, for gpu runs")
    assert not kernels_flash_attn.serves(torch.zeros(1, 1, 8, 16, dtype=torch.bfloat16), TILES[0])
