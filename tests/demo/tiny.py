"""Tiny random models saved to a folder, and the demo run on them as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ENTRY = "from interlace.cli import main; main()"
SECONDS = 600  # of one run on a busy machine; an idle one needs 10, the real model 60


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    status: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


def llama(folder: Path) -> Path:
    """A Llama of two layers, 9 query and 3 key/value heads (neither divides by 2), without a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=72,
        intermediate_size=130,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=256,
        max_position_embeddings=256,
        initializer_range=0.2,  # logits of some size, so that the likeliest token is no tie
    )
    return save(LlamaForCausalLM(config), folder)


def bert(folder: Path) -> Path:
    """An encoder of two layers without a tokenizer."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=128,
    )
    return save(BertModel(config), folder)


def save(model: Any, folder: Path) -> Path:
    """Without a progress bar: its lock is a semaphore in shared memory that stays until the process ends."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def demo(*arguments: str) -> Ran:
    """`interlace demo` with these arguments."""
    return run([sys.executable, "-c", ENTRY, "demo", *arguments])


def run(command: list[str]) -> Ran:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    return Ran(done.returncode, done.stdout, done.stderr)
