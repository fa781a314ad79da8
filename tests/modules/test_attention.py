"""ParallelAttention beyond one pass: static caches, construction from linears, and worlds of 5 to 7 ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import interlace.functional as il
from interlace.modules import (
    KVCache,
    ParallelAttention,
    ParallelMLP,
    Shards,
    StaticKVCache,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from tests import oracle
from tests.distributed import run_distributed
from tests.modules.test_blocks import ATTENTIONS, EXACT, _built, _check_grads, _parameters, _unsharded

HIDDEN = 10


def _static(rank: int, world_size: int) -> None:
    for options in (*ATTENTIONS, {"num_heads": 4, "num_kv_heads": 2, "causal": True, "sliding_window": 1}):
        whole = _parameters(options, HIDDEN, 4, 3)
        block = _built(options, HIDDEN, whole)
        x = oracle.normals((2, 8, HIDDEN), torch.float64, torch.Generator().manual_seed(5))
        cache, growing = block.static_cache(2, 11), KVCache()
        assert cache.keys.shape == (2, block.local_num_kv_heads, 11, 4)
        with torch.no_grad():
            for _ in range(2):  # the second time over what is left of the first
                cache.reset()
                growing = KVCache()
                for part in x.split([4, 1, 2, 1], dim=-2):
                    expected, found = block(part, cache=growing), block(part, cache=cache)
                    torch.testing.assert_close(found, expected, **EXACT, msg=lambda m, o=options: f"{o}: {m}")
                    cache.keys[:, :, cache.length :] = 1e9  # what is not filled must not be seen
            if options.get("causal"):
                one_pass = _unsharded(whole, x, options, None)[:, -1:]
                torch.testing.assert_close(found, one_pass, **EXACT)
            assert cache.length == growing.length == 8
            with pytest.raises(ValueError, match="8 tokens and 4 more are over max_tokens=11"):
                block(x[:, :4], cache=cache)
        cache.reset()
        with pytest.raises(ValueError, match=r"use torch\.no_grad"):
            block(x, cache=cache)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_static_cache_gives_what_a_growing_one_gives(world_size: int) -> None:
    """Causal or not, with windows, replicated kv heads and idle ranks; leftovers in the memory are not seen."""
    run_distributed(world_size, _static)


def _compiled_steps(rank: int, world_size: int) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(1)
    block = ParallelAttention(12, 3, 1, causal=True, rope_theta=1e4, dtype=torch.float64)
    compiles = CompileCounterWithBackend("aot_eager")

    def step(x: Tensor, cache: StaticKVCache) -> Tensor:
        return block(x, cache=cache)

    compiled = torch.compile(step, fullgraph=True, backend=compiles)
    x = oracle.normals((1, 6, 12), torch.float64, torch.Generator().manual_seed(2))
    caches = [block.static_cache(1, 6) for _ in range(2)]
    with torch.no_grad():
        for token in x.split(1, dim=-2):
            expected, found = step(token, caches[0]), compiled(token, caches[1])
            torch.testing.assert_close(found, expected, **EXACT)
    assert compiles.frame_count == 1, f"compiled {compiles.frame_count} times for six steps"


def test_steps_with_a_static_cache_compile_once() -> None:
    """A length kept as a number would be another graph for every token."""
    run_distributed(2, _compiled_steps, timeout=240.0)


def _from_linears(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    q, k, v, o = (nn.Linear(10, n, dtype=torch.float64) for n in (24, 8, 8, 1))
    o = nn.Linear(24, 10, dtype=torch.float64)
    norms = [nn.RMSNorm(4, eps=1e-6, dtype=torch.float64) for _ in range(2)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    options = {"num_heads": 6, "num_kv_heads": 2, "causal": True, "bias": True, "qk_norm_eps": 1e-6}
    modules = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": o, "q_norm": norms[0], "k_norm": norms[1]}
    whole = {f"{n}.{p}": t for n, m in modules.items() for p, t in m.named_parameters()}
    x = oracle.normals((2, 7, 10), torch.float64, torch.Generator().manual_seed(4))
    expected = _unsharded(whole, x, options, None)
    expected.square().sum().backward()
    for sequence in (False, True):
        block = ParallelAttention.from_linears(
            q, k, v, o, 6, 2, causal=True, q_norm=norms[0], k_norm=norms[1], sequence_parallel=sequence
        )
        mine = oracle.chunk(x, 1, rank, world_size) if sequence else x
        out = block(mine, gather_size=7 if sequence else None)
        out.square().sum().backward()
        want = oracle.chunk(expected, 1, rank, world_size) if sequence else expected
        torch.testing.assert_close(out, want, **EXACT)
        _check_grads(f"sequence_parallel={sequence}", block, whole)
    with pytest.raises(ValueError, match="not 6 query and 3 kv heads of one length"):
        ParallelAttention.from_linears(q, k, v, o, 6, 3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_takes_the_linears_of_an_unsplit_block(world_size: int) -> None:
    """By whole kv groups, not by rows, and the norms as copies of their own."""
    run_distributed(world_size, _from_linears)


def _many(rank: int, world_size: int) -> None:
    for seed, options in enumerate(ATTENTIONS):
        whole = _parameters(options, HIDDEN, 4, seed)
        x = oracle.normals((2, 4, HIDDEN), torch.float64, torch.Generator().manual_seed(seed))
        whole_x, mine = (x.clone().requires_grad_() for _ in range(2))
        block = _built(options, HIDDEN, whole)
        expected, out = _unsharded(whole, whole_x, options, None), block(mine)
        for y in (expected, out):
            y.square().sum().backward()
        torch.testing.assert_close(out, expected, **EXACT, msg=lambda m, o=options: f"{o}: {m}")
        torch.testing.assert_close(mine.grad, whole_x.grad, **EXACT)
        _check_grads(str(options), block, whole)
    torch.manual_seed(5)
    embedding, up, down = (
        nn.Embedding(11, 6, dtype=torch.float64),
        *(nn.Linear(*sizes, dtype=torch.float64) for sizes in ((6, 13), (13, 6))),
    )
    head = nn.Linear(6, 11, dtype=torch.float64)
    head.weight = embedding.weight
    ids = torch.tensor([[0, 3, 10, 3], [7, 7, 1, 5]])
    ours = nn.ModuleList(
        [VocabParallelEmbedding.from_embedding(embedding), ParallelMLP.from_linears(up, down),
         VocabParallelHead.from_linear(head)]
    )  # fmt: skip
    ours[2].weight = ours[0].weight
    loss = ours[2].loss(ours[1](ours[0](ids)), ids.flip(1))
    loss.backward()
    bias_grad, ours[2].bias.grad = ours[2].bias.grad.clone(), None  # the whole head has the same bias
    expected = nn.functional.cross_entropy(
        head(down(nn.functional.gelu(up(embedding(ids))))).flatten(0, 1), ids.flip(1).flatten()
    )
    expected.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    torch.testing.assert_close(bias_grad, head.bias.grad, **EXACT)
    start, end = Shards.chunk(11, world_size).bounds(rank)
    torch.testing.assert_close(ours[0].weight.grad, embedding.weight.grad[start:end], **EXACT)
    start, end = ours[1].up_proj.shards.bounds(rank)
    torch.testing.assert_close(ours[1].up_proj.weight.grad, up.weight.grad[start:end], **EXACT)
    oracle.check_same_on_all_ranks("loss", loss)
    assert il.all_reduce(torch.ones(1), group=None).item() == world_size


@pytest.mark.parametrize("world_size", [5, 6, 7])
def test_blocks_are_right_on_worlds_that_divide_nothing(world_size: int) -> None:
    """More ranks than heads, than kv heads, and almost than entries of the vocabulary: 11 over 7 leaves one empty."""
    run_distributed(world_size, _many)
