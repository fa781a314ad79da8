"""Every op on CUDA tensors without a GPU: devices, dtypes and shapes of the results under fake tensors.

Forward only: a torch without CUDA records no gradients of CUDA tensors, fake or not.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import interlace
import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed

FP8 = torch.float8_e4m3fn
NORMS = (il.linear_all_reduce_norm, il.linear_reduce_scatter_norm)


def cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def forward(rank: int, world_size: int) -> None:
    """Every public op on fake CUDA tensors: devices, dtypes and shapes of all results."""
    rows = oracle.chunk_sizes(7, world_size)[rank]
    interlace.resolve(None)  # a group is set up with real tensors
    with FakeTensorMode():
        x, shard = cuda(7, 16), cuda(rows, 16)
        weight, bias, norm_weight = cuda(9, 16), cuda(9), cuda(9)
        results: list[tuple[Tensor, tuple[int, ...]]] = [
            (il.all_gather_linear(shard, weight, bias, group=None, gather_size=7), (7, 9)),
            (il.column_linear(x, weight, bias, group=None), (7, 9)),
            (il.linear_reduce_scatter(x, weight, bias, group=None), (rows, 9)),
            (il.linear_all_reduce(x, weight, bias, group=None), (7, 9)),
        ]
        for function, residual in zip(NORMS, (cuda(7, 9), cuda(rows, 9)), strict=True):
            outs = function(x, weight, bias, residual, norm_weight, group=None)
            results += [(out, tuple(residual.shape)) for out in outs]
        for out, shape in results:
            assert (out.shape, out.device.type, out.dtype) == (shape, "cuda", torch.bfloat16)
        check_plain_and_scaled(rows, world_size)


def check_plain_and_scaled(rows: int, world_size: int) -> None:
    x, scale = cuda(7, 16, dtype=FP8), cuda(7, 1, dtype=torch.float32)
    weight, weight_scale = cuda(9, 16, dtype=FP8), cuda(1, dtype=torch.float32)
    out = il.linear_reduce_scatter_scaled(x, scale, weight, weight_scale, group=None)
    assert (out.shape, out.dtype) == ((rows, 9), torch.bfloat16)
    outs = il.all_gather_linear_scaled(
        x, scale, [weight] * 2, [weight_scale] * 2, group=None, out_dtype=torch.float16
    )
    assert [(o.shape, o.dtype) for o in outs] == [((7 * world_size, 9), torch.float16)] * 2
    assert il.all_reduce(cuda(3, 4), group=None).shape == (3, 4)
    assert il.all_gather(cuda(3, 4), group=None).shape == (3 * world_size, 4)
    assert il.reduce_scatter(cuda(2 * world_size, 4), group=None).shape == (2, 4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_op_runs_on_fake_cuda_tensors(world_size: int) -> None:
    """Catches an op without a fake, one that touches a device while it is traced, a result on the CPU."""
    run_distributed(world_size, forward)
