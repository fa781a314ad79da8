"""A small decoder that knows nothing of splitting, its plan of styles, and the comparison with the unsplit one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from interlace import styles

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 23, 24, 12, 12, 4, 18


class SelfAttention(nn.Module):
    """Grouped heads with norms of q and k; reads how many heads it has from its attributes."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, HEAD_DIM
        self.q_proj = nn.Linear(WIDTH, heads * HEAD_DIM)
        self.k_proj = nn.Linear(WIDTH, kv_heads * HEAD_DIM)
        self.v_proj = nn.Linear(WIDTH, kv_heads * HEAD_DIM)
        self.o_proj = nn.Linear(heads * HEAD_DIM, WIDTH)
        # a bias of k_norm would have no gradient: softmax does not see it
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, HEAD_DIM))).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.num_kv_heads, HEAD_DIM))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_kv_heads, HEAD_DIM)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn, self.mlp = SelfAttention(heads, kv_heads), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """ids [B, S] -> logits [B, S, vocabulary]; the output head is tied to the embedding."""

    def __init__(
        self, heads: int = HEADS, kv_heads: int = KV_HEADS, vocab: int = VOCAB, layers: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(Layer(heads, kv_heads) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make(dtype: torch.dtype = torch.float64, **options: int) -> Decoder:
    """The same model on every rank, with nothing left at ones or zeros."""
    torch.manual_seed(7)
    model = Decoder(**options)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    return model.to(dtype)


def tp_mesh() -> DeviceMesh:
    """One axis over all ranks."""
    return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("tp",))


def plan(sequence_parallel: bool = False) -> dict[str, Any]:
    """Every module of Decoder with parameters."""
    sequence: dict[str, Any] = {"sequence_parallel": True, "sequence_dim": 1} if sequence_parallel else {}
    norm = styles.SequenceNorm if sequence_parallel else styles.Replicated
    return {
        "embed": styles.VocabEmbedding(**sequence),
        "layers.*.norm1": norm(),
        "layers.*.norm2": norm(),
        "layers.*.attn": styles.Attention(**sequence),
        "layers.*.mlp": styles.GateUp(**sequence),
        "layers.*.mlp.down_proj": styles.RowLinear(**sequence),
        "norm": norm(),
        "head": styles.ColumnLinear(gather_output=True, **sequence),
    }


def split(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool = False) -> nn.Module:
    """`model` split in place by every style."""
    return parallelize_module(model, mesh, plan(sequence_parallel))


def ids_of(vocab: int = VOCAB, batch: int = 2, length: int = 7, seed: int = 1) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor) -> Tensor:
    """Weighs every logit differently."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (logits * weights.to(logits.dtype)).sum()


def whole_of(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_near(what: str, found: Tensor, expected: Tensor, limit: float = 1e-11) -> None:
    """Relative Frobenius norm; fp64 sums of a few dozen terms, two layers deep."""
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-8)).item()
    assert error < limit, f"{what}: relative error {error:.2e}"


def check_grads(whole: nn.Module, model: nn.Module, limit: float = 1e-11) -> None:
    """Every gradient is a DTensor placed like its parameter, and the whole one of the unsplit model."""
    named = dict(model.named_parameters())
    expected = dict(whole.named_parameters())
    assert list(named) == list(expected), "names changed"
    for name, param in named.items():
        assert isinstance(param, DTensor), name
        assert param.shape == expected[name].shape and param.dtype == expected[name].dtype, name
        if expected[name].grad is None:
            assert param.grad is None, name
            continue
        assert isinstance(param.grad, DTensor) and param.grad.placements == param.placements, name
        assert_near(name, param.grad.full_tensor(), expected[name].grad, limit)


def check_model(
    model: nn.Module, mesh: DeviceMesh, ids: Tensor, sequence_parallel: bool = False
) -> nn.Module:
    """Split a copy, compare logits and all gradients; returns the copy."""
    whole, model = model, copy.deepcopy(model)
    split(model, mesh, sequence_parallel)
    expected, logits = whole(ids), model(ids)
    assert type(logits) is Tensor, "activations are plain tensors"
    assert_near("logits", logits, expected)
    whole.zero_grad()
    loss_of(expected).backward()
    loss_of(logits).backward()
    check_grads(whole, model)
    return model
