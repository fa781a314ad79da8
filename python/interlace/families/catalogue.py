"""The families that are tried: a small random model of each, its inputs, and what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["FAMILIES", "Family", "build", "inputs", "named"]

VOCABULARY = 61
# heads, kv heads, features: none is a multiple of 2, 3 and 4 at once, so every world has uneven shards
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 6, 3, 8, 54, 2
HIDDEN = HEADS * HEAD_DIM
POSITIONS = 64
BATCH, LENGTH, DECODER_LENGTH = 2, 7, 5
PIXELS, PATCH, CHANNELS = 8, 4, 3
MEL_BINS, FRAMES = 5, 12

DECODER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,  # so that generation goes on to the length that was asked for
}
GROUPED: Mapping[str, Any] = {**DECODER, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
ENCODER: Mapping[str, Any] = {**DECODER, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A family by the classes of transformers that build it.

    kind: causal (generates), masked (an encoder over tokens), image, seq2seq, speech. settings: of the
    configuration, whole. static: whether transformers gives it a static cache.
    """

    name: str
    title: str
    config: str
    model: str
    kind: str
    settings: Mapping[str, Any]
    static: bool = True
    notes: str = ""

    @property
    def generates(self) -> bool:
        """True when `generate` is part of what is compared."""
        return self.kind in ("causal", "seq2seq", "speech")


@dataclass(frozen=True)
class _Decoder:
    """Families whose configuration has the usual names: what each adds to them."""

    title: str
    stem: str
    own: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=lambda: GROUPED)
    config: str = ""
    static: bool = True


ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
# 20 features are aligned as the grouped products of transformers want them, and do not divide by 3
MOE: Mapping[str, Any] = {"num_experts_per_tok": 2, "intermediate_size": 20, "moe_intermediate_size": 20}
LATENT: Mapping[str, Any] = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
}
DEEPSEEK: Mapping[str, Any] = {
    **DECODER,
    **LATENT,
    "num_key_value_heads": HEADS,
    "head_dim": 4,  # of what is turned by its position
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": POSITIONS,
}
LATENT_DENSE: Mapping[str, Any] = {**DECODER, **LATENT, "num_key_value_heads": HEADS, "head_dim": 4}
SHARED_MOE: Mapping[str, Any] = {
    **MOE,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
_DECODERS: Mapping[str, _Decoder] = {
    "llama": _Decoder("Llama", "Llama"),
    "mistral": _Decoder("Mistral", "Mistral", {"sliding_window": 5}),
    "qwen2": _Decoder("Qwen2", "Qwen2"),
    "qwen3": _Decoder("Qwen3", "Qwen3"),
    "gemma": _Decoder("Gemma", "Gemma"),
    "gemma2": _Decoder("Gemma2", "Gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 5}),
    "gemma3": _Decoder(
        "Gemma3", "Gemma3", {"query_pre_attn_scalar": 8, "sliding_window": 5}, config="Gemma3TextConfig"
    ),
    "phi": _Decoder("Phi", "Phi"),
    "phi3": _Decoder("Phi3", "Phi3"),
    "gpt_neox": _Decoder("GPT-NeoX", "GPTNeoX", base=DECODER),
    "gpt2": _Decoder(
        "GPT-2",
        "GPT2",
        {
            "n_embd": HIDDEN,
            "n_inner": INTERMEDIATE,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": POSITIONS,
        },
        {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    ),
    "opt": _Decoder(
        "OPT",
        "OPT",
        {"ffn_dim": INTERMEDIATE, "word_embed_proj_dim": HIDDEN},
        {k: v for k, v in DECODER.items() if k != "intermediate_size"},
    ),
    "falcon": _Decoder(
        "Falcon (multi-query)",
        "Falcon",
        {"ffn_hidden_size": INTERMEDIATE, "multi_query": True, "new_decoder_architecture": False},
        {k: v for k, v in DECODER.items() if k != "intermediate_size"},
    ),
    "falcon_grouped": _Decoder(
        "Falcon (grouped)",
        "Falcon",
        {"ffn_hidden_size": INTERMEDIATE, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS},
        {k: v for k, v in DECODER.items() if k != "intermediate_size"},
    ),
    "bloom": _Decoder(
        "Bloom (alibi)",
        "Bloom",
        {"n_layer": LAYERS, "n_head": HEADS, "hidden_size": HIDDEN},
        {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
    ),
    "gpt_neo": _Decoder(
        "GPT-Neo",
        "GPTNeo",
        {"num_layers": LAYERS, "num_heads": HEADS, "attention_types": [[["global", "local"], 1]]},
    ),
    "granite": _Decoder("Granite", "Granite"),
    "olmo": _Decoder("OLMo", "Olmo"),
    "stablelm": _Decoder("StableLM", "StableLm"),
    "starcoder2": _Decoder("StarCoder2", "Starcoder2"),
    "cohere": _Decoder("Cohere", "Cohere"),
    "cohere2": _Decoder("Cohere2", "Cohere2", {"sliding_window": 5}),
    "glm": _Decoder("GLM", "Glm"),
    "glm4": _Decoder("GLM-4", "Glm4"),
    "smollm3": _Decoder("SmolLM3", "SmolLM3"),
    "exaone4": _Decoder("EXAONE-4", "Exaone4", {"sliding_window": 5, "sliding_window_pattern": 2}),
    "persimmon": _Decoder("Persimmon", "Persimmon", base=DECODER),
    "biogpt": _Decoder("BioGPT", "BioGpt", base=DECODER),
    "mixtral": _Decoder("Mixtral", "Mixtral", {**MOE, "num_local_experts": 5, "sliding_window": None}),
    "qwen2_moe": _Decoder(
        "Qwen2-MoE",
        "Qwen2Moe",
        {**MOE, "num_experts": 5, "shared_expert_intermediate_size": 14},
    ),
    "qwen3_moe": _Decoder("Qwen3-MoE", "Qwen3Moe", {**MOE, "num_experts": 5, "norm_topk_prob": True}),
    "granitemoe": _Decoder("GraniteMoE", "GraniteMoe", {**MOE, "num_local_experts": 5}),
    "phimoe": _Decoder("PhiMoE", "Phimoe", {**MOE, "num_local_experts": 5, "sliding_window": None}),
    "glm4_moe": _Decoder("GLM-4.5 (MoE)", "Glm4Moe", {**SHARED_MOE, "n_routed_experts": 8}),
    "ernie4_5_moe": _Decoder(
        "Ernie-4.5 (MoE)",
        "Ernie4_5_Moe",
        {**SHARED_MOE, "moe_num_experts": 8, "moe_k": 3, "moe_layer_start_index": 1},
    ),
    "deepseek_v2": _Decoder("DeepSeek-V2 (latent attention)", "DeepseekV2", base=DEEPSEEK),
    "deepseek_v3": _Decoder("DeepSeek-V3 (latent attention)", "DeepseekV3", base=DEEPSEEK),
    "glm4_moe_lite": _Decoder("GLM-4.7 (latent attention)", "Glm4MoeLite", base=DEEPSEEK),
    "youtu": _Decoder("Youtu (latent attention)", "Youtu", base=LATENT_DENSE),
    "minicpm3": _Decoder("MiniCPM3 (latent attention)", "MiniCPM3", base=LATENT_DENSE),
    "gpt_oss": _Decoder(
        "GPT-OSS (sinks)",
        "GptOss",
        {
            **MOE,
            "num_local_experts": 5,
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def _decoder(name: str, entry: _Decoder) -> Family:
    config = entry.config or f"{entry.stem}Config"
    heads = "LMHeadModel" if entry.stem == "GPT2" else "ForCausalLM"
    return Family(
        name, entry.title, config, f"{entry.stem}{heads}", "causal", {**entry.base, **entry.own}, entry.static
    )


_T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "d_kv": HEAD_DIM,
    "d_ff": INTERMEDIATE,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 9,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}
_WHISPER: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": HIDDEN,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": INTERMEDIATE,
    "decoder_ffn_dim": INTERMEDIATE,
    "num_mel_bins": MEL_BINS,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": POSITIONS,
    "decoder_start_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_VIT: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": PIXELS,
    "patch_size": PATCH,
    "num_channels": CHANNELS,
    "num_labels": 9,
}
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(_decoder(name, entry) for name, entry in _DECODERS.items()),
        Family("bert", "BERT", "BertConfig", "BertForMaskedLM", "masked", ENCODER),
        Family("roberta", "RoBERTa", "RobertaConfig", "RobertaForMaskedLM", "masked", ENCODER),
        Family(
            "electra",
            "ELECTRA",
            "ElectraConfig",
            "ElectraForMaskedLM",
            "masked",
            {**ENCODER, "embedding_size": 20},
        ),
        Family("roformer", "RoFormer", "RoFormerConfig", "RoFormerForMaskedLM", "masked", ENCODER),
        Family("xlm_roberta", "XLM-RoBERTa", "XLMRobertaConfig", "XLMRobertaForMaskedLM", "masked", ENCODER),
        Family("vit", "ViT", "ViTConfig", "ViTForImageClassification", "image", _VIT),
        Family("t5", "T5", "T5Config", "T5ForConditionalGeneration", "seq2seq", _T5),
        Family(
            "t5_gated",
            "T5 v1.1 (gated, untied)",
            "T5Config",
            "T5ForConditionalGeneration",
            "seq2seq",
            {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
        Family("whisper", "Whisper", "WhisperConfig", "WhisperForConditionalGeneration", "speech", _WHISPER),
    )
}


def named(names: tuple[str, ...]) -> tuple[Family, ...]:
    """The families of these names, all of them for no name. ValueError for a name that is not there."""
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise ValueError(f"families: {', '.join(unknown)}; expected some of {', '.join(FAMILIES)}")
    return tuple(FAMILIES[name] for name in names or FAMILIES)


def build(family: Family, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A random model in eval mode, the same on every rank. options: change the configuration.

    Every parameter and every floating-point buffer that a checkpoint holds gets noise: norms start as ones,
    biases and routing corrections as zeros, and what is lost or counted twice would not show in them.
    """
    import transformers

    torch.manual_seed(7)
    config: Any = getattr(transformers, family.config)(**{**family.settings, **options})
    model: nn.Module = getattr(transformers, family.model)(config)
    for param in model.parameters():
        param.data = param.data.nan_to_num(0.0) + torch.randn_like(param) * 0.1
    for name, value in model.state_dict().items():
        if name not in dict(model.named_parameters(remove_duplicate=False)) and value.is_floating_point():
            value.add_(torch.randn_like(value) * 0.1)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model.to(dtype).eval()


def inputs(family: Family, dtype: torch.dtype = torch.float32, seed: int = 1) -> dict[str, Tensor]:
    """Arguments of the forward, the same on every rank; padding in the second row of token inputs."""
    generator = torch.Generator().manual_seed(seed)
    if family.kind == "image":
        return {"pixel_values": torch.randn(BATCH, CHANNELS, PIXELS, PIXELS, generator=generator).to(dtype)}
    decoder = _tokens(generator, DECODER_LENGTH)
    if family.kind == "speech":
        features = torch.randn(BATCH, MEL_BINS, FRAMES, generator=generator).to(dtype)
        return {"input_features": features, "decoder_input_ids": decoder}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :2] = 0  # on the left, as generation wants it
    arguments = {"input_ids": _tokens(generator, LENGTH), "attention_mask": mask}
    return arguments | ({"decoder_input_ids": decoder} if family.kind == "seq2seq" else {})


def _tokens(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, length), generator=generator)
