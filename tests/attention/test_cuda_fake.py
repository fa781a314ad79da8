"""The CUDA kernels of a tile under fake tensors: shapes and dtypes of torch's ops as they are called."""

from __future__ import annotations

import itertools

import torch
from torch._subclasses import FakeTensorMode

from interlace.functional.attention import kernels_cuda


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
