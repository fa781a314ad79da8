"""Batches every layout sees alike: drawn from the step's number, cut by data-parallel rank."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["Batches"]


class Batches:
    """Batch of a step: [global_batch, seq + 1] token ids, equal on all ranks; `of` gives one replica's rows.

    text: a file whose bytes are the tokens, read at positions drawn per step; without it tokens are random.
    Raises ValueError when the vocabulary cannot hold bytes or the file is shorter than a sequence.
    """

    def __init__(self, *, batch: int, seq: int, vocab: int, seed: int = 0, text: str = "") -> None:
        self.batch, self.seq, self.vocab, self.seed = batch, seq, vocab, seed
        self._bytes = (
            torch.frombuffer(bytearray(Path(text).read_bytes()), dtype=torch.uint8) if text else None
        )
        if self._bytes is not None and vocab < 256:
            raise ValueError(
                f"train: text needs a vocabulary of at least 256 for its bytes, the model has {vocab}"
            )
        if self._bytes is not None and self._bytes.numel() <= seq:
            raise ValueError(f"train: text {text} has {self._bytes.numel()} bytes; need more than seq={seq}")

    def of(self, step: int, replica: int, replicas: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, labels), each [global_batch / replicas, seq]: labels are the following tokens."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        if self._bytes is None:
            tokens = torch.randint(self.vocab, (self.batch, self.seq + 1), generator=generator)
        else:
            last = self._bytes.numel() - self.seq
            starts = torch.randint(last, (self.batch, 1), generator=generator)
            tokens = self._bytes[starts + torch.arange(self.seq + 1)].long()
        rows = self.batch // replicas
        own = tokens[replica * rows : (replica + 1) * rows]
        return own[:, :-1].contiguous(), own[:, 1:].contiguous()
