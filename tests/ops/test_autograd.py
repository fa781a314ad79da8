"""What autograd asks of the ops: halves of a backward, repeated backward, recomputation, autocast,
weights used twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import interlace.functional as il
from tests import oracle
from tests.distributed import run_distributed
from tests.ops.linears import OPS, Case, Local


class CountOps(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the interlace ops that were called, in order; matrix products of torch as 'mm'."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "interlace":
            self.calls.append(func.__name__.split(".")[0])
        elif func.__name__.split(".")[0] in ("mm", "matmul", "linear", "addmm", "bmm"):
            self.calls.append("mm")
        return func(*args, **(kwargs or {}))


def leaves_of(
    name: str, case: Case, rank: int, world_size: int
) -> tuple[Local, list[torch.Tensor], torch.Tensor]:
    local = OPS[name][0](case, rank, world_size)
    leaves = [t.detach().requires_grad_() for t in (local.x, local.weights[0], local.biases[0])]
    (out,) = OPS[name][1](leaves[0], [leaves[1]], [leaves[2]], case, None)
    return local, leaves, out


def halves(rank: int, world_size: int, name: str) -> tuple[list[str], list[str], list[str]]:
    case = Case((8,), 12, 10)
    local, (x, weight, bias), out = leaves_of(name, case, rank, world_size)
    grad = local.grad_outs[0]
    with CountOps() as for_input:
        (grad_x,) = torch.autograd.grad(out, [x], grad, retain_graph=True)
    with CountOps() as for_weight:
        grad_weight, grad_bias = torch.autograd.grad(out, [weight, bias], grad, retain_graph=True)
    with CountOps() as for_both:
        both = torch.autograd.grad(out, [x, weight, bias], grad)
    oracle.check_bitwise(name, [grad_x, grad_weight, grad_bias], both)
    return for_input.calls, for_weight.calls, for_both.calls


# op -> (calls for the input gradient alone, calls for the weight gradients alone)
EXPECTED_HALVES = {
    "all_gather_linear": (["gemm_reduce_scatter"], ["all_gather", "mm"]),
    "column_linear": (["gemm_all_reduce"], ["mm"]),
    "linear_reduce_scatter": (["all_gather_gemm"], ["all_gather", "mm"]),
    "linear_all_reduce": (["mm"], ["mm"]),
}


@pytest.mark.parametrize("name", OPS)
def test_each_half_of_backward_does_only_its_own_work(name: str) -> None:
    """Catches zero-bubble pipelines paying every collective twice, because needs_input_grad says yes to
    both halves."""
    for for_input, for_weight, for_both in run_distributed(2, halves, name):
        assert (for_input, for_weight) == EXPECTED_HALVES[name]
        assert len(for_both) <= len(for_input) + len(for_weight)


def twice(rank: int, world_size: int) -> None:
    for name in OPS:
        case = Case((9,), 12, 10, torch.float64)
        local, leaves, out = leaves_of(name, case, rank, world_size)
        first = torch.autograd.grad(out, leaves, local.grad_outs[0], retain_graph=True)
        second = torch.autograd.grad(out, leaves, local.grad_outs[0])
        oracle.check_bitwise(f"{name}, second backward", first, second)
        try:
            torch.autograd.grad(out, leaves, local.grad_outs[0])
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
        else:
            raise AssertionError(f"{name}: backward through a freed graph was accepted")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_retained_graph_gives_the_same_gradients_again(world_size: int) -> None:
    """Catches saved tensors that live in the workspace, or a backward that writes into what it saved."""
    run_distributed(world_size, twice)


def shared_in_sequence(rank: int, world_size: int) -> None:
    """column then row with tied weights, twice: the gradient is the sum over both uses."""
    generator = torch.Generator().manual_seed(5)
    whole = oracle.integers((6 * world_size, 4), torch.float32, generator)
    x = oracle.integers((5, 4), torch.float32, generator)
    weight = whole[6 * rank : 6 * rank + 6].clone().requires_grad_()
    out = x
    for _ in range(2):
        out = il.linear_all_reduce(il.column_linear(out, weight, group=None), weight.t(), group=None)
    out.sum().backward()
    single = whole.double().requires_grad_()
    expected = x.double()
    for _ in range(2):
        expected = F.linear(F.linear(expected, single), single.t())
    expected.sum().backward()
    oracle.check_equal("out of tied layers", out, expected)
    oracle.check_equal("grad of tied layers", weight.grad, single.grad[6 * rank : 6 * rank + 6])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_weight_used_twice_gets_both_gradients(world_size: int) -> None:
    """Catches a gradient that overwrites, and calls on a transposed view of a parameter."""
    run_distributed(world_size, shared_in_sequence)


def recomputed(rank: int, world_size: int) -> None:
    for reentrant in (False, True):
        for name in OPS:
            case = Case((7,), 12, 10)
            local = OPS[name][0](case, rank, world_size)
            results = []
            for through in (False, True):
                leaves = [t.detach().requires_grad_() for t in (local.x, local.weights[0], local.biases[0])]

                def block(x, weight, bias, name=name, case=case):
                    return OPS[name][1](x * 2, [weight], [bias], case, None)[0]

                out = checkpoint(block, *leaves, use_reentrant=reentrant) if through else block(*leaves)
                out.backward(local.grad_outs[0])
                results.append([out.detach(), *(leaf.grad for leaf in leaves)])
            oracle.check_bitwise(f"{name}, reentrant={reentrant}", *results)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_through_checkpoint_are_the_same(world_size: int) -> None:
    """Catches ranks that recompute in another order, and collectives issued from the backward thread."""
    run_distributed(world_size, recomputed)


def cast(rank: int, world_size: int) -> None:
    for name, enabled_dtype in [(name, d) for name in OPS for d in (torch.bfloat16, torch.float16)]:
        case = Case((6,), 12, 10)
        local = OPS[name][0](case, rank, world_size)
        for x_dtype in (torch.float32, enabled_dtype):
            leaves = [
                t.detach().requires_grad_() for t in (local.x.to(x_dtype), local.weights[0], local.biases[0])
            ]
            with torch.autocast("cpu", enabled_dtype):
                (out,) = OPS[name][1](leaves[0], [leaves[1]], [leaves[2]], case, None)
            if out.dtype != enabled_dtype:
                raise AssertionError(f"{name} under autocast to {enabled_dtype}: out is {out.dtype}")
            grads = torch.autograd.grad(out, leaves, local.grad_outs[0].to(enabled_dtype))
            dtypes = [g.dtype for g in grads]
            if dtypes != [x_dtype, torch.float32, torch.float32]:
                raise AssertionError(f"{name} under autocast to {enabled_dtype}: gradients are {dtypes}")
            whole = (local.whole_x, local.whole_weight, local.whole_bias, local.whole_grad)
            exact = oracle.unsharded_linear(*whole, torch.float64)
            oracle.check_equal(f"{name} under autocast", out, local.own_out(exact.out)[0])
            oracle.check_equal(f"grad_x of {name} under autocast", grads[0], local.own_x(exact.grad_x))
            oracle.check_equal(f"grad_weight of {name}", grads[1], local.own_weight(exact.grad_weight)[0])
            oracle.check_equal(f"grad_bias of {name}", grads[2], local.own_bias(exact.grad_bias)[0])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_autocast_casts_like_linear(world_size: int) -> None:
    """Catches an op that autocast does not know: fp32 out, an error, or gradients in the wrong dtype."""
    run_distributed(world_size, cast)


def second_order(rank: int, world_size: int) -> None:
    """Gradient of a squared gradient norm, against one process: for x of the ops whose loss is a sum over
    ranks."""
    generator = torch.Generator().manual_seed(9)
    x_whole = torch.randn(4 * world_size, 3, generator=generator, dtype=torch.float64)
    w_whole = torch.randn(5 * world_size, 3, generator=generator, dtype=torch.float64)
    x = x_whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    weight = w_whole[5 * rank : 5 * rank + 5].clone().requires_grad_()
    out = il.all_gather_linear(x, weight, group=None)
    (grad_x,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    second = torch.autograd.grad(grad_x.pow(2).sum(), [x, weight])
    xs, ws = x_whole.requires_grad_(), w_whole.requires_grad_()
    (single,) = torch.autograd.grad(F.linear(xs, ws).pow(3).sum(), xs, create_graph=True)
    expected = torch.autograd.grad(single.pow(2).sum(), [xs, ws])
    torch.testing.assert_close(grad_x, single[4 * rank : 4 * rank + 4], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second[0], expected[0][4 * rank : 4 * rank + 4], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(second[1], expected[1][5 * rank : 5 * rank + 5], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_second_order_gradients_of_the_gather(world_size: int) -> None:
    """Catches a backward that is silently cut from the graph: gradient penalties would train on nothing."""
    run_distributed(world_size, second_order)


def no_grad_calls(rank: int, world_size: int) -> None:
    for name in OPS:
        case = Case((6,), 12, 10)
        local = OPS[name][0](case, rank, world_size)
        leaves = [t.detach().requires_grad_() for t in (local.x, local.weights[0], local.biases[0])]
        outs = []
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                outs += OPS[name][1](leaves[0], [leaves[1]], [leaves[2]], case, None)
        if any(out.requires_grad for out in outs):
            raise AssertionError(f"{name}: output of no_grad requires grad")
        oracle.check_bitwise(name, outs[:1], outs[1:])
    dist.barrier()


def test_no_grad_and_inference_mode() -> None:
    """Catches a graph recorded where the caller asked for none."""
    run_distributed(2, no_grad_calls)


def unused_product(rank: int, world_size: int) -> None:
    """Of three products of one gather only one is in the loss, and it is not the first."""
    generator = torch.Generator().manual_seed(5)
    xs = [oracle.integers((3, 8), torch.float32, generator) for _ in range(world_size)]
    ws = [oracle.integers((4, 8), torch.float32, generator) for _ in range(world_size)]
    for op in ("gather", "column"):
        x = (xs[rank] if op == "gather" else xs[0]).clone().requires_grad_()
        weights = [ws[rank].clone().requires_grad_() for _ in range(3)]
        if op == "gather":
            outs = il.all_gather_linear(x, weights, group=None)
            rows, dx = torch.cat(xs), sum(ws).sum(0).expand(3, 8)
        else:
            outs = il.column_linear(x, weights, group=None)
            rows, dx = xs[0], sum(ws).sum(0).expand(3, 8)
        grads = torch.autograd.grad(outs[1].sum(), [x, *weights], allow_unused=True)
        oracle.check_equal(f"grad_x of {op}", grads[0], dx)
        oracle.check_equal(f"grad_weight of {op}", grads[2], rows.sum(0).expand(4, 8))
        for grad in (grads[1], grads[3]):
            if grad is not None and grad.any():
                raise AssertionError(f"{op}: a product that is not in the loss has a gradient")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_products_that_are_not_in_the_loss_have_no_part_in_backward(world_size: int) -> None:
    """Catches a missing gradient of one output that is taken for an error, or for garbage."""
    run_distributed(world_size, unused_product)
