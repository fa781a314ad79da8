"""Parameter counts against the modules transformers builds on the meta device, for random small sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers

from interlace.planner.architecture import read_architecture
from interlace.planner.model import count_parameters, parameters

VARIANTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "llama": ("CausalLM", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}]),
    "mistral": ("CausalLM", [{}]),
    "ministral": ("CausalLM", [{"head_dim": 24}]),
    "phi3": ("CausalLM", [{"pad_token_id": 0}]),
    "granite": ("CausalLM", [{}]),
    "smollm3": ("CausalLM", [{"pad_token_id": 0}]),
    "qwen2": ("CausalLM", [{}, {"tie_word_embeddings": True}]),
    "qwen3": ("CausalLM", [{"head_dim": 24}, {"attention_bias": True}]),
    "gemma": ("CausalLM", [{"head_dim": 24, "pad_token_id": 0}]),
    "gemma2": ("CausalLM", [{"head_dim": 24, "pad_token_id": 0}]),
    "gemma3_text": ("CausalLM", [{"head_dim": 24, "pad_token_id": 0}]),
    "mixtral": ("CausalLM", [{"num_local_experts": 5, "num_experts_per_tok": 2}]),
    "qwen2_moe": (
        "CausalLM",
        [
            {
                "num_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "decoder_sparse_step": 2,
            },
            {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "mlp_only_layers": [0]},
        ],
    ),
    "qwen3_moe": (
        "CausalLM",
        [{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 24}],
    ),
    "olmoe": ("CausalLM", [{"num_experts": 5, "num_experts_per_tok": 2, "pad_token_id": 0}]),
    "deepseek_v2": (
        "CausalLM",
        [
            {
                "q_lora_rank": 20,
                "kv_lora_rank": 12,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 6,
            }
            | {
                "n_routed_experts": 5,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "n_shared_experts": 2,
            }
            | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
            {
                "q_lora_rank": None,
                "kv_lora_rank": 12,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 6,
            }
            | {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "n_shared_experts": 1,
            }
            | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "attention_bias": True},
        ],
    ),
    "deepseek_v3": (
        "CausalLM",
        [
            {
                "q_lora_rank": 20,
                "kv_lora_rank": 12,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 4,
                "v_head_dim": 6,
            }
            | {
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "n_shared_experts": 1,
            }
            | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
        ],
    ),
    "gpt_oss": (
        "CausalLM",
        [{"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 24, "pad_token_id": 0}],
    ),
    "gpt2": ("CausalLM", [{}, {"n_inner": 40}]),
    "gpt_bigcode": ("CausalLM", [{}, {"multi_query": False}]),
    "gpt_neo": ("CausalLM", [{"attention_types": [[["global", "local"], 2]]}]),
    "gpt_neox": ("CausalLM", [{}, {"attention_bias": False}]),
    "gptj": ("CausalLM", [{"rotary_dim": 4}]),
    "phi": ("CausalLM", [{}, {"qk_layernorm": True}]),
    "falcon": (
        "CausalLM",
        [
            {},
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {"parallel_attn": False, "bias": True, "multi_query": False},
        ],
    ),
    "bloom": ("CausalLM", [{}]),
    "opt": (
        "CausalLM",
        [{"pad_token_id": 1}, {"pad_token_id": 1, "word_embed_proj_dim": 20, "do_layer_norm_before": False}],
    ),
    "starcoder2": ("CausalLM", [{}, {"use_bias": False}]),
    "stablelm": (
        "CausalLM",
        [{}, {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}],
    ),
    "cohere": ("CausalLM", [{"pad_token_id": 0}, {"use_qk_norm": True, "pad_token_id": 0}]),
    "olmo": ("CausalLM", [{"pad_token_id": 0}]),
    "olmo2": ("CausalLM", [{"pad_token_id": 0}]),
    "olmo3": ("CausalLM", [{"pad_token_id": 0}]),
    "glm": ("CausalLM", [{"pad_token_id": 0, "head_dim": 24, "attention_bias": True}]),
    "glm4": ("CausalLM", [{"pad_token_id": 0, "head_dim": 24}]),
    "seed_oss": ("CausalLM", [{"pad_token_id": 0, "head_dim": 24}]),
    "bert": ("MaskedLM", [{}]),
    "roberta": ("MaskedLM", [{}]),
    "xlm-roberta": ("SequenceClassification", [{"num_labels": 5}]),
    "distilbert": ("SequenceClassification", [{"num_labels": 3}]),
    "vit": ("ImageClassification", [{"image_size": 32, "patch_size": 8, "num_labels": 7}]),
    "deit": ("ImageClassification", [{"image_size": 32, "patch_size": 8, "num_labels": 7}]),
    "t5": ("Seq2SeqLM", [{}, {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3}]),
    "mt5": ("Seq2SeqLM", [{"tie_word_embeddings": False}]),
    "bart": ("Seq2SeqLM", [{}]),
    "whisper": ("SpeechSeq2Seq", [{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}]),
}
CASES = [(kind, index) for kind, (_, variants) in VARIANTS.items() for index in range(len(variants))]


def _config(kind: str, index: int) -> Any:
    """A config of this family with sizes drawn at random: heads x 8 wide, 2 to 4 layers."""
    draw = random.Random(f"{kind} {index}")
    heads, layers = draw.choice((4, 6, 8)), draw.choice((2, 3, 4))
    hidden, inner, vocab = 8 * heads, draw.randrange(30, 90), draw.randrange(70, 300)
    sizes: dict[str, Any] = {"vocab_size": vocab}
    if kind in ("gpt2", "gpt_bigcode", "gptj"):
        sizes |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 33}
    elif kind == "distilbert":
        sizes |= {"dim": hidden, "n_layers": layers, "n_heads": heads, "hidden_dim": inner}
    elif kind in ("t5", "mt5"):
        sizes |= {"d_model": hidden, "num_layers": layers, "num_heads": heads, "d_kv": 12, "d_ff": inner}
    elif kind in ("bart", "whisper"):
        sizes |= {"d_model": hidden, "encoder_layers": layers, "decoder_layers": layers + 1}
        sizes |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
        sizes |= {"encoder_ffn_dim": inner, "decoder_ffn_dim": inner + 3}
    else:
        sizes |= {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
        sizes |= {
            "intermediate_size": inner,
            "num_key_value_heads": heads // 2,
            "max_position_embeddings": 64,
        }
    if kind == "gpt_neo":
        sizes |= {"num_heads": heads, "num_layers": 4, "num_hidden_layers": 4}
    if kind == "opt":
        sizes |= {"ffn_dim": inner, "word_embed_proj_dim": hidden}
    return transformers.AutoConfig.for_model(kind, **{**sizes, **VARIANTS[kind][1][index]})


def _build(kind: str, config: Any) -> torch.nn.Module:
    name = f"AutoModelFor{VARIANTS[kind][0]}"
    with torch.device("meta"):
        if kind == "deit":  # the name stands for two classes, with and without a teacher
            return transformers.DeiTForImageClassification(config)
        return getattr(transformers, name).from_config(config)


@pytest.mark.parametrize(("kind", "index"), CASES)
def test_the_count_is_that_of_the_module(kind: str, index: int) -> None:
    """A bias, norm or tie that a family has and its formula leaves out shows as a difference of exactly its size."""
    config = _config(kind, index)
    module = _build(kind, config)
    expected = sum(p.numel() for p in dict.fromkeys(module.parameters()))
    content = {**config.to_dict(), "architectures": [type(module).__name__]}
    assert count_parameters(content)[0] == expected
    # what is read from the module itself has no unexplained parameters either
    assert read_architecture(module).other_parameters == read_architecture(content).other_parameters


def test_a_bare_model_has_no_head() -> None:
    """The name in `architectures` decides whether there is an output product."""
    config = _config("llama", 0)
    with torch.device("meta"):
        module = transformers.AutoModel.from_config(config)
    assert parameters(module).head == 0
    assert count_parameters(module)[0] == sum(p.numel() for p in module.parameters())


def test_an_unknown_family_is_built_on_the_meta_device() -> None:
    """A family without a formula is counted from the module transformers builds, not guessed."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 50}
    config = transformers.AutoConfig.for_model("nemotron", vocab_size=99, num_key_value_heads=2, **sizes)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    read = read_architecture({"model_type": "nemotron", "vocab_size": 99, "num_key_value_heads": 2, **sizes})
    assert count_parameters(read)[0] == sum(p.numel() for p in module.parameters())
    assert (read.hidden, read.layers, read.heads, read.kv_heads) == (32, 3, 4, 2)
    assert (read.intermediate, read.vocab, read.tied, read.gated) == (50, 99, False, False)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 4, bias=False)
        self.up, self.down = torch.nn.Linear(width, 40), torch.nn.Linear(40, width)


class Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(77, 32)
        self.blocks = torch.nn.ModuleList(Block(32) for _ in range(3))
        self.out = torch.nn.Linear(32, 77, bias=False)
        self.out.weight = self.table.weight


def test_a_module_of_ones_own_is_counted_to_the_parameter() -> None:
    """A module without config: its stack, widths and heads come from its shapes, tied weights count once."""
    with torch.device("meta"):
        module = Own()
    read = read_architecture(module)
    assert count_parameters(read)[0] == 77 * 32 + 3 * (4 * 32 * 32 + 2 * 32 * 40 + 40 + 32)
    assert (read.hidden, read.layers, read.heads, read.intermediate, read.vocab) == (32, 3, 4, 40, 77)
    assert read.tied and not read.gated


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({}, "model_type"),
        ({"model_type": "no_such_family"}, "no_such_family"),
        ({"model_type": "llama"}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size=0"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size='big'"),
        ("/no/such/config.json", "not there"),
        (torch.nn.Linear(2, 2), "ModuleList"),
    ],
)
def test_a_bad_source_is_one_clear_line(source: Any, words: str) -> None:
    """The user reads what is wrong with the input, not where our code fell over."""
    with pytest.raises(ValueError, match=words) as caught:
        read_architecture(source)
    assert "\n" not in str(caught.value)
