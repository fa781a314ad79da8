"""Architectures of encoders and encoder-decoders (BERT, ViT, T5, BART, Whisper), read from Hugging Face configs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .architecture import Architecture
from .families import field_of, first_class

__all__ = ["ENCODERS"]

Config = Mapping[str, Any]

_BIASES = {"query_bias": True, "key_bias": True, "value_bias": True, "output_bias": True, "mlp_bias": True}


def _labels(config: Config) -> int:
    names = config.get("id2label")
    return len(names) if names else int(config.get("num_labels") or 2)


def _bert(config: Config) -> Architecture:
    kind, name = config["model_type"], first_class(config)
    hidden = int(field_of(config, "hidden_size", "dim", default=768))
    distil = kind == "distilbert"
    head, pooler, labels = "mlm", False, 0
    if name.endswith("Model"):
        head, pooler = "none", not distil
    elif name.endswith("ForSequenceClassification"):
        # RoBERTa and DistilBERT put a dense layer before the classifier, BERT classifies its pooler's output
        head, pooler, labels = (
            ("classifier" if kind == "bert" else "dense_classifier"),
            kind == "bert",
            _labels(config),
        )
    heads = int(field_of(config, "num_attention_heads", "n_heads", default=12))
    return Architecture(
        family=kind,
        hidden=hidden,
        layers=int(field_of(config, "num_hidden_layers", "n_layers", default=12)),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(field_of(config, "intermediate_size", "hidden_dim", default=3072)),
        vocab=int(field_of(config, "vocab_size", default=30522)),
        tied=True,
        gated=False,
        norm="layer",
        final_norm=False,
        embedding_norm=True,
        causal=False,
        positions=int(field_of(config, "max_position_embeddings", default=512)),
        context=int(field_of(config, "max_position_embeddings", default=512)),
        token_types=0 if distil else int(field_of(config, "type_vocab_size", default=2)),
        head=head,
        labels=labels,
        pooler=pooler,
        **_BIASES,
    )


def _vit(config: Config) -> Architecture:
    hidden = int(field_of(config, "hidden_size", default=768))
    heads = int(field_of(config, "num_attention_heads", default=12))
    patch, image = int(config.get("patch_size") or 16), int(config.get("image_size") or 224)
    channels = int(config.get("num_channels") or 3)
    patches = (image // patch) ** 2
    special = 2 if config["model_type"] == "deit" else 1  # class token, and DeiT's distillation token
    bias = bool(config.get("qkv_bias", True))
    model = first_class(config).endswith("Model")
    return Architecture(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=int(field_of(config, "num_hidden_layers", default=12)),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(field_of(config, "intermediate_size", default=3072)),
        vocab=0,
        gated=False,
        norm="layer",
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        output_bias=True,
        mlp_bias=True,
        causal=False,
        positions=patches + special,
        context=patches + special,
        head="none" if model else "classifier",
        labels=0 if model else _labels(config),
        pooler=model,
        other_parameters=channels * patch * patch * hidden + hidden + special * hidden,
    )


def _t5(config: Config) -> Architecture:
    heads, head_dim = int(field_of(config, "num_heads")), int(field_of(config, "d_kv"))
    gated = bool(config.get("is_gated_act")) or str(config.get("feed_forward_proj", "relu")).startswith(
        "gated"
    )
    stack = Architecture(
        family=str(config["model_type"]),
        hidden=int(field_of(config, "d_model")),
        layers=int(field_of(config, "num_layers")),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        intermediate=int(field_of(config, "d_ff")),
        vocab=int(field_of(config, "vocab_size")),
        tied=bool(field_of(config, "tie_word_embeddings", default=config["model_type"] == "t5")),
        gated=gated,
        relative_buckets=int(config.get("relative_attention_num_buckets") or 32),
        context=int(config.get("n_positions") or 512),
        head="none" if first_class(config).endswith("Model") else "lm",
    )
    encoder = replace(stack, causal=False, head="none", vocab=0)
    decoder_layers = int(field_of(config, "num_decoder_layers", default=stack.layers))
    return replace(stack, layers=decoder_layers, norms_per_layer=3, cross_attention=True, encoder=encoder)


def _bart(config: Config) -> Architecture:
    hidden, heads = int(field_of(config, "d_model")), int(field_of(config, "decoder_attention_heads"))
    positions = int(field_of(config, "max_position_embeddings", default=1024))
    decoder = Architecture(
        family=str(config["model_type"]),
        hidden=hidden,
        layers=int(field_of(config, "decoder_layers")),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(field_of(config, "decoder_ffn_dim")),
        vocab=int(field_of(config, "vocab_size")),
        tied=True,
        gated=False,
        norm="layer",
        norms_per_layer=3,
        final_norm=False,
        embedding_norm=True,
        positions=positions + 2,
        context=positions,
        head="none" if first_class(config).endswith("Model") else "lm",
        cross_attention=True,
        **_BIASES,
    )
    return replace(decoder, encoder=_encoder_stack(config, decoder))


def _whisper(config: Config) -> Architecture:
    hidden, heads = int(field_of(config, "d_model")), int(field_of(config, "decoder_attention_heads"))
    decoder = Architecture(
        family="whisper",
        hidden=hidden,
        layers=int(field_of(config, "decoder_layers")),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=int(field_of(config, "decoder_ffn_dim")),
        vocab=int(field_of(config, "vocab_size")),
        tied=True,
        gated=False,
        norm="layer",
        norms_per_layer=3,
        positions=int(field_of(config, "max_target_positions", default=448)),
        context=int(field_of(config, "max_target_positions", default=448)),
        head="none" if first_class(config).endswith("Model") else "lm",
        cross_attention=True,
        **{**_BIASES, "key_bias": False},
    )
    mels = int(config.get("num_mel_bins") or 80)
    convolutions = 3 * mels * hidden + hidden + 3 * hidden * hidden + hidden
    encoder = replace(
        _encoder_stack(config, decoder),
        positions=int(field_of(config, "max_source_positions", default=1500)),
        other_parameters=convolutions,
    )
    return replace(decoder, encoder=encoder)


def _encoder_stack(config: Config, decoder: Architecture) -> Architecture:
    heads = int(field_of(config, "encoder_attention_heads"))
    return replace(
        decoder,
        layers=int(field_of(config, "encoder_layers")),
        heads=heads,
        kv_heads=heads,
        head_dim=decoder.hidden // heads,
        intermediate=int(field_of(config, "encoder_ffn_dim")),
        norms_per_layer=2,
        vocab=0,
        causal=False,
        head="none",
        cross_attention=False,
    )


ENCODERS: dict[str, Callable[[Config], Architecture]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert"), _bert),
    **dict.fromkeys(("vit", "deit"), _vit),
    **dict.fromkeys(("t5", "mt5"), _t5),
    "bart": _bart,
    "whisper": _whisper,
}
