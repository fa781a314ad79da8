"""Architectures of decoder-only families, read from Hugging Face configs (as dicts, defaults filled in here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .architecture import Architecture, LatentAttention, MixtureOfExperts

__all__ = ["DECODERS", "field_of", "first_class"]

Config = Mapping[str, Any]


def field_of(config: Config, *names: str, default: Any = ...) -> Any:
    """The first field of these names that is there and not null, else the default; without one, ValueError."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    if default is ...:
        raise ValueError(
            f"model config of type {config.get('model_type')!r}: {' or '.join(names)} is missing"
        )
    return default


def first_class(config: Config) -> str:
    """The first name in `architectures`, or ""."""
    names = config.get("architectures") or ("",)
    return str(names[0])


def _size(config: Config, *names: str, default: Any = ..., least: int = 1) -> int:
    value = field_of(config, *names, default=default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"model config: {names[0]}={value!r}; expected an integer >= {least}")
    return value


def _base(config: Config, *, tied: bool, **changes: Any) -> Architecture:
    """Fields that nearly all configs spell alike. tied: the family's default."""
    hidden = _size(config, "hidden_size", "n_embd", "d_model")
    heads = _size(config, "num_attention_heads", "n_head", "n_heads")
    head_dim = config.get("head_dim") or hidden // heads
    layers = _size(config, "num_hidden_layers", "n_layer", "n_layers")
    head = "none" if first_class(config).endswith("Model") else "lm"
    base = Architecture(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=head_dim,
        intermediate=_size(config, "intermediate_size", "n_inner", default=4 * hidden),
        vocab=_size(config, "vocab_size"),
        tied=bool(field_of(config, "tie_word_embeddings", default=tied)),
        head=head,
        context=_size(
            config, "max_position_embeddings", "n_positions", "n_ctx", "seq_length", default=0, least=0
        ),
        window=_windows(config, layers),
    )
    built = replace(base, **changes)
    if built.heads % built.kv_heads:
        raise ValueError(
            f"model config: {built.heads} heads are no multiple of {built.kv_heads} key/value heads"
        )
    return built


def _without_kv_heads(config: Config) -> Config:
    # families whose modules have one key/value head per query head, whatever their config says
    return {name: value for name, value in config.items() if name != "num_key_value_heads"}


def _windows(config: Config, layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return ()
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if "sliding" in kind else 0 for kind in kinds)
    pattern = config.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}.get(
        str(config.get("model_type")), 0
    )
    if pattern:
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
    return (int(window),) * layers


def _biases(attention: bool, output: bool | None = None) -> dict[str, bool]:
    output = attention if output is None else output
    return {"query_bias": attention, "key_bias": attention, "value_bias": attention, "output_bias": output}


def _llama(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    return _base(config, tied=False, mlp_bias=bool(config.get("mlp_bias", False)), **_biases(bias))


def _qwen2(config: Config) -> Architecture:
    return _base(config, tied=False, **_biases(True, False))


def _qwen3(config: Config) -> Architecture:
    config = {"head_dim": 128, **config}
    bias = bool(config.get("attention_bias", False))
    return _base(config, tied=False, qk_norm="head", **_biases(bias))


def _gemma(config: Config) -> Architecture:
    kind = str(config["model_type"])
    config = {"head_dim": 256, **config}
    if kind == "gemma3_text":
        # text configs of the multimodal sizes leave out what the family's 4B has
        config = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208, **config}
    norms = 2 if kind == "gemma" else 4
    bias = bool(config.get("attention_bias", False))
    qk_norm = "head" if kind == "gemma3_text" else ""
    return _base(config, tied=True, norms_per_layer=norms, qk_norm=qk_norm, **_biases(bias))


def _gemma3(config: Config) -> Architecture:
    text = {"model_type": "gemma3_text", "sliding_window": 1024, **config["text_config"]}
    built = _gemma(text)
    vision = config.get("vision_config")
    if not vision:
        return replace(built, family="gemma3")
    width, inner = _size(vision, "hidden_size"), _size(vision, "intermediate_size")
    patch, image = _size(vision, "patch_size"), _size(vision, "image_size")
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    tower = 3 * patch * patch * width + width + (image // patch) ** 2 * width
    tower += _size(vision, "num_hidden_layers") * layer + 2 * width
    projector = width * built.hidden + width
    note = "the vision tower counts as parameters of the first stage; its computation is left out"
    return replace(built, family="gemma3", other_parameters=tower + projector, notes=(note,))


def _sparse_layers(config: Config, layers: int) -> tuple[int, ...]:
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    return tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _mixtral(config: Config) -> Architecture:
    base = _llama(config)
    moe = MixtureOfExperts(
        experts=_size(config, "num_local_experts", default=8),
        top_k=_size(config, "num_experts_per_tok", default=2),
        intermediate=base.intermediate,
        layers=tuple(range(base.layers)),
    )
    return _checked(replace(base, moe=moe))


def _qwen_moe(config: Config) -> Architecture:
    second = config["model_type"] == "qwen2_moe"
    base = _qwen2(config) if second else _qwen3(config)
    moe = MixtureOfExperts(
        experts=_size(config, "num_experts", "num_local_experts"),
        top_k=_size(config, "num_experts_per_tok"),
        intermediate=_size(config, "moe_intermediate_size"),
        layers=_sparse_layers(config, base.layers),
        shared_intermediate=_size(config, "shared_expert_intermediate_size") if second else 0,
        shared_gate=second,
    )
    return _checked(replace(base, moe=moe))


def _olmoe(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    base = _base(config, tied=False, qk_norm="full", **_biases(bias))
    moe = MixtureOfExperts(
        experts=_size(config, "num_experts", default=64),
        top_k=_size(config, "num_experts_per_tok", default=8),
        intermediate=base.intermediate,
        layers=tuple(range(base.layers)),
    )
    return _checked(replace(base, moe=moe))


def _deepseek(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    latent = LatentAttention(
        query_rank=int(config.get("q_lora_rank") or 0),
        kv_rank=_size(config, "kv_lora_rank"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
    )
    base = _base(
        {**config, "head_dim": latent.nope_dim + latent.rope_dim},
        tied=False,
        latent=latent,
        output_bias=bias,
        query_bias=bias,
        key_bias=bias,
    )
    experts = config.get("n_routed_experts")
    if not experts:
        return base
    first, step = int(config.get("first_k_dense_replace") or 0), int(config.get("moe_layer_freq") or 1)
    width = _size(config, "moe_intermediate_size")
    moe = MixtureOfExperts(
        experts=int(experts),
        top_k=_size(config, "num_experts_per_tok"),
        intermediate=width,
        layers=tuple(i for i in range(base.layers) if i >= first and i % step == 0),
        shared_intermediate=width * int(config.get("n_shared_experts") or 0),
    )
    return _checked(replace(base, moe=moe))


def _gpt_oss(config: Config) -> Architecture:
    base = _base({"head_dim": 64, **config}, tied=False, sinks=True, **_biases(True))
    moe = MixtureOfExperts(
        experts=_size(config, "num_local_experts"),
        top_k=_size(config, "num_experts_per_tok", "experts_per_token"),
        intermediate=base.intermediate,
        layers=tuple(range(base.layers)),
        router_bias=True,
        expert_bias=True,
    )
    return _checked(replace(base, moe=moe))


def _checked(architecture: Architecture) -> Architecture:
    moe = architecture.moe
    assert moe is not None
    if moe.top_k > moe.experts:
        raise ValueError(f"model config: {moe.top_k} experts per token of only {moe.experts}")
    return architecture


def _gpt2(config: Config) -> Architecture:
    rows = _size(config, "n_positions", "n_ctx", default=1024)
    changes: dict[str, Any] = {"norm": "layer", "gated": False, "mlp_bias": True, "positions": rows}
    config = _without_kv_heads(config)
    if config["model_type"] == "gpt_bigcode" and config.get("multi_query", True):
        changes["kv_heads"] = 1
    return _base(config, tied=True, **changes, **_biases(True))


def _gpt_neo(config: Config) -> Architecture:
    plain = {
        **_without_kv_heads(config),
        "num_hidden_layers": field_of(config, "num_layers", "num_hidden_layers"),
    }
    plain["num_attention_heads"] = field_of(config, "num_heads", "num_attention_heads")
    rows = _size(config, "max_position_embeddings", default=2048)
    plain.pop("sliding_window", None)
    changes = {"norm": "layer", "gated": False, "mlp_bias": True, "positions": rows}
    return _base(plain, tied=True, **changes, **_biases(False, True))


def _neox(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", True))
    parallel = bool(config.get("use_parallel_residual", True))
    return _base(
        _without_kv_heads(config),
        tied=False,
        norm="layer",
        gated=False,
        mlp_bias=True,
        parallel_block=parallel,
        **_biases(bias),
    )


def _gptj(config: Config) -> Architecture:
    changes = {"norm": "layer", "gated": False, "norms_per_layer": 1, "parallel_block": True}
    plain = _without_kv_heads(config)
    return _base(plain, tied=False, mlp_bias=True, head_bias=True, **changes, **_biases(False))


def _phi(config: Config) -> Architecture:
    changes = {"norm": "layer", "gated": False, "norms_per_layer": 1, "parallel_block": True}
    norm = "layer_head" if config.get("qk_layernorm") else ""
    return _base(config, tied=False, mlp_bias=True, head_bias=True, qk_norm=norm, **changes, **_biases(True))


def _falcon(config: Config) -> Architecture:
    new = bool(config.get("new_decoder_architecture", False))
    multi_query = bool(config.get("multi_query", True))
    parallel = bool(config.get("parallel_attn", True))
    heads = _size(config, "num_attention_heads", "n_head")
    kv_heads = int(config.get("num_kv_heads") or heads) if new or not multi_query else 1
    norms = int(config.get("num_ln_in_parallel_attn") or 2) if new else (1 if parallel else 2)
    bias = bool(config.get("bias", False))
    plain = {**config, "num_key_value_heads": kv_heads}
    plain["intermediate_size"] = config.get("ffn_hidden_size") or 4 * _size(config, "hidden_size")
    changes = {"norm": "layer", "gated": False, "norms_per_layer": norms, "parallel_block": parallel or new}
    return _base(plain, tied=True, mlp_bias=bias, **changes, **_biases(bias))


def _bloom(config: Config) -> Architecture:
    plain = {**_without_kv_heads(config), "intermediate_size": 4 * _size(config, "hidden_size", "n_embed")}
    plain["hidden_size"] = _size(config, "hidden_size", "n_embed")
    changes = {"norm": "layer", "gated": False, "mlp_bias": True, "embedding_norm": True}
    return _base(plain, tied=True, **changes, **_biases(True))


def _opt(config: Config) -> Architecture:
    before = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    width = int(config.get("word_embed_proj_dim") or 0)
    hidden = _size(config, "hidden_size")
    plain = {**_without_kv_heads(config), "intermediate_size": _size(config, "ffn_dim")}
    return _base(
        plain,
        tied=True,
        norm="layer" if config.get("layer_norm_elementwise_affine", True) else "none",
        gated=False,
        mlp_bias=bias,
        final_norm=before and not config.get("_remove_final_layer_norm", False),
        positions=_size(config, "max_position_embeddings", default=2048) + 2,
        embedding_dim=width if width != hidden else 0,
        **_biases(bias),
    )


def _starcoder2(config: Config) -> Architecture:
    bias = bool(config.get("use_bias", True))
    return _base(config, tied=True, norm="layer", gated=False, mlp_bias=bias, **_biases(bias))


def _stablelm(config: Config) -> Architecture:
    bias = bool(config.get("use_qkv_bias", False))
    parallel = bool(config.get("use_parallel_residual", False))
    norms = 1 if parallel else 2
    norm = "full" if config.get("qk_layernorm") else ""
    return _base(
        config, tied=False, norm="layer", norms_per_layer=norms, qk_norm=norm, **_biases(bias, False)
    )


def _cohere(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    norm = "full" if config.get("use_qk_norm") else ""
    changes = {"norm": "scale", "norms_per_layer": 1, "parallel_block": True, "qk_norm": norm}
    return _base(config, tied=True, **changes, **_biases(bias))


def _olmo(config: Config) -> Architecture:
    kind, bias = config["model_type"], bool(config.get("attention_bias", False))
    if kind == "olmo":
        return _base(config, tied=False, norm="none", **_biases(bias))
    return _base(config, tied=False, qk_norm="full", **_biases(bias))


def _glm(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", False))
    norms = 4 if config["model_type"] == "glm4" else 2
    return _base({"head_dim": 128, **config}, tied=False, norms_per_layer=norms, **_biases(bias, False))


def _seed_oss(config: Config) -> Architecture:
    bias = bool(config.get("attention_bias", True))
    output = bool(config.get("attention_out_bias", False))
    return _base({"head_dim": 128, **config}, tied=False, **_biases(bias, output))


DECODERS: dict[str, Callable[[Config], Architecture]] = {
    **dict.fromkeys(("llama", "mistral", "phi3", "granite", "smollm3", "ministral"), _llama),
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _gemma),
    "gemma3": _gemma3,
    "mixtral": _mixtral,
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _qwen_moe),
    "olmoe": _olmoe,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _deepseek),
    "gpt_oss": _gpt_oss,
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _gpt2),
    "gpt_neo": _gpt_neo,
    "gpt_neox": _neox,
    "gptj": _gptj,
    "phi": _phi,
    "falcon": _falcon,
    "bloom": _bloom,
    "opt": _opt,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "cohere": _cohere,
    **dict.fromkeys(("olmo", "olmo2", "olmo3"), _olmo),
    **dict.fromkeys(("glm", "glm4"), _glm),
    "seed_oss": _seed_oss,
}
