"""Models with every kind of split parameter, beside the unsplit model they come from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from interlace.modules import ColumnParallelLinear, RowParallelLinear, Shards, split_heads
from interlace.modules.layout import ParameterLayout, layouts_of

HEAD = 3
HEADS, KV_HEADS = 6, 3


class Block(nn.Module):
    """q, k, v of 6 and 3 heads, an output, a packed gate|up, a projection with fewer features than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.q = nn.Linear(5, HEADS * HEAD)
        self.k = nn.Linear(5, KV_HEADS * HEAD)
        self.v = nn.Linear(5, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(HEADS * HEAD, 5)
        self.gate_up = nn.Linear(5, 14)
        self.down = nn.Linear(7, 5)
        self.narrow = nn.Linear(5, 2)
        self.widen = nn.Linear(2, 5, bias=False)
        self.register_buffer("scale", torch.rand(5) + 0.5)
        self.register_buffer("cached", torch.rand(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x) * self.scale
        heads = [t.unflatten(-1, (-1, HEAD)).transpose(-2, -3) for t in (self.q(h), self.k(h), self.v(h))]
        y = nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
        x = x + self.o(y.transpose(-2, -3).flatten(-2))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        x = x + self.down(gate.sigmoid() * up)
        return x + self.widen(self.narrow(x))


class Net(nn.Module):
    """Two blocks between an embedding and an output head that share their weight."""

    def __init__(self, kv_seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(kv_seed)
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [10, 9, 8, 7, 0, 1]])


def split(model: Net, world_size: int, group: Any = None) -> Net:
    """A copy of `model` with this rank's shards: overlapping kv heads from 4 ranks on, packed, uneven, empty ones."""
    model = copy.deepcopy(model)
    layout = split_heads("split", HEADS, KV_HEADS, world_size)
    query, kv = layout.query.scaled(HEAD), layout.key_value.scaled(HEAD)
    half = Shards.chunk(7, world_size)
    for block in model.layers:
        assert isinstance(block, Block)
        block.q = ColumnParallelLinear.from_linear(block.q, group, shards=query)
        block.k = ColumnParallelLinear.from_linear(block.k, group, shards=kv)
        block.v = ColumnParallelLinear.from_linear(block.v, group, shards=kv)
        block.o = RowParallelLinear.from_linear(
            block.o, group, shards=layout.output.scaled(HEAD), drop_input=True
        )
        block.gate_up = ColumnParallelLinear.from_linear(
            block.gate_up, group, shards=Shards.packed([half, half])
        )
        block.down = RowParallelLinear.from_linear(block.down, group, shards=half)
        block.narrow = ColumnParallelLinear.from_linear(block.narrow, group)
        block.widen = RowParallelLinear.from_linear(block.widen, group)
    return model


def own(whole: Tensor, layout: ParameterLayout | None, rank: int) -> Tensor:
    """What `rank` holds of a whole parameter or gradient."""
    return whole if layout is None else layout.take(whole, rank)


def assert_shards(model: nn.Module, whole: dict[str, Tensor], rank: int) -> None:
    """Every parameter of `model` is this rank's part of `whole`, bit by bit."""
    layouts = layouts_of(model)
    for name, param in model.named_parameters(remove_duplicate=False):
        expected = own(whole[name], layouts.get(name), rank)
        assert torch.equal(param.detach(), expected.to(param.dtype)), f"rank {rank}: {name}"


__all__ = ["IDS", "Block", "Net", "assert_shards", "own", "split"]
