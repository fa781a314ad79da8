"""Distributed linears as training code writes them over the symm_mem schemas: shards of the sequence in dim 0."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SYMM_MEM = torch.ops.symm_mem


def gathered(x: Tensor) -> Tensor:
    """The shards of all ranks, stacked, by a plain collective."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class GatherLinear(torch.autograd.Function):
    """[gather(x) W_i^T]: dx = reduce_scatter of sum dy_i W_i as one product, dW_i = dy_i^T gather(x)."""

    @staticmethod
    def forward(ctx: Any, group_name: str, x: Tensor, *weights: Tensor) -> Any:
        ctx.group_name = group_name
        ctx.save_for_backward(x, *weights)
        bs = [weight.t() for weight in weights]
        _, outs = SYMM_MEM.fused_all_gather_matmul(x, bs, 0, group_name, return_A=False)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        grad, weight = torch.cat(grads, -1), torch.cat(weights, 0)
        grad_x = SYMM_MEM.fused_matmul_reduce_scatter(grad, weight, "sum", 0, ctx.group_name)
        whole = gathered(x)
        return None, grad_x, *(grad.t() @ whole for grad in grads)


class LinearScatter(torch.autograd.Function):
    """reduce_scatter(x W^T): dx = gather(dy) W with gather(dy) kept for dW = gather(dy)^T x."""

    @staticmethod
    def forward(ctx: Any, group_name: str, x: Tensor, weight: Tensor) -> Tensor:
        ctx.group_name = group_name
        ctx.save_for_backward(x, weight)
        return SYMM_MEM.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group_name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole, (grad_x,) = SYMM_MEM.fused_all_gather_matmul(grad, [weight], 0, ctx.group_name, return_A=True)
        return None, grad_x, whole.t() @ x
