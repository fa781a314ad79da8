"""The loss of a language model whose vocabulary is cut over a group, as a module."""

from __future__ import annotations

from torch import Tensor, nn

from .. import functional
from ..groups import Group, resolve

__all__ = ["VocabParallelCrossEntropy"]


class VocabParallelCrossEntropy(nn.Module):
    """nn.CrossEntropyLoss of logits [.., V_r], cut as torch.chunk does, and targets [..]; see
    `functional.vocab_parallel_cross_entropy`.

    What an output head without gather_output gives goes in; nobody gathers the logits. The result is fp32 and
    bitwise equal on all ranks. z_loss: weight of the squared log of the sum of exp, 0 for none.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        group: Group = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.vocab_size, self.group_name = vocab_size, resolve(group).name
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.z_loss, self.reduction = z_loss, reduction

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        """logits [.., V_r], target [..] -> the loss."""
        return functional.vocab_parallel_cross_entropy(
            logits, target, group=self.group_name, vocab_size=self.vocab_size, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, z_loss=self.z_loss, reduction=self.reduction,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """The settings."""
        return (
            f"vocab_size={self.vocab_size}, ignore_index={self.ignore_index}, "
            f"label_smoothing={self.label_smoothing}, z_loss={self.z_loss}, reduction={self.reduction!r}"
        )
