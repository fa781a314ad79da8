"""Small random models of families whose blocks are built in ways of their own: packed, transposed, interleaved, with
biases per head, with cross attention. And their comparison with themselves, split.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from interlace.modules.layout import layouts_of
from interlace.parallelize.api import parallelize
from tests.parallelize.models import assert_near

SIX = {"hidden_size": 48, "num_attention_heads": 6}
BASE = {"vocab_size": 61, "num_hidden_layers": 2, "intermediate_size": 54, "max_position_embeddings": 64}
BASE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
KV3 = BASE | SIX | {"num_key_value_heads": 3}
SMALL = {"vocab_size": 61, "num_hidden_layers": 2, "max_position_embeddings": 64, "ffn_hidden_size": 54}
FALCON = SMALL | SIX | {"bos_token_id": 1, "eos_token_id": 2, "bias": False}
OLD = FALCON | {"new_decoder_architecture": False}
NEW = FALCON | {"new_decoder_architecture": True}
GPT2 = {"vocab_size": 61, "n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 64, "bos_token_id": 1}
GPT2 |= {"eos_token_id": 2}
BLOOM = {"vocab_size": 61, "hidden_size": 48, "n_layer": 2, "n_head": 6}
OPT = {
    "vocab_size": 61,
    "ffn_dim": 54,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OPT |= SIX
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 54, "num_layers": 2, "num_heads": 6}
T5 |= {"relative_attention_num_buckets": 8, "decoder_start_token_id": 0}
PAIR = {
    "vocab_size": 61,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
}
PAIR |= {"decoder_attention_heads": 6, "encoder_ffn_dim": 54, "decoder_ffn_dim": 54, "pad_token_id": 0}
PAIR |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
WHISPER = PAIR | {"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 32}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
IMAGE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 54}
IMAGE |= {"image_size": 8, "patch_size": 4}

# name: (class of the config, class of the model, settings)
ZOO: dict[str, tuple[str, str, dict[str, Any]]] = {
    "phi": ("PhiConfig", "PhiForCausalLM", KV3),
    "phi_qk_norm": ("PhiConfig", "PhiForCausalLM", BASE | SIX | {"qk_layernorm": True}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", KV3 | {"sliding_window": 4}),
    "phi3_one_kv": ("Phi3Config", "Phi3ForCausalLM", KV3 | {"num_key_value_heads": 1}),
    "phi3_9_3": ("Phi3Config", "Phi3ForCausalLM", KV3 | {"hidden_size": 72, "num_attention_heads": 9}),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BASE | SIX),
    "neox_2_heads": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BASE | {"hidden_size": 16, "num_attention_heads": 2}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "gpt2_5_heads": ("GPT2Config", "GPT2LMHeadModel", GPT2 | {"n_embd": 40, "n_head": 5}),
    "gpt2_cross": ("GPT2Config", "GPT2LMHeadModel", GPT2 | {"add_cross_attention": True}),
    "bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT2),
    "bigcode_heads": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT2 | {"multi_query": False}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", GPT2 | {"n_embd": 64, "n_head": 8, "rotary_dim": 4}),
    "mpt": ("MptConfig", "MptForCausalLM", {"vocab_size": 61, "d_model": 48, "n_heads": 6, "n_layers": 2}),
    "opt": ("OPTConfig", "OPTForCausalLM", OPT | {"word_embed_proj_dim": 48}),
    "opt_norm_after": ("OPTConfig", "OPTForCausalLM", OPT | {"word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "falcon": ("FalconConfig", "FalconForCausalLM", OLD | {"multi_query": True, "parallel_attn": True}),
    "falcon_new": ("FalconConfig", "FalconForCausalLM", NEW | {"num_kv_heads": 2}),
    "falcon_new_one_kv": ("FalconConfig", "FalconForCausalLM", NEW | {"num_kv_heads": 1}),
    "falcon_alibi": (
        "FalconConfig", "FalconForCausalLM",
        OLD | {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", BLOOM),
    "bloom_5_heads": ("BloomConfig", "BloomForCausalLM", BLOOM | {"hidden_size": 40, "n_head": 5}),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE | {"num_labels": 7}),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "t5_gated": ("T5Config", "T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "t5_2_heads": ("T5Config", "T5ForConditionalGeneration", T5 | {"num_heads": 2}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", WHISPER),
    "bert_cross": ("BertConfig", "BertLMHeadModel", BASE | SIX | {"is_decoder": True, "add_cross_attention": True}),
    "bart": ("BartConfig", "BartForConditionalGeneration", PAIR),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", GPT2 | {"rotary_dim": 4}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", KV3),
    "glm": ("GlmConfig", "GlmForCausalLM", KV3 | {"head_dim": 8}),
    "persimmon": ("PersimmonConfig", "PersimmonForCausalLM", BASE | SIX),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", KV3),
    "distilbert": (
        "DistilBertConfig", "DistilBertForMaskedLM",
        {"vocab_size": 61, "dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 54},
    ),
}  # fmt: skip


def make(name: str, layers: int = 2) -> nn.Module:
    """A model in fp64 and eval mode, the same on every rank, with nothing in it that is zero or one."""
    import transformers

    config, model_class, settings = ZOO[name]
    if layers != 2:
        settings = settings | {"n_layer" if "n_layer" in settings else "num_hidden_layers": layers}
    torch.manual_seed(7)
    model = getattr(transformers, model_class)(getattr(transformers, config)(**settings))
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    model.tie_weights()
    return model.double().eval()


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """What the forward takes: token ids, sounds or images; another length for the decoder of a pair."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 61, (2, 7), generator=generator)
    config: Any = model.config
    if hasattr(config, "num_mel_bins"):
        sounds = torch.randn(2, 8, 20, generator=generator, dtype=torch.float64)
        return {"input_features": sounds, "decoder_input_ids": ids}
    if hasattr(config, "patch_size"):
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)}
    if config.is_encoder_decoder:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    if getattr(config, "add_cross_attention", False):
        states = torch.randn(2, 4, 48, generator=generator, dtype=torch.float64)
        return {"input_ids": ids, "encoder_hidden_states": states}
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0  # not the first: a row that sees nothing is NaN where fp64 masks are cast to fp32
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits, and a loss that weighs every logit differently."""
    logits = model(**given).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(3), dtype=logits.dtype)
    return logits, (logits * weights).sum()


def check_split(name: str, rank: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """(whole, split) of a family, after logits and the gradient of every parameter were found to be equal."""
    whole = make(name)
    numbers = copy.deepcopy(whole.config.to_dict())
    split = parallelize(copy.deepcopy(whole), None, **options)
    given = inputs(whole)
    expected, whole_loss = loss_of(whole, given)
    whole_loss.backward()
    logits, loss = loss_of(split, given)
    loss.backward()
    assert_near("logits", logits, expected)
    layouts, parts = layouts_of(split), dict(split.named_parameters())
    assert set(parts) == set(dict(whole.named_parameters())), "parameter names changed"
    for param_name, param in whole.named_parameters():
        if not param.requires_grad:  # the positions of Whisper's encoder
            assert parts[param_name].grad is None, param_name
            continue
        assert param.grad is not None and parts[param_name].grad is not None, param_name
        layout = layouts.get(param_name)
        own = (lambda tensor: tensor) if layout is None else (lambda tensor, x=layout: x.take(tensor, rank))
        assert_near(f"gradient of {param_name}", parts[param_name].grad, own(param.grad))
        torch.testing.assert_close(parts[param_name].data, own(param.data), rtol=0, atol=0)
    assert split.config.to_dict() == numbers, "the config of the model changed"
    return whole, split
