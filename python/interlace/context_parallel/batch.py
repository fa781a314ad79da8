"""A batch whose sequence is dealt out over the ranks: inputs, positions, labels and documents together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..functional import all_gather
from ..functional.attention import LAYOUTS, spans_of, tokens_of
from ..groups import Group, GroupInfo, resolve
from .attention import whole_group
from .work import Work, work_of

__all__ = ["ShardedBatch", "shard_batch"]

IGNORE = -100
LENGTHS = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k")
PADDING = {"labels": IGNORE, "shift_labels": IGNORE, "attention_mask": 0}
SEQUENCE_DIMS = {
    "input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "labels": 1, "shift_labels": 1, "token_type_ids": 1,
}  # fmt: skip


@dataclass(frozen=True)
class ShardedBatch:
    """This rank's part of a batch, and the way back.

    inputs: what the model is called with. cu_seqlens: ends of the documents in the padded sequence, or None.
    length, padded_length: tokens of the whole sequence without and with padding. work: attention by rank.
    """

    inputs: dict[str, Tensor]
    layout: str
    cu_seqlens: tuple[int, ...] | None
    length: int
    padded_length: int
    work: Work
    group: str
    sources: tuple[Tensor, ...]  # by rank: the token of the unpadded sequence at each place, -1 for padding

    def shard(self, x: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """This rank's part of another tensor whose `dim` is the whole sequence; padding holds `fill`."""
        return _take(x, dim, self.sources[resolve(self.group).rank], fill)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tensor of the whole sequence from every rank's part along `dim`, in order, without padding.

        For logits and hidden states; differentiable. Collective.
        """
        whole = all_gather(x, dim=dim, group=self.group)
        source = torch.cat(self.sources)
        place = torch.empty(self.length, dtype=torch.int64)
        real = source >= 0
        place[source[real]] = torch.arange(source.numel())[real]
        return whole.index_select(dim, place.to(x.device))


def shard_batch(
    batch: Mapping[str, Tensor],
    mesh: Group,
    layout: str = "zigzag",
    *,
    buffers: Mapping[str, int] | None = None,
    padding: Mapping[str, float] | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
) -> ShardedBatch:
    """Deal a batch out over the ranks of `mesh`, of one axis or two, every rank calling with the whole batch.

    batch: input_ids [B, S] or inputs_embeds [B, S, H], and any of position_ids, labels, token_type_ids,
    attention_mask [B, S] (padding on the right only), cu_seqlens; of other tensors `buffers` names the dim that is
    the sequence. padding: values for padded places by name (labels -100, others 0).
    layout: "contiguous", "zigzag" (balanced for causal attention) or "striped". With cu_seqlens [0, .., S], B = 1,
    zigzag balances every document for itself.

    The result's `inputs` hold this rank's tokens with position_ids of the whole sequence (of its document), labels,
    `shift_labels` (the next token's label, also across the borders of shards, none across documents) and
    num_items_in_batch such that losses of Hugging Face models, averaged over ranks, are the loss of the unsplit
    batch. With documents also cu_seq_lens_q and cu_seq_lens_k of the padded sequence.
    The sequence is padded to a length that divides; `unshard` takes the padding out.
    Raises ValueError for a mask the layout cannot honour, an unnamed tensor, and lengths that do not fit.
    """
    info = resolve(whole_group(mesh))
    if layout not in LAYOUTS:
        raise ValueError(f"shard_batch: layout={layout!r}; expected one of {', '.join(LAYOUTS)}")
    tensors = {name: value for name, value in batch.items() if name not in LENGTHS}
    given = cu_seqlens if cu_seqlens is not None else next((batch[n] for n in LENGTHS if n in batch), None)
    length = _length(tensors)
    documents = _documents(given, tensors, length)
    _apply_mask(tensors, causal)
    dims = _dims(tensors, length, buffers or {})
    ends, padded, source = _padded(layout, info, length, documents, causal, tensors)
    sources = tuple(
        source[tokens_of(spans_of(layout, padded, info.world_size, r, ends))] for r in range(info.world_size)
    )
    _add_positions(tensors, dims, length, documents)
    _add_shifted(tensors, dims, documents)
    fills = {**PADDING, **(padding or {})}
    own = sources[info.rank]
    inputs = {n: _take(t, dims[n], own, fills.get(n, 0)) if n in dims else t for n, t in tensors.items()}
    if "shift_labels" in tensors:
        inputs["num_items_in_batch"] = (tensors["shift_labels"] != IGNORE).sum().clamp(
            min=1
        ) / info.world_size
    if ends is not None:
        lengths = torch.tensor(ends, dtype=torch.int32)
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = lengths
    work = work_of(layout, padded, info.world_size, causal=causal, window=window, cu_seqlens=ends)
    return ShardedBatch(inputs, layout, ends, length, padded, work, info.name, sources)


def _length(tensors: Mapping[str, Tensor]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        if name in tensors:
            if tensors[name].dim() < 2:
                raise ValueError(f"shard_batch: {name} is {list(tensors[name].shape)}; expected [B, S, ..]")
            return tensors[name].shape[1]
    raise ValueError(
        "shard_batch: the batch has neither input_ids nor inputs_embeds, which say how long it is"
    )


def _documents(
    given: Sequence[int] | Tensor | None, tensors: Mapping[str, Tensor], length: int
) -> list[int] | None:
    if given is None:
        return None
    ends = [int(n) for n in (given.flatten().tolist() if isinstance(given, Tensor) else given)]
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != length or sorted(ends) != ends:
        raise ValueError(
            f"shard_batch: cu_seqlens={ends} does not describe {length} tokens; expected [0, .., {length}], "
            "never decreasing"
        )
    first = next(tensors[n] for n in ("input_ids", "inputs_embeds") if n in tensors)
    if first.shape[0] != 1:
        raise ValueError(f"shard_batch: cu_seqlens with a batch of {first.shape[0]}; pack into one sequence")
    return ends


def _apply_mask(tensors: dict[str, Tensor], causal: bool) -> None:
    """Take a padding mask out of the batch: behind causal attention padding on the right needs none."""
    mask = tensors.pop("attention_mask", None)
    if mask is None or bool((mask != 0).all()):
        return
    on_the_right = mask.dim() == 2 and bool((mask[:, 1:].bool() <= mask[:, :-1].bool()).all())
    if not (causal and on_the_right):
        raise ValueError(
            f"shard_batch: no layout can honour this attention_mask {list(mask.shape)} (causal={causal}); a causal "
            "model may be padded on the right, otherwise pack the sequences and pass cu_seqlens"
        )
    if "labels" in tensors:
        tensors["labels"] = tensors["labels"].masked_fill(mask == 0, IGNORE)


def _dims(tensors: Mapping[str, Tensor], length: int, buffers: Mapping[str, int]) -> dict[str, int]:
    """The dim of the sequence by name. A tensor that seems to have one but is not named is refused."""
    unknown = [name for name in buffers if name not in tensors]
    if unknown:
        raise ValueError(f"shard_batch: buffers names {unknown[0]!r}, which the batch does not have")
    dims = {}
    for name, tensor in tensors.items():
        dim = buffers.get(name, SEQUENCE_DIMS.get(name))
        if dim is None:
            if length in tensor.shape and tensor.dim() > 0:
                raise ValueError(
                    f"shard_batch: {name} {list(tensor.shape)} may have the sequence in it; name the dim, "
                    f'buffers={{"{name}": dim}}'
                )
            continue
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != length:
            raise ValueError(
                f"shard_batch: dim {dim} of {name} {list(tensor.shape)} is not the sequence of {length} tokens"
            )
        dims[name] = dim
    return dims


def _padded(
    layout: str,
    info: GroupInfo,
    length: int,
    documents: list[int] | None,
    causal: bool,
    tensors: Mapping[str, Tensor],
) -> tuple[tuple[int, ...] | None, int, Tensor]:
    """Ends of the padded documents, the padded length, and the token at every place of it (-1: padding)."""
    unit = 2 * info.world_size if layout == "zigzag" else info.world_size
    if documents is not None and layout == "zigzag":
        ends, parts = [0], []
        for begin, end in itertools.pairwise(documents):
            extra = -(end - begin) % unit
            parts += [torch.arange(begin, end), torch.full((extra,), -1)]
            ends.append(ends[-1] + end - begin + extra)
        return tuple(ends), ends[-1], torch.cat(parts)
    extra = -length % unit
    source = torch.cat([torch.arange(length), torch.full((extra,), -1)])
    if extra and documents is None and not causal:
        first = next(tensors[n] for n in ("input_ids", "inputs_embeds") if n in tensors)
        if first.shape[0] != 1:
            raise ValueError(
                f"shard_batch: {length} tokens over {info.world_size} ranks need {extra} more, which a model that "
                "is not causal would see; give sequences whose length divides, or pack them with cu_seqlens"
            )
        documents = [0, length]
    if documents is None:
        return None, length + extra, source
    return (*documents, *([length + extra] if extra else [])), length + extra, source


def _add_positions(
    tensors: dict[str, Tensor], dims: dict[str, int], length: int, documents: list[int] | None
) -> None:
    if "position_ids" in tensors:
        return
    ends = documents or [0, length]
    runs = [torch.arange(end - begin) for begin, end in itertools.pairwise(ends)]
    first = next(tensors[n] for n in ("input_ids", "inputs_embeds") if n in tensors)
    tensors["position_ids"] = torch.cat(runs).to(first.device).expand(first.shape[0], -1)
    dims["position_ids"] = 1


def _add_shifted(tensors: dict[str, Tensor], dims: dict[str, int], documents: list[int] | None) -> None:
    """The label of the next token, before anything is cut; the last token of a document has none."""
    if "labels" not in tensors or "shift_labels" in tensors:
        return
    labels = tensors["labels"]
    shifted = torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORE)], 1)
    if documents is not None:
        last = torch.tensor([end - 1 for end in documents[1:] if end > 0], device=labels.device)
        shifted.index_fill_(1, last, IGNORE)
    tensors["shift_labels"] = shifted
    dims["shift_labels"] = 1


def _take(x: Tensor, dim: int, source: Tensor, fill: float) -> Tensor:
    """The tokens `source` of x along `dim`; `fill` where it is -1."""
    source = source.to(x.device)
    taken = x.index_select(dim, source.clamp(min=0))
    padding = source < 0
    if not bool(padding.any()):
        return taken
    shape = [1] * x.dim()
    shape[dim] = -1
    return taken.masked_fill(padding.view(shape), fill)
