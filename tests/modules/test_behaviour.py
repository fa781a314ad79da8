"""What users do with layers beyond forward and backward: copies, pickles, autocast, compile, freezing, sharing."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import interlace.functional as il
from interlace.modules import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    Shards,
    SharedInput,
    SummedGradients,
)
from tests.distributed import run_distributed


def _blocks() -> list[tuple[nn.Module, int]]:
    return [
        (ColumnParallelLinear(8, 6, gather_output=True), 8),
        (RowParallelLinear(8, 6, input_is_parallel=False), 8),
        (ParallelMLP(8, 12, gated=True, activation="silu"), 8),
        (ParallelAttention(8, 4, 1, causal=True, rope_theta=1e4, qk_norm_eps=1e-6), 8),
    ]


def _through(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    module.zero_grad()
    out = module(x)
    out.square().sum().backward()
    return out.detach(), [param.grad.clone() for param in module.parameters()]


def _copies(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    for module, features in _blocks():
        x = torch.randn(2, 5, features)
        out, grads = _through(module, x)
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        others = {
            "deepcopy": copy.deepcopy(module),
            "pickle": pickle.loads(pickle.dumps(module)),
            "torch.save": torch.load(buffer, weights_only=False),
        }
        for how, other in others.items():
            again, other_grads = _through(other, x)
            what = f"{how} of {type(module).__name__}"
            assert torch.equal(again, out), what
            assert all(torch.equal(a, b) for a, b in zip(grads, other_grads, strict=True)), what
            with torch.no_grad():
                for param in other.parameters():
                    param.add_(1)
            assert torch.equal(_through(module, x)[0], out), f"{what} shares memory with the original"


def test_copied_and_pickled_modules_work_and_are_independent() -> None:
    """A ProcessGroup inside would not pickle; products copied with a module would answer a later call."""
    run_distributed(2, _copies)


def _construction(rank: int, world_size: int) -> None:
    for make, split in (
        (lambda **o: ColumnParallelLinear(7, 5, **o), 0),
        (lambda **o: RowParallelLinear(7, 5, **o), 1),
    ):
        torch.manual_seed(3)
        whole = nn.Linear(7, 5)
        torch.manual_seed(3)
        ours = make()
        start, end = ours.shards.bounds(rank)
        assert torch.equal(ours.weight, whole.weight.narrow(split, start, end - start)), (
            "not nn.Linear's draw"
        )
        assert torch.equal(ours.bias, whole.bias[start:end] if split == 0 else whole.bias)
        assert isinstance(ours, nn.Linear) and (ours.in_features, ours.out_features) == (7, 5)
        assert list(ours.state_dict()) == ["weight", "bias"]
        for group in (
            None,
            dist.group.WORLD,
            DeviceMesh("cpu", list(range(world_size))),
            dist.group.WORLD.group_name,
        ):
            assert make(group=group).group_name == dist.group.WORLD.group_name
        assert make(device="meta").weight.is_meta
        linear = nn.Linear(7, 5, bias=False, dtype=torch.bfloat16).eval().requires_grad_(False)
        kept = type(ours).from_linear(linear)
        assert kept.weight.dtype == torch.bfloat16 and not kept.weight.requires_grad and not kept.training
        assert kept.bias is None and kept.weight.data_ptr() != linear.weight.data_ptr()
        assert type(ours).from_linear(nn.Linear(7, 5, device="meta")).weight.is_meta
        for wrong in (nn.Conv1d(1, 1, 1), ours, nn.utils.parametrizations.weight_norm(nn.Linear(7, 5))):
            with pytest.raises(TypeError):
                type(ours).from_linear(wrong)
    everywhere = Shards.slices(8, (0,) * world_size, (8,) * world_size)
    for make in (ColumnParallelLinear, RowParallelLinear):
        options = {"gather_output": True} if make is ColumnParallelLinear else {}
        with pytest.raises(ValueError, match="overlap"):
            make(8, 8, shards=everywhere, **options)


@pytest.mark.parametrize("world_size", [2, 3])
def test_construction_keeps_what_nn_linear_promises(world_size: int) -> None:
    """Seeded alike, ranks must hold one layer: the shards of nn.Linear's own draw, not world_size equal ones."""
    run_distributed(world_size, _construction)


def _frozen(rank: int, world_size: int) -> None:
    for module, features in _blocks():
        x = torch.randn(2, 4, features, generator=torch.Generator().manual_seed(1), requires_grad=True)
        module(x).sum().backward()
        expected = x.grad.clone()
        x.grad = None
        module.requires_grad_(False)
        module(x).sum().backward()
        torch.testing.assert_close(x.grad, expected)
        assert all(param.grad is None for param in _cleared(module).parameters())
        assert not module(x.detach()).requires_grad
        with torch.inference_mode():
            module(x)


def _cleared(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        param.grad = None
    return module


def test_frozen_weights_still_pass_the_summed_gradient_on() -> None:
    """A base layer under LoRA is frozen; its dX collective must still run, and alike on every rank."""
    run_distributed(2, _frozen)


def _autocast(rank: int, world_size: int) -> None:
    for module, features in _blocks():
        x = torch.randn(2, 4, features, generator=torch.Generator().manual_seed(2))
        with torch.autocast("cpu", torch.bfloat16):
            out = module(x)
        assert out.dtype == torch.bfloat16, type(module).__name__
        out.float().sum().backward()
        assert all(param.grad.dtype == torch.float32 for param in module.parameters()), type(module).__name__
        torch.testing.assert_close(out.float(), module(x), rtol=0.1, atol=0.1)
    for linear in (ColumnParallelLinear(8, 6), RowParallelLinear(8, 6)):
        with pytest.raises(TypeError, match="bfloat16"):
            linear(torch.randn(3, linear.local_in_features, dtype=torch.bfloat16))


def test_autocast_casts_and_mixed_dtypes_are_refused_on_every_rank() -> None:
    """As F.linear: autocast casts fp32 weights; without it a mix of dtypes is an error, not a silent conversion."""
    run_distributed(2, _autocast)


def _compiled(rank: int, world_size: int) -> None:
    for module, features in _blocks():
        module = module.double()
        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            for rows in (5, 7):
                x = torch.randn(
                    2, rows, features, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)
                )
                out, grads = _through(module, x)
                again, compiled_grads = _through(compiled, x)
                what = f"{type(module).__name__} dynamic={dynamic} rows={rows}"
                torch.testing.assert_close(again, out, msg=lambda m, w=what: f"{w}: {m}")
                for one, other in zip(grads, compiled_grads, strict=True):
                    torch.testing.assert_close(other, one, msg=lambda m, w=what: f"{w}: {m}")


def test_modules_compile_without_graph_breaks() -> None:
    """fullgraph=True, static and dynamic numbers of rows: group names, no ProcessGroup, fakes of the right shape."""
    run_distributed(2, _compiled, timeout=240.0)


def _counted(name: str, calls: list[str]) -> object:
    original = getattr(il, name)

    def count(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    return count


def _shared(rank: int, world_size: int) -> None:
    q, k, v = (ColumnParallelLinear(6, n, dtype=torch.float64) for n in (8, 4, 4))
    alone = [copy.deepcopy(linear) for linear in (q, k, v)]
    shared = SharedInput([q, k, v])
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    original, calls = il.column_linear, []
    il.column_linear = _counted("column_linear", calls)
    try:
        together = q(x), k(x), v(x)
        assert calls == ["column_linear"], calls
        assert not shared._products and shared._key is None, "products outlive their forward"
        for linear, out, one in zip((q, k, v), together, alone, strict=True):
            assert torch.equal(out, one(x)), linear
        q(x)
        with torch.no_grad():
            k.weight.add_(1)
        torch.testing.assert_close(
            k(x), x @ k.weight.t() + k.bias, msg="a product of the old weight was handed out"
        )
        q(x)
        x.mul_(2)
        torch.testing.assert_close(
            k(x), x @ k.weight.t() + k.bias, msg="a product of the old input was handed out"
        )
        with torch.no_grad():
            q(x)
        assert k(x).requires_grad, "a product without gradient was handed out"
        torch.testing.assert_close(q(x.clone()) + 0, q(x))
        assert torch.equal(q(x), q(x)), "one layer called twice with one input"
    finally:
        il.column_linear = original


def test_linears_of_one_input_share_a_product_but_never_an_old_one() -> None:
    """q(x), k(x), v(x) are one op; a changed input, weight or grad mode, or a second call, computes again."""
    run_distributed(2, _shared)


def _summed(rank: int, world_size: int) -> None:
    for norm in (nn.LayerNorm(6), nn.RMSNorm(6), nn.LayerNorm(6, elementwise_affine=False)):
        ours = SummedGradients(copy.deepcopy(norm))
        assert list(ours.state_dict()) == list(norm.state_dict()) and ours.eps == norm.eps
        x = torch.randn(world_size, 5, 6, generator=torch.Generator().manual_seed(4))
        x.requires_grad_()
        norm(x).square().sum().backward()
        for module in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            module(x[rank]).square().sum().backward()
            for name, param in norm.named_parameters():
                torch.testing.assert_close(getattr(module, name).grad, param.grad, rtol=1e-5, atol=1e-5)
        ours.to(torch.float64)
        assert ours(x[rank].double()).dtype == torch.float64
    with pytest.raises(ValueError, match="children with parameters"):
        SummedGradients(nn.Sequential(nn.LayerNorm(6)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicated_norms_have_the_sum_of_the_gradients_right_after_backward(world_size: int) -> None:
    """Also in copies and pickles, where hooks on parameters would be lost and gradients silently local."""
    run_distributed(world_size, _summed)


def _twice(rank: int, world_size: int) -> None:
    module = RowParallelLinear.from_linear(
        nn.Linear(6, 6, dtype=torch.float64), None, input_is_parallel=False
    )
    x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    module(module(x)).sum().backward()
    both = module.weight.grad.clone()
    module.weight.grad = None
    middle = module(x).detach().requires_grad_()
    module(middle).sum().backward()
    last = module.weight.grad.clone()
    module.weight.grad = None
    module(x).backward(middle.grad)
    torch.testing.assert_close(both, last + module.weight.grad)


def test_a_layer_used_twice_has_the_sum_of_both_gradients() -> None:
    run_distributed(2, _twice)
