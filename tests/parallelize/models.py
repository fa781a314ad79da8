"""Small random models of Hugging Face families, and the comparison of a split one with the whole one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from interlace.parallelize.api import parallelize

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "intermediate_size": 54,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
LLAMA_LIKE = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama_bias": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"query_pre_attn_scalar": 8, "sliding_window": 5}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"query_pre_attn_scalar": 8, "sliding_window": 5}),
}
BERT_LIKE = {
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {}),
}


def make(family: str, heads: int = 6, kv_heads: int = 3, *, attention: str = "", **options: Any) -> nn.Module:
    """A model in fp64 and eval mode, the same on every rank."""
    import transformers

    config_name, model_name, own = {**LLAMA_LIKE, **BERT_LIKE}[family]
    sizes = {**SIZES, **own, **options, "num_attention_heads": heads, "hidden_size": 8 * heads}
    sizes["attn_implementation"] = attention or ("eager" if family == "gemma2" else "sdpa")
    if family in LLAMA_LIKE:
        sizes |= {"num_key_value_heads": kv_heads, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(7)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**sizes))
    for param in model.parameters():  # norms start as ones and biases as zeros: nothing would show in them
        param.data.add_(torch.randn_like(param) * 0.1)
    model.tie_weights()
    return model.double().eval()


def loss_of(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits, and a loss that weighs every logit differently."""
    logits = model(input_ids=ids, attention_mask=mask).logits
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(logits.shape, generator=generator, dtype=logits.dtype)
    return logits, (logits * weights).sum()


def own_part(whole: Tensor, module: nn.Module | None, name: str) -> Tensor:
    """The part of an unsplit parameter, or of its gradient, that this rank's module holds."""
    # asked of the class: SummedGradients hands on attributes
    describe = getattr(type(module), "parameter_layouts", None)
    layout = None if describe is None else describe(module).get(name.rpartition(".")[2])
    return whole if layout is None else layout.take(whole, module.rank)


def assert_near(what: str, found: Tensor, expected: Tensor) -> None:
    """Relative Frobenius norm 5e-6: the norms of these models compute in fp32 (1e-7) even when the model is fp64.

    Below 1e-6 a gradient is zero but for rounding (key biases: softmax does not see them).
    """
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = ((found - expected).norm() / expected.norm().clamp_min(1e-6)).item()
    assert error < 5e-6, f"{what}: relative error {error:.2e}"


def check_split(model: nn.Module, ids: Tensor, mask: Tensor | None = None, **options: Any) -> nn.Module:
    """Split a copy of `model`, then compare logits and the gradient of every parameter with the whole one."""
    whole = copy.deepcopy(model)
    split = parallelize(model, None, **options)
    expected, whole_loss = loss_of(whole, ids, mask)
    whole_loss.backward()
    logits, loss = loss_of(split, ids, mask)
    loss.backward()
    assert_near("logits", logits, expected)
    modules = dict(split.named_modules())
    named = dict(split.named_parameters())
    assert set(named) == set(dict(whole.named_parameters())), "parameter names changed"
    for name, param in whole.named_parameters():
        module = modules[name.rpartition(".")[0]]
        assert param.grad is not None and named[name].grad is not None, name
        want = own_part(param.grad, module, name)
        assert_near(f"gradient of {name}", named[name].grad, want)
        torch.testing.assert_close(named[name].data, own_part(param.data, module, name), rtol=0, atol=0)
    return split
