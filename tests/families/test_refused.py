"""Families that the catalogue does not have: what is not understood raises and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from interlace.families.catalogue import FAMILIES, Family
from interlace.families.check import Row, compare
from tests.distributed import run_distributed

transformers = pytest.importorskip("transformers")
# what a small model is in the words of one configuration or another
SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "d_embed"), 48),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "dff", "decoder_ffn_dim"), 56
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    "vocab_size": 61,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "state_size": 4,
    "time_step_rank": 4,
    "attention_hidden_size": 48,
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# not a sum over heads or features as they stand: recurrences, norms over all heads, gates and experts of their own
REFUSED = {
    "bitnet": ("BitNetConfig", "BitNetForCausalLM"),
    "ctrl": ("CTRLConfig", "CTRLLMHeadModel"),
    "doge": ("DogeConfig", "DogeForCausalLM"),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM"),
    "mamba": ("MambaConfig", "MambaForCausalLM"),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM"),
    "xlnet": ("XLNetConfig", "XLNetLMHeadModel"),
    "deepseek_v4": ("DeepseekV4Config", "DeepseekV4ForCausalLM"),
    "openai_gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel"),
}
# in no table, but built of blocks that are known
OTHERS = {
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "apertus": ("ApertusConfig", "ApertusForCausalLM"),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM"),
    "helium": ("HeliumConfig", "HeliumForCausalLM"),
    "jais2": ("Jais2Config", "Jais2ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "moshi": ("MoshiConfig", "MoshiForCausalLM"),
    "mpt": ("MptConfig", "MptForCausalLM"),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "xglm": ("XGLMConfig", "XGLMForCausalLM"),
}


def _model(config_name: str, model_name: str) -> nn.Module:
    config_class: Any = getattr(transformers, config_name)
    known = config_class()
    own = {
        k: v
        for k, v in SMALL.items()
        if getattr(known, k, None) is not None or (k.endswith("_id") and hasattr(known, k))
    }
    if model_name == "XLNetLMHeadModel":
        del own["max_position_embeddings"]  # it has no limit and says so
    if getattr(known, "layer_types", None) and not isinstance(
        getattr(type(known), "layer_types", None), property
    ):
        own["layer_types"] = list(known.layer_types)[: own.get("num_hidden_layers", 2)]
    torch.manual_seed(7)
    model: nn.Module = getattr(transformers, model_name)(config_class(**own))
    size = sum(param.numel() for param in model.parameters())
    assert size < 2_000_000, f"{model_name} is not small: {size} parameters"
    for param in model.parameters():
        param.data = param.data.nan_to_num(0.0) + torch.randn_like(param) * 0.1
    model.tie_weights()  # type: ignore[operator]
    return model.float().eval()


def _compare(rank: int, world_size: int, name: str, config: str, model: str) -> Row:
    return compare(Family(name, name, config, model, "causal", {}, static=False), _model(config, model))


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_understood_is_refused_and_unchanged(name: str) -> None:
    """`compare` tells a changed module or parameter of a refused model as another error than ValueError."""
    for row in run_distributed(2, _compare, name, *REFUSED[name]):
        assert row.problem.startswith("parallelize: ValueError: parallelize: "), row.problem
        assert row.model in row.problem, "the error does not name the model"


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_in_no_table_is_right_or_refused(name: str) -> None:
    """Never other numbers: a wrong logit, gradient or token is a failure here, a refusal is not."""
    for row in run_distributed(2, _compare, name, *OTHERS[name]):
        assert row.passed or row.problem.startswith("parallelize: ValueError: parallelize: "), row.problem


def test_no_family_is_in_two_lists() -> None:
    """A refused family that is handled one day belongs in the catalogue."""
    assert not {*REFUSED, *OTHERS} & set(FAMILIES)
