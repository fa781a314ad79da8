"""Families with blocks of their own kind: packed, transposed and interleaved projections, alibi, relative biases, cross
attention. Logits, every gradient and generation equal the unsplit model's; what cannot be right is refused.
"""

from __future__ import annotations

import copy
import io
import sys
import types

import pytest
import torch
from torch import Tensor, nn

import interlace
from interlace.parallelize.api import parallelize
from interlace.parallelize.hf_plan import SOURCE
from interlace.parallelize.plan import Place
from interlace.parallelize.structure import auto_plan
from tests.distributed import run_distributed
from tests.parallelize import zoo
from tests.parallelize.models import assert_near

pytest.importorskip("transformers")
NOT_BY_SEQUENCE = {
    "opt": "may not reshape its input, but it calls reshape, view",
    "t5": "nothing but q, k and v may read the input of encoder",
    "whisper": "nothing but q, k and v may read the input of model.encoder",
    "olmo2": "knows no sequence shards",
}
PAIRS = (
    "opt_norm_after",
    "t5_gated",
    "t5_2_heads",
    "bart",
    "gpt2_cross",
    "bert_cross",
)  # refused like their kin
NOT_WRITING = ("vit", "distilbert", "gpt2_cross", "bert_cross")
STATIC_FAILS_WHOLE = ("falcon_alibi",)  # of transformers itself: the mask of a static cache has four dims


def _splits(rank: int, world_size: int, names: list[str], sequence_parallel: bool) -> None:
    for name in names:
        try:
            zoo.check_split(name, rank, sequence_parallel=sequence_parallel)
        except Exception as error:
            raise AssertionError(f"{name}, sequence_parallel={sequence_parallel}: {error}") from error


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_kind_of_block_has_the_logits_and_gradients_of_the_unsplit_model(world_size: int) -> None:
    """Packed rows cut in equal parts give q to one rank and k to another; alibi of all heads meets some of them."""
    names = list(zoo.ZOO) if world_size > 1 else ["phi3", "gpt2", "falcon_new", "bloom", "t5", "olmo2"]
    run_distributed(world_size, _splits, names, False, timeout=240.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_of_block_is_right_with_sequence_parallel(world_size: int) -> None:
    """Parallel residuals, one packed projection, a transposed one: shards in between, gathered once per block."""
    names = [name for name in zoo.ZOO if name not in (*NOT_BY_SEQUENCE, *PAIRS)]
    run_distributed(world_size, _splits, names, True, timeout=240.0)


def test_what_cannot_run_on_shards_of_the_sequence_is_refused() -> None:
    """Encoder outputs are whole where decoder inputs are shards; a layer that merges batch and sequence mixes both."""
    for name, reason in NOT_BY_SEQUENCE.items():
        with pytest.raises(ValueError, match=reason):
            auto_plan(zoo.make(name), Place(0, 2, sequence_parallel=True))


def _hidden_states(rank: int, world_size: int) -> None:
    whole = zoo.make("phi3")
    for sequence_parallel in (False, True):
        split = parallelize(copy.deepcopy(whole), None, sequence_parallel=sequence_parallel)
        given = zoo.inputs(whole)
        expected = whole(**given, output_hidden_states=True).hidden_states
        if sequence_parallel:
            with pytest.raises(ValueError, match="would return shards of the sequence"):
                split(**given, output_hidden_states=True)
            continue
        for found, want in zip(
            split(**given, output_hidden_states=True).hidden_states, expected, strict=True
        ):
            assert_near("hidden states", found, want)


def test_hidden_states_are_whole_or_refused() -> None:
    """Recorded between layers they are shards of the sequence, and a loss on them would be one on a part."""
    run_distributed(2, _hidden_states)


def _generates(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        whole = zoo.make(name)
        split = parallelize(copy.deepcopy(whole), None)
        given = {key: value for key, value in zoo.inputs(whole).items() if key != "decoder_input_ids"}
        for cache in ("dynamic",) if name in STATIC_FAILS_WHOLE else ("dynamic", "static"):
            settings = {
                "max_new_tokens": 5,
                "do_sample": False,
                "eos_token_id": None,
                "cache_implementation": cache,
            }
            expected, found = (model.generate(**given, **settings) for model in (whole, split))
            assert torch.equal(found, expected), f"{name} {cache}: {found} {expected}"


@pytest.mark.parametrize("world_size", [2, 4])
def test_generation_with_a_cache_is_that_of_the_unsplit_model(world_size: int) -> None:
    """Caches hold local heads, of self and of cross attention; alibi and relative biases grow with the tokens."""
    writers = [name for name in zoo.ZOO if name not in NOT_WRITING]
    run_distributed(world_size, _generates, writers, timeout=240.0)


def _copies(rank: int, world_size: int) -> None:
    for name in ("phi3", "gpt2", "bloom", "t5"):
        whole, split = zoo.check_split(name, rank)
        buffer = io.BytesIO()
        torch.save(split, buffer)
        buffer.seek(0)
        given = zoo.inputs(whole)
        for other in (copy.deepcopy(split), torch.load(buffer, weights_only=False)):
            other.set_attn_implementation("eager")
            assert_near(f"{name}, copied", zoo.loss_of(other, given)[0], zoo.loss_of(split, given)[0])
            other.load_state_dict(split.state_dict())
    from transformers.pytorch_utils import Conv1D

    split = parallelize(zoo.make("gpt2"), None)
    attention = split.transformer.h[0].attn
    assert isinstance(attention.c_attn, Conv1D) and attention.c_attn.weight.shape[0] == 48
    phi3 = parallelize(zoo.make("phi3_one_kv"), None)
    config = phi3.model.layers[0].self_attn.config
    assert phi3.config.num_attention_heads == 6 and config.num_attention_heads < 6
    phi3.config.rope_theta = 7.0
    assert config.rope_theta == 7.0, "the module's view is cut off from the config of the model"
    with pytest.raises(AttributeError, match="number of this rank"):
        config.num_attention_heads = 6


def test_split_models_of_every_kind_can_be_copied_and_saved() -> None:
    """Hooks, views of the config and transposed linears must survive deepcopy, pickle and a change of attention."""
    run_distributed(2, _copies)


def _given_plans(rank: int, world_size: int) -> None:
    for name, plan in (
        ("gpt2", {"transformer.h.*.attn.c_attn": "column", "transformer.h.*.attn.c_proj": "row"}),
        (
            "gpt2",
            {
                "transformer.h.*.mlp.c_fc": "column_gather_output",
                "transformer.h.*.mlp.c_proj": "row_split_input",
            },
        ),
        ("phi3", {"model.layers.*.mlp.gate_up_proj": "column", "model.layers.*.mlp.down_proj": "row"}),
        ("phi3", {"model.layers.*.self_attn.qkv_proj": "column", "model.layers.*.self_attn.o_proj": "row"}),
    ):
        zoo.check_split(name, rank, plan=plan)


@pytest.mark.parametrize("world_size", [2, 3])
def test_packed_linears_named_in_a_plan_are_cut_block_by_block(world_size: int) -> None:
    """Taken at its word, "column" would give the gate to one rank and up to the other."""
    run_distributed(world_size, _given_plans)


def test_the_plan_says_who_decided() -> None:
    """The plan a model brings comes first; where it knows no packed rows the structure cuts them."""
    sources = auto_plan(zoo.make("starcoder2"), Place(0, 2)).sources
    assert sources["model.layers.0.self_attn.q_proj"] == sources["model.layers.1.mlp.c_proj"] == SOURCE
    sources = auto_plan(zoo.make("phi3"), Place(0, 2)).sources
    assert sources["model.layers.0.mlp.gate_up_proj"] == f"structure ({SOURCE} says colwise_gather_output)"
    plan = auto_plan(zoo.make("olmo2"), Place(0, 2))  # norms over all heads: no structure is known
    attention = plan.steps["model.layers.0.self_attn.q_proj"]
    assert (attention.style, plan.sources[attention.name]) == ("column_gather_output", SOURCE)
    assert set(auto_plan(zoo.make("gpt2"), Place(0, 2)).sources.values()) == {"structure"}


def _costs(rank: int, world_size: int) -> None:
    for name in ("gpt2", "phi3", "neox", "bloom", "codegen"):
        found = []
        for layers in (1, 2):
            split = parallelize(zoo.make(name, layers).float(), None, strict=True)
            with interlace.count_ops() as forward:
                logits = split(**zoo.inputs(split)).logits
            with interlace.count_ops() as backward:
                logits.sum().backward()
            found.append((forward.forward.total(), backward.backward.total()))
        # the vocabulary takes two more forward and one backward
        assert found == [(4, 3), (6, 5)], f"{name}: {found}"
    for name in ("phi3", "bloom"):
        whole = zoo.make(name)
        split = torch.compile(parallelize(copy.deepcopy(whole), None), fullgraph=True, backend="aot_eager")
        given = zoo.inputs(whole)
        assert_near(f"{name}, compiled", zoo.loss_of(split, given)[0], zoo.loss_of(whole, given)[0])


def test_a_layer_costs_two_collectives_each_way_and_compiles_whole() -> None:
    """Packed projections have one input gradient to sum; hooks and views of the config must not break the graph."""
    run_distributed(2, _costs, timeout=240.0)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 54), nn.Linear(54, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._unit(self.up(x)))

    def _unit(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


class _Interleaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(48, 108), nn.Linear(54, 48)

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(both[..., ::2] * both[..., 1::2].sigmoid())


def _refused(model: nn.Module, reason: str) -> None:
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=reason):
        parallelize(model, None)
    assert before == {name: id(module) for name, module in model.named_modules()}


def _look_alikes(rank: int, world_size: int) -> None:
    import transformers

    for block, reason in (
        (_Norm(), "method _unit calls norm"),
        (_Interleaved(), "not known to cut them in two halves"),
    ):
        model = zoo.make("phi")
        model.model.layers[1].mlp = block.double()
        _refused(model, rf"model.layers.1.mlp: .*{reason}")
    model = zoo.make("phi3")
    kind = type(model.model.layers[0].self_attn)
    module = types.ModuleType("somebody_elses")
    module.Phi3Attention = type("Phi3Attention", (kind,), {"__module__": module.__name__})
    sys.modules[module.__name__] = module
    for layer in model.model.layers:
        layer.self_attn.__class__ = module.Phi3Attention
    model._tp_plan, model.config.base_model_tp_plan = {}, None
    _refused(model, "no stack of layers with attention blocks")
    settings = zoo.BLOOM | {"slow_but_exact": True, "pretraining_tp": 2}
    _refused(
        transformers.BloomForCausalLM(transformers.BloomConfig(**settings)),
        "with slow_but_exact=True its forward reads weights of its own",
    )
    settings = {"vocab_size": 61, "d_model": 48, "decoder_layers": 1, "decoder_attention_heads": 6}
    _refused(
        transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**settings, decoder_ffn_dim=54)),
        "reshapes by embed_dim, the width of its input",
    )


def test_what_only_looks_alike_is_refused() -> None:
    """Same names and shapes, another computation: each of these would give wrong numbers without an error."""
    run_distributed(2, _look_alikes)
