"""How many collectives a layer costs, counted by `interlace.count_ops`: two each way, and their volume."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import interlace
import interlace.functional as il
from interlace.counting import OpCounts
from interlace.modules import ParallelAttention, ParallelMLP
from tests import oracle
from tests.distributed import run_distributed
from tests.parallelize import models

TOKENS, HIDDEN = 12, 16  # tokens divide by 2, 3 and 4: shards of equal size
TWO_SUMS = Counter({"gemm_all_reduce": 2})


class Layer(nn.Module):
    """A transformer layer made of our blocks; norms without parameters, whose gradients would be sums of their own."""

    def __init__(self, sequence_parallel: bool) -> None:
        super().__init__()
        options = {"sequence_parallel": sequence_parallel, "dtype": torch.float64}
        self.attention = ParallelAttention(HIDDEN, 8, 4, causal=True, rope_theta=1e4, **options)
        self.mlp = ParallelMLP(HIDDEN, 24, gated=True, activation="silu", bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(nn.functional.rms_norm(x, (HIDDEN,)))
        return x + self.mlp(nn.functional.rms_norm(x, (HIDDEN,)))


def _own(rank: int, world_size: int) -> None:
    counted: dict[bool, OpCounts] = {}
    for sequence in (False, True):
        torch.manual_seed(1)
        layer = Layer(sequence)
        x = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)
        x = (oracle.chunk(x, 1, rank, world_size) if sequence else x).clone().requires_grad_()
        with interlace.count_ops() as counts:
            out = layer(x)
            assert not counts.backward
            out.square().sum().backward()
        counted[sequence] = counts
        with torch.no_grad(), interlace.count_ops() as inference:
            layer(x)
        assert (inference.forward, inference.forward_bytes) == (counts.forward, counts.forward_bytes)
    plain, cut = counted[False], counted[True]
    whole = 2 * TOKENS * HIDDEN * 8  # bytes of x
    assert plain.forward == TWO_SUMS
    # q, k, v and gate, up are one sum each
    assert plain.backward == Counter({"sum_gemm_all_reduce": 2})
    assert plain.forward_bytes == plain.backward_bytes == 2 * 2 * whole
    assert cut.forward == Counter({"all_gather_gemm": 2, "gemm_reduce_scatter": 2})
    assert cut.forward_bytes == plain.forward_bytes, "pairs of gather and scatter move what the sums moved"
    # the gather of x again, for the gradients of weights, is the price of keeping a shard of x only
    assert cut.backward == Counter({"all_gather_gemm": 2, "sum_gemm_reduce_scatter": 2, "all_gather": 2})
    assert cut.backward_bytes == plain.backward_bytes + 2 * whole


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_layer_of_our_modules_has_two_collectives_each_way(world_size: int) -> None:
    """With sequence parallelism two pairs of gather and scatter, of the same volume."""
    run_distributed(world_size, _own)


def _model_counts(layers: int, sequence: bool) -> OpCounts:
    model = models.make("llama", 8, 4, num_hidden_layers=layers)
    interlace.parallelize(model, None, sequence_parallel=sequence)
    ids = torch.randint(1, 61, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    with interlace.count_ops() as counts:
        models.loss_of(model, ids)[1].backward()
    return counts


def _per_layer(sequence: bool) -> tuple[Counter[str], Counter[str]]:
    """What two layers more cost, halved: embedding, head and the ends of the stack cancel out."""
    one, three = _model_counts(1, sequence), _model_counts(3, sequence)
    found = []
    for few, many in ((one.forward, three.forward), (one.backward, three.backward)):
        assert all((many[name] - few[name]) % 2 == 0 for name in many)
        found.append(Counter({n: (many[n] - few[n]) // 2 for n in many if many[n] != few[n]}))
    return found[0], found[1]


def _llama(rank: int, world_size: int) -> None:
    assert _per_layer(False) == (TWO_SUMS, Counter({"sum_gemm_all_reduce": 2}))
    forward, backward = _per_layer(True)
    assert forward == Counter({"all_gather_gemm": 2, "gemm_reduce_scatter": 2})
    norms = Counter({"all_reduce": 2})  # the two norms see a shard of the tokens each
    gathers = Counter({"all_gather": 2})
    assert backward == Counter({"all_gather_gemm": 2, "sum_gemm_reduce_scatter": 2}) + norms + gathers


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_layer_of_a_split_llama_has_two_collectives_each_way(world_size: int) -> None:
    """Not three with q, k and v apart, and no gradient of a replicated norm summed without need."""
    run_distributed(world_size, _llama, timeout=120.0)


def _counter(rank: int, world_size: int) -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    with interlace.count_ops() as outer:
        with interlace.count_ops() as counts:
            il.all_reduce(x, group=None).sum().backward()
            il.column_linear(x, weight, group=None)
            with torch.no_grad(), interlace.backend("reference"):
                il.linear_all_reduce(x, weight, group=None)
        il.all_gather(x.detach(), group=None)
    assert counts.forward == Counter({"all_reduce": 1, "gemm_all_reduce": 1}), (
        "one of torch.distributed is missing"
    )
    assert counts.backward == Counter({"all_reduce": 1}) and counts.total == 3
    assert (counts.forward_bytes, counts.backward_bytes) == (2 * 24 * 4 + 2 * 30 * 4, 2 * 24 * 4)
    assert outer.by_name == counts.by_name + Counter({"all_gather": 1})
    assert "gemm_all_reduce" in str(counts)


def test_the_counter_sees_every_collective_and_nothing_else() -> None:
    """Both backends, forward and backward apart, nested."""
    run_distributed(2, _counter)
