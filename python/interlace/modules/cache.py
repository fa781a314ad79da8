"""Keys and values of the tokens so far, for decoding step by step: growing, or in memory of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KVCache", "StaticKVCache"]


@dataclass
class KVCache:
    """Keys and values of this rank's kv heads, [.., local kv heads, tokens so far, head_dim]; empty at
    first.
    """

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens so far."""
        return 0 if self.keys is None else self.keys.shape[-2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the tokens of a step; returns all keys and all values."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        return keys, values


@dataclass
class StaticKVCache:
    """A cache of fixed size, [.., local kv heads, max_tokens, head_dim]: every step has the same shapes.

    Made by `ParallelAttention.static_cache`. `filled`: tokens so far, a tensor of no dims, so that a compiled step
    is compiled once. What is not filled yet is zero and masked. For inference: ValueError when gradients are on, and
    when more tokens come than there is room for.
    """

    keys: Tensor
    values: Tensor
    filled: Tensor

    @property
    def length(self) -> int:
        """Tokens so far."""
        return int(self.filled)

    @property
    def max_tokens(self) -> int:
        """Room."""
        return self.keys.shape[-2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put the tokens of a step behind those before; returns the whole memory."""
        if keys.requires_grad:
            raise ValueError(
                "StaticKVCache: a cache that is written in place has no gradient; use torch.no_grad()"
            )
        tokens = keys.shape[-2]
        room = self.filled + tokens <= self.max_tokens
        if torch.compiler.is_compiling() or self.filled.is_cuda:
            torch._assert_async(room, "StaticKVCache: more tokens than max_tokens")
        elif not bool(room):
            raise ValueError(
                f"StaticKVCache: {self.length} tokens and {tokens} more are over max_tokens={self.max_tokens}; "
                "make a larger cache"
            )
        place = torch.arange(tokens, device=self.filled.device) + self.filled
        self.keys.index_copy_(self.keys.dim() - 2, place, keys)
        self.values.index_copy_(self.values.dim() - 2, place, values)
        self.filled.add_(tokens)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.filled.zero_()
