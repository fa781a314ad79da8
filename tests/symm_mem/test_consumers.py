"""Who calls the symm_mem schemas, restated: distributed linears in training, Inductor's micro-pipelined pass."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed import _functional_collectives as funcol
from torch.distributed._symmetric_memory import _test_mode

from interlace.symm_mem_ops import provide_symm_mem_ops
from tests import oracle
from tests.distributed import run_distributed
from tests.symm_mem.linears import GatherLinear, LinearScatter

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


def _near(what: str, found: Tensor, expected: Tensor, limit: float) -> None:
    """Largest difference relative to the largest value; limit 0: bitwise."""
    error = ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
    assert error <= limit, f"{what}: {error:.2e}, allowed {limit:.0e}"


def _linears(rank: int, world_size: int) -> None:
    group_name = dist.group.WORLD.group_name
    for dtype, limit in TOLERANCE.items():
        generator = torch.Generator().manual_seed(6)
        rows, depth, widths = 8 * world_size, 4 * world_size, (6 * world_size, 2 * world_size)
        x = oracle.normals((rows, depth), dtype, generator)
        for n_weights in (1, 2):
            weights = [oracle.normals((n, depth), dtype, generator) for n in widths[:n_weights]]
            grads = [oracle.normals((rows, n), dtype, generator) for n in widths[:n_weights]]
            leaves = [
                t.clone().requires_grad_()
                for t in (x.chunk(world_size)[rank], *(_own(w, 0, rank) for w in weights))
            ]
            outs = GatherLinear.apply(group_name, *leaves)
            own_grads = [_own(grad, 1, rank) for grad in grads]
            torch.autograd.backward(outs, own_grads)
            exact_x = sum(g.double() @ w.double() for g, w in zip(grads, weights, strict=True))
            _near("grad_x", leaves[0].grad, exact_x.chunk(world_size)[rank], limit)
            for out, own, grad, leaf in zip(outs, weights, own_grads, leaves[1:], strict=True):
                _near("out", out, x.double() @ _own(own, 0, rank).double().t(), limit)
                _near("grad_weight: no sum crosses ranks", leaf.grad, grad.t() @ x, 0)
        weight, grad = (
            oracle.normals((10, depth), dtype, generator),
            oracle.normals((rows, 10), dtype, generator),
        )
        own_x, own_w = (_own(t, 1, rank).clone().requires_grad_() for t in (x, weight))
        out = LinearScatter.apply(group_name, own_x, own_w)
        out.backward(grad.chunk(world_size)[rank])
        _near("scattered out", out, (x.double() @ weight.double().t()).chunk(world_size)[rank], limit)
        _near("grad_x: no sum crosses ranks", own_x.grad, grad @ own_w, limit)
        _near("grad_weight: no sum crosses ranks", own_w.grad, grad.t() @ own_x, 0)


def _own(whole: Tensor, dim: int, rank: int) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim)[rank].contiguous()


def _training(rank: int, world_size: int) -> None:
    with provide_symm_mem_ops():
        _linears(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_distributed_linears_train_on_the_provided_ops(world_size: int) -> None:
    """All-gather linear with one and with two weights, linear reduce-scatter: output and every gradient, within the
    tolerances such code is held to (2e-2 in bf16, 1e-4 in fp32, nothing where no sum crosses ranks)."""
    run_distributed(world_size, _training)


def _gather_then_product(x: Tensor, w: Tensor, dim: int) -> Tensor:
    return funcol.all_gather_single(x, dim, dist.group.WORLD) @ w


def _product_then_scatter(x: Tensor, w: Tensor, dim: int) -> Tensor:
    return funcol.reduce_scatter_single(x @ w, "sum", dim, dist.group.WORLD)


def _inductor(rank: int, world_size: int) -> None:
    config = {"_micro_pipeline_tp": True, "reorder_for_compute_comm_overlap": False}
    w = torch.randn(16, 8)
    with (
        provide_symm_mem_ops(),
        _test_mode(),
        mock.patch("torch.distributed.is_nccl_available", return_value=True),
        torch._inductor.config.patch(config),
        torch.no_grad(),
    ):
        for function, op, shapes in (
            (
                _gather_then_product,
                "fused_all_gather_matmul",
                [((8, 16), 0), ((2, 8, 16), 0), ((2, 8, 16), 1)],
            ),
            (
                _product_then_scatter,
                "fused_matmul_reduce_scatter",
                [((8, 16), 0), ((2, 8, 16), 1), ((8, 16), 1)],
            ),
        ):
            for shape, dim in shapes:
                x = torch.randn(shape)
                torch._dynamo.reset()
                compiled = torch.compile(function, fullgraph=True, dynamic=False)
                out, code = run_and_get_code(compiled, x, w, dim)
                assert any(f"symm_mem.{op}" in text for text in code), f"{op}, {shape}, dim {dim}: not fused"
                expected = function(x, w, dim)
                _near(f"{op}, {shape}, dim {dim}", out, expected, 1e-5)
                assert out.stride() == expected.stride()


def test_inductor_fuses_onto_the_provided_ops() -> None:
    """Compiled code asserts the strides that the Meta kernels promise: wrong ones fail here, in the call."""
    run_distributed(2, _inductor, timeout=240.0)
