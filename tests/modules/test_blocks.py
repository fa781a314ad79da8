"""ParallelMLP and ParallelAttention against unsharded blocks of the same weights: outputs and all gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.modules import KVCache, ParallelAttention, ParallelLinear, ParallelMLP
from interlace.modules.rotary import apply_rotary, rotary_angles
from tests import oracle
from tests.distributed import run_distributed

WORLDS = (1, 2, 3, 4)
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def _cut(t: Tensor, rank: int, world_size: int, sequence: bool) -> Tensor:
    return oracle.chunk(t, -2, rank, world_size) if sequence else t


def _own(whole: Tensor, linear: nn.Module, name: str) -> Tensor:
    if not isinstance(linear, ParallelLinear) or (linear.split_dim == 1 and name == "bias"):
        return whole
    start, end = linear.shards.bounds(linear.rank)
    return whole.narrow(linear.split_dim, start, end - start)


def _check_grads(what: str, block: nn.Module, whole: dict[str, Tensor]) -> None:
    """`whole`: unsplit parameters by name, with gradients."""
    for name, param in block.named_parameters():
        owner, _, kind = name.rpartition(".")
        want = _own(whole[name].grad, block.get_submodule(owner), kind)
        assert param.grad is not None, f"{what}: {name} has no gradient"
        torch.testing.assert_close(param.grad, want, **EXACT, msg=lambda m, n=name: f"{what}: {n}: {m}")


def _mlp(rank: int, world_size: int) -> None:
    for gated, bias, sequence, act in itertools.product(*[(False, True)] * 3, ("gelu", "silu")):
        what = f"gated={gated} bias={bias} sequence_parallel={sequence}"
        torch.manual_seed(1)
        up, gate = (nn.Linear(6, 13, bias=bias, dtype=torch.float64) for _ in range(2))
        down = nn.Linear(13, 5, bias=bias, dtype=torch.float64)
        x, grad = torch.randn(2, 7, 6, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
        block = ParallelMLP.from_linears(
            up, down, gate=gate if gated else None, activation=act, sequence_parallel=sequence
        )
        x_whole = x.clone().requires_grad_()
        hidden = getattr(F, act)(gate(x_whole)) * up(x_whole) if gated else getattr(F, act)(up(x_whole))
        expected = down(hidden)
        expected.backward(grad)
        x_local = _cut(x, rank, world_size, sequence).clone().requires_grad_()
        out = block(x_local, gather_size=7) if sequence else block(x_local)
        out.backward(_cut(grad, rank, world_size, sequence))
        torch.testing.assert_close(out, _cut(expected, rank, world_size, sequence), **EXACT)
        torch.testing.assert_close(x_local.grad, _cut(x_whole.grad, rank, world_size, sequence), **EXACT)
        whole = {"up_proj": up, "down_proj": down} | ({"gate_proj": gate} if gated else {})
        _check_grads(what, block, {f"{n}.{p}": t for n, m in whole.items() for p, t in m.named_parameters()})


@pytest.mark.parametrize("world_size", WORLDS)
def test_mlp_is_the_unsharded_one(world_size: int) -> None:
    """13 intermediate features and 7 tokens do not divide by 2, 3 or 4."""
    run_distributed(world_size, _mlp)


ATTENTIONS = [
    {"num_heads": 4},
    {"num_heads": 9, "num_kv_heads": 3, "causal": True, "rope_theta": 1e4},
    {"num_heads": 6, "num_kv_heads": 2, "causal": True, "sliding_window": 3, "qk_norm_eps": 1e-6},
    {"num_heads": 4, "num_kv_heads": 1, "bias": True, "qk_norm_eps": 1e-6, "rope_theta": 1e3},
    {"num_heads": 2, "num_kv_heads": 1, "causal": True, "bias": True, "out_bias": False},
    {"num_heads": 3, "num_kv_heads": 3, "bias": True},
]


def _parameters(options: dict, hidden: int, head_dim: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads, kv = options["num_heads"], options.get("num_kv_heads", options["num_heads"])
    rows = {"q_proj": heads * head_dim, "k_proj": kv * head_dim, "v_proj": kv * head_dim, "o_proj": hidden}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, n in rows.items():
        shapes[f"{name}.weight"] = (n, heads * head_dim if name == "o_proj" else hidden)
        if options.get("bias") and not (name == "o_proj" and options.get("out_bias") is False):
            shapes[f"{name}.bias"] = (n,)
    if "qk_norm_eps" in options:
        shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    return {
        name: oracle.normals(shape, torch.float64, generator).requires_grad_()
        for name, shape in shapes.items()
    }


def _unsharded(p: dict[str, Tensor], x: Tensor, options: dict, mask: Tensor | None) -> Tensor:
    """Attention written down plainly: every head by itself, no cache, no kernel."""
    heads, kv, head_dim = options["num_heads"], options.get("num_kv_heads", options["num_heads"]), 4
    tokens = x.shape[-2]
    q, k, v = (
        F.linear(x, p[f"{n}.weight"], p.get(f"{n}.bias")).unflatten(-1, (-1, head_dim))
        for n in ("q_proj", "k_proj", "v_proj")
    )
    if "qk_norm_eps" in options:
        eps = options["qk_norm_eps"]
        q, k = (
            t * (t.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * p[f"{n}_norm.weight"]
            for t, n in ((q, "q"), (k, "k"))
        )
    q, k, v = (t.transpose(-2, -3) for t in (q, k, v))
    if "rope_theta" in options:
        angles = rotary_angles(torch.arange(tokens), head_dim, options["rope_theta"], x.dtype)
        q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
    k, v = (t.repeat_interleave(heads // kv, dim=-3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / head_dim**0.5
    if mask is not None:
        scores = scores + mask
    if options.get("causal"):
        distance = torch.arange(tokens).unsqueeze(-1) - torch.arange(tokens)
        hidden = (distance < 0) | (distance >= options.get("sliding_window", tokens))
        scores = scores.masked_fill(hidden, float("-inf"))
    y = (scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2)
    return F.linear(y, p["o_proj.weight"], p.get("o_proj.bias"))


def _built(options: dict, hidden: int, whole: dict[str, Tensor], **more: object) -> ParallelAttention:
    block = ParallelAttention(hidden, head_dim=4, dtype=torch.float64, **options, **more)
    assert set(whole) == {name for name, _ in block.named_parameters()}
    with torch.no_grad():
        for name, param in block.named_parameters():
            owner, _, kind = name.rpartition(".")
            param.copy_(_own(whole[name], block.get_submodule(owner), kind))
    return block


def _attention(rank: int, world_size: int) -> None:
    hidden, tokens = 10, 7
    for seed, (options, sequence) in enumerate(itertools.product(ATTENTIONS, (False, True))):
        for masked in (None, 1, options["num_heads"]):
            what = f"{options} sequence_parallel={sequence} masked={masked}"
            whole = _parameters(options, hidden, 4, seed)
            x, grad = torch.Generator().manual_seed(seed), None
            x, grad = (oracle.normals((2, tokens, hidden), torch.float64, g) for g in [x] * 2)
            mask = None
            if masked:
                mask = oracle.normals(
                    (2, masked, tokens, tokens), torch.float64, torch.Generator().manual_seed(seed)
                )
            x_whole = x.clone().requires_grad_()
            expected = _unsharded(whole, x_whole, options, mask)
            expected.backward(grad)
            block = _built(options, hidden, whole, sequence_parallel=sequence)
            x_local = _cut(x, rank, world_size, sequence).clone().requires_grad_()
            out = block(x_local, mask=mask, gather_size=tokens if sequence else None)
            out.backward(_cut(grad, rank, world_size, sequence))
            torch.testing.assert_close(
                out, _cut(expected, rank, world_size, sequence), **EXACT, msg=lambda m, w=what: f"{w}: {m}"
            )
            torch.testing.assert_close(x_local.grad, _cut(x_whole.grad, rank, world_size, sequence), **EXACT)
            _check_grads(what, block, whole)


@pytest.mark.parametrize("world_size", WORLDS)
def test_attention_is_the_unsharded_one(world_size: int) -> None:
    """Uneven groups, replicated kv heads, idle ranks, q/k norms, rotary, windows, masks for one or for all heads."""
    run_distributed(world_size, _attention)


def _cached(rank: int, world_size: int) -> None:
    hidden = 10
    for options in ATTENTIONS:
        if not options.get("causal"):
            continue
        whole = _parameters(options, hidden, 4, 3)
        block = _built(options, hidden, whole)
        x = oracle.normals((2, 8, hidden), torch.float64, torch.Generator().manual_seed(5))
        expected = _unsharded(whole, x, options, None)
        cache = KVCache()
        with torch.no_grad():
            steps = [block(part, cache=cache) for part in x.split([4, 1, 2, 1], dim=-2)]
        torch.testing.assert_close(torch.cat(steps, dim=-2), expected.detach(), **EXACT)
        assert cache.length == 8 and cache.keys.shape[-3] == block.local_num_kv_heads


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_cache_in_steps_gives_the_tokens_of_one_pass(world_size: int) -> None:
    """Positions and the causal mask must go on from the cache, not start again."""
    run_distributed(world_size, _cached)


def _mistakes(rank: int, world_size: int) -> None:
    for call, text in (
        (lambda: ParallelAttention(10, 4), r"hidden_size=10 .* num_heads=4"),
        (lambda: ParallelAttention(12, 4, 3), r"num_heads=4 .* num_kv_heads=3"),
        (lambda: ParallelAttention(12, 4, sliding_window=2), "sliding_window=2 with causal=False"),
        (lambda: ParallelMLP(8, 8, activation="swish"), "activation='swish'"),
        (
            lambda: ParallelMLP.from_linears(nn.Linear(4, 6), nn.Linear(5, 4)),
            "down takes 5 features, expected the 6",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_mistakes_are_errors_at_construction() -> None:
    run_distributed(2, _mistakes)
