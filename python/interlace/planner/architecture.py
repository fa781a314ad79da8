"""What a transformer is made of, as far as memory, time and communication depend on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch.nn as nn

__all__ = [
    "Architecture",
    "LatentAttention",
    "MixtureOfExperts",
    "Source",
    "config_names",
    "read_architecture",
]

_CONFIGS = Path(__file__).parent / "configs" / "models.json"


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): ranks and head sizes.

    query_rank 0 means queries are projected directly. The cache holds kv_rank + rope_dim values per token and layer.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class MixtureOfExperts:
    """Routed experts of some layers: experts of width `intermediate`, `top_k` of them per token.

    layers: indices of the layers that have experts; the others have the dense MLP of the architecture.
    shared_intermediate: total width of the experts every token visits. shared_gate: they have a gate [1, hidden].
    router_bias, expert_bias: biases of the router and of the expert products, as in GPT-OSS.
    """

    experts: int
    top_k: int
    intermediate: int
    layers: tuple[int, ...]
    shared_intermediate: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False


@dataclass(frozen=True)
class Architecture:
    """One stack of transformer layers with its embeddings and head; sizes are counts of elements.

    intermediate: width of the dense MLP. gated: the MLP has gate, up and down products instead of up and down.
    norm: "rms" (weight), "layer" (weight and bias), "scale" (LayerNorm without bias) or "none" (no parameters).
    norms_per_layer: 2 for pre-norm blocks, 4 for Gemma 2 and 3, 1 where attention and MLP share one.
    qk_norm: "" none, "head" one weight of head_dim for q and one for k, "layer_head" the same with biases, "full"
    weights as wide as q and k.
    positions: rows of a learned position table. embedding_dim: width of the token table where it is not hidden.
    head: "lm" a [vocab, hidden] product, "mlm" BERT's transform before the tied product, "classifier" a product to
    `labels`, "dense_classifier" one behind a [hidden, hidden] product, "none".
    cross_attention: each layer also attends to the encoder. window: sliding window by layer, 0 for all tokens.
    other_parameters: counted parameters outside this description (patch and class embeddings, poolers, ...).
    """

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    gated: bool = True
    norm: str = "rms"
    norms_per_layer: int = 2
    final_norm: bool = True
    embedding_norm: bool = False
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    sinks: bool = False
    parallel_block: bool = False
    causal: bool = True
    positions: int = 0
    token_types: int = 0
    embedding_dim: int = 0
    relative_buckets: int = 0
    head: str = "lm"
    head_bias: bool = False
    labels: int = 0
    pooler: bool = False
    context: int = 0
    window: tuple[int, ...] = ()
    other_parameters: int = 0
    cross_attention: bool = False
    latent: LatentAttention | None = None
    moe: MixtureOfExperts | None = None
    encoder: Architecture | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads of a token: kv_heads x head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of one value head."""
        return self.latent.value_dim if self.latent else self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether layer (0-based) routes tokens to experts."""
        return self.moe is not None and layer in self.moe.layers


Source: TypeAlias = "Architecture | Mapping[str, Any] | str | PathLike[str] | nn.Module"


def read_architecture(source: Source) -> Architecture:
    """The Architecture of a model.

    source: an Architecture (returned as it is), a Hugging Face config as a dict, the path of a config.json or of the
    folder that holds one, the name of a config shipped here (`interlace plan --list`), or an nn.Module (meta device
    will do). A dict of an unknown model_type is built on the meta device by transformers where that is installed.
    Raises ValueError with one line that names what is missing or unknown.
    """
    if isinstance(source, Architecture):
        return source
    if isinstance(source, Mapping):
        return _of_config(source)
    if isinstance(source, (str, PathLike)):
        return _of_config(read_config(source))
    from .module import architecture_of_module

    return architecture_of_module(source)


def config_names() -> tuple[str, ...]:
    """Names of the model configs shipped here."""
    return tuple(_shipped())


@lru_cache(maxsize=1)
def _shipped() -> Mapping[str, Mapping[str, Any]]:
    content: Mapping[str, Mapping[str, Any]] = json.loads(_CONFIGS.read_text(encoding="utf-8"))
    return content


def read_config(source: str | PathLike[str]) -> Mapping[str, Any]:
    """The model config in a config.json, its folder, or under a name that is shipped; ValueError in one line."""
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    elif not path.exists() and str(path).lower() in _shipped():
        return _shipped()[str(path).lower()]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(config_names())
        raise ValueError(
            f"model {str(path)!r} is not there; expected a config.json, its folder or one of {known}"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model config {path}: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"model config {path}: expected a JSON object, got {type(content).__name__}")
    return content


def _of_config(config: Mapping[str, Any]) -> Architecture:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"model config: model_type={kind!r}; expected the name of a family, such as 'llama'")
    from .encoders import ENCODERS
    from .families import DECODERS

    known = {**DECODERS, **ENCODERS}
    if kind in known:
        try:
            return known[kind](config)
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"model config of type {kind!r}: {type(error).__name__}: {error}") from None
    from .module import architecture_of_unknown

    return architecture_of_unknown(config, tuple(sorted(known)))
