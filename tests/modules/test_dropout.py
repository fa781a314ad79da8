"""Random numbers over a group: the same where ranks hold the same, others where they hold shards, and reproducible."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import interlace.random
from interlace.modules import ParallelAttention, ParallelDropout, RowParallelLinear
from interlace.random import ShardedRandom
from tests import oracle
from tests.distributed import run_distributed


def _everywhere(value: object, world_size: int) -> list:
    found: list = [None] * world_size
    dist.all_gather_object(found, value)
    return found


def _regions(rank: int, world_size: int) -> None:
    torch.manual_seed(11)
    before = torch.rand(3)
    with interlace.random.region("sharded"):
        own = torch.rand(4 + rank)  # ranks use unequal amounts
    after = torch.rand(3)
    assert len({tuple(t[:4].tolist()) for t in _everywhere(own, world_size)}) == world_size, (
        "ranks drew alike"
    )
    for t in (before, after):
        assert len({tuple(x.tolist()) for x in _everywhere(t, world_size)}) == 1, "out of step"
    assert not torch.equal(before, after)
    torch.manual_seed(11)
    torch.rand(3)
    with interlace.random.region("sharded"):
        assert torch.equal(torch.rand(4 + rank), own), "not reproducible"
    with interlace.random.region("sharded"):
        assert not torch.equal(torch.rand(4 + rank), own), "two regions alike"
    assert interlace.random.in_step()
    torch.manual_seed(rank)
    with interlace.random.region("replicated"):
        same = torch.rand(3)
    assert len({tuple(x.tolist()) for x in _everywhere(same, world_size)}) == 1
    assert interlace.random.in_step() == (world_size == 1)
    interlace.random.synchronize()
    assert interlace.random.in_step()
    state = torch.get_rng_state()
    with pytest.raises(KeyError), interlace.random.region("sharded"):
        raise KeyError
    torch.set_rng_state(state)
    torch.empty((), dtype=torch.int64).random_()
    want = torch.rand(2)
    torch.set_rng_state(state)
    with interlace.random.region("sharded"):
        torch.rand(5)
    assert torch.equal(torch.rand(2), want) or world_size == 1, "the outer stream is not one draw further"
    with pytest.raises(ValueError, match='kind=\'split\'; expected "sharded" or "replicated"'):
        interlace.random.region("split").__enter__()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_regions_differ_between_ranks_and_leave_them_in_step(world_size: int) -> None:
    """A rank with more heads draws more numbers; behind the region all must go on alike."""
    run_distributed(world_size, _regions)


def _abandoned(rank: int, world_size: int) -> None:
    own = ShardedRandom()
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    own.enter(cpu)
    inside = torch.get_rng_state()
    own.enter(cpu)
    assert torch.equal(inside, torch.get_rng_state()), "entered twice"
    torch.rand(2 + rank)
    other = pickle.loads(pickle.dumps(own))
    other.leave()
    assert not interlace.random.in_step(), "a copy left a region that it had not entered"
    own.leave()
    assert interlace.random.in_step()
    own.enter(cpu)  # a forward that fails in the middle never leaves
    torch.rand(2 + rank)
    own.enter(cpu)
    own.leave()
    state = torch.get_rng_state()
    own.enter(cpu)  # activation checkpointing stops early and puts the generator back itself
    torch.set_rng_state(state)
    torch.rand(1)
    moved = torch.get_rng_state()
    own.leave()
    assert torch.equal(moved, torch.get_rng_state()), "numbers would repeat"
    own.leave()
    assert interlace.random.in_step()


def test_a_region_left_open_by_an_error_does_not_put_ranks_out_of_step() -> None:
    run_distributed(2, _abandoned)


def _masks(rank: int, world_size: int) -> None:
    x = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(2))
    for dim, p in ((-2, 0.5), (-1, 0.2), (0, 0.9), (None, 0.3), (-2, 1.0)):
        whole = x.clone().requires_grad_()
        torch.manual_seed(3)
        expected = F.dropout(whole, p)
        expected.sum().backward()
        cut = (lambda t, d=dim: t) if dim is None else (lambda t, d=dim: oracle.chunk(t, d, rank, world_size))
        module = ParallelDropout(p, dim=dim)
        for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            mine = cut(x).clone().requires_grad_()
            torch.manual_seed(3)
            out = other(mine, size=None if dim is None else x.shape[dim])
            out.sum().backward()
            assert torch.equal(out, cut(expected)) and torch.equal(mine.grad, cut(whole.grad)), (dim, p)
        assert interlace.random.in_step()
        assert torch.equal(module.eval()(mine), mine)
    own = ParallelDropout(0.5, dim=0, own_mask=True)
    torch.manual_seed(4)
    kept = own(torch.ones(64 + rank))
    assert interlace.random.in_step()
    assert len({tuple(t[:64].tolist()) for t in _everywhere(kept, world_size)}) == world_size
    assert set(kept.tolist()) == {0.0, 2.0}
    if world_size > 1:
        with pytest.raises(ValueError, match=r"size=100 gives rank \d of"):
            ParallelDropout(0.5, dim=0)(torch.ones(3), size=100)
    with pytest.raises(ValueError, match=r"p=1\.5; expected 0 to 1"):
        ParallelDropout(1.5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_shard_drops_what_the_unsplit_module_drops_there(world_size: int) -> None:
    """So a loss under sequence parallelism can be compared with one without, dropout on."""
    run_distributed(world_size, _masks)


def _recomputed(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    attention = ParallelAttention(12, 3, dropout=0.4, dtype=torch.float64)
    inner = ParallelDropout(0.3, dim=-1, own_mask=True)
    row = RowParallelLinear(12, 12, input_is_parallel=False, dtype=torch.float64)

    def block(x: Tensor) -> Tensor:
        return F.dropout(row(F.dropout(inner(attention(x)), 0.1)), 0.2)

    x = torch.randn(2, 5, 12, dtype=torch.float64)
    results = []
    for reentrant in (None, False, True):
        for module in (attention, row):
            module.zero_grad()
        mine = x.clone().requires_grad_()
        torch.manual_seed(6)
        out = block(mine) if reentrant is None else checkpoint(block, mine, use_reentrant=reentrant)
        out.square().sum().backward()
        grads = [param.grad.clone() for module in (attention, row) for param in module.parameters()]
        results.append((out.detach(), mine.grad, *grads))
        assert interlace.random.in_step()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_activation_checkpointing_repeats_the_same_masks(world_size: int) -> None:
    """The sharded stream hangs on the default generator, which checkpointing saves; a stream of its own would not."""
    run_distributed(world_size, _recomputed)


class _Whole(nn.Module):
    """ParallelAttention written down plainly, with the masks that its ranks draw, head by head."""

    def __init__(self, split: ParallelAttention, whole: dict[str, Tensor], world_size: int) -> None:
        super().__init__()
        self.p = {name: nn.Parameter(value.clone()) for name, value in whole.items()}
        self.split, self.world_size = split, world_size

    def forward(self, x: Tensor, number: int) -> Tensor:
        heads = self.split.num_heads
        q, k, v = (
            F.linear(x, self.p[f"{n}.weight"]).unflatten(-1, (heads, -1)).transpose(1, 2)
            for n in ("q_proj", "k_proj", "v_proj")
        )
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        sizes = [heads // self.world_size + (r < heads % self.world_size) for r in range(self.world_size)]
        masks = []
        for rank, size in enumerate(sizes):
            own = torch.Generator().manual_seed(interlace.random.stream_seed(number, rank + 1))
            shape = (x.shape[0], size, *weights.shape[-2:])
            masks.append(torch.empty(shape, dtype=x.dtype).bernoulli_(1 - self.split.dropout, generator=own))
        y = (weights * torch.cat(masks, 1) / (1 - self.split.dropout)) @ v
        return F.linear(y.transpose(1, 2).flatten(-2), self.p["o_proj.weight"])


def _heads(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(7)
    whole = {
        f"{n}_proj.weight": torch.randn(10, 10, dtype=torch.float64, generator=generator) for n in "qkvo"
    }
    split = ParallelAttention(10, 5, dropout=0.5, dtype=torch.float64)
    with torch.no_grad():
        for name, param in split.named_parameters():
            linear = split.get_submodule(name.rpartition(".")[0])
            start, end = linear.shards.bounds(rank)
            param.copy_(whole[name].narrow(linear.split_dim, start, end - start))
    x = torch.randn(2, 6, 10, dtype=torch.float64, generator=generator)
    torch.manual_seed(8)
    number = int(torch.empty((), dtype=torch.int64).random_()) & 0x7FFFFFFF
    reference = _Whole(split, whole, world_size)
    expected = reference(x, number)
    expected.square().sum().backward()
    torch.manual_seed(8)
    out = split(x)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
    for name, param in split.named_parameters():
        linear = split.get_submodule(name.rpartition(".")[0])
        start, end = linear.shards.bounds(rank)
        want = reference.p[name].grad.narrow(linear.split_dim, start, end - start)
        torch.testing.assert_close(param.grad, want, rtol=1e-9, atol=1e-10)
    assert interlace.random.in_step(), "uneven heads put the ranks out of step"


@pytest.mark.parametrize("world_size", [2, 3])
def test_attention_dropout_differs_by_head_and_has_the_right_gradients(world_size: int) -> None:
    """5 heads over 2 ranks: with one shared stream the masks repeat and the ranks fall out of step."""
    run_distributed(world_size, _heads)
