"""Attention blocks of model code: q, k, v by columns with one gather, output by rows, head counts of this rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .columns import QKV, child_linear
from .linear import SEQUENCE_DIM, RowLinear
from .parameters import check_untouched
from .replicated import SequenceNorm

__all__ = ["Attention"]

HEAD_DIM = ("head_dim", "attention_head_size", "head_size", "d_head", "dim_head")
HEAD_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head",
)  # fmt: skip
WIDTHS = ("all_head_size", "inner_dim")


class Attention(ParallelStyle):
    """Whole heads of an attention module over the mesh; its forward, written for all heads, runs on this rank's.

    q, k, v, o name its linears. head_dim: default the module's own attribute. local_attributes: more integers of the
    module that count heads or features of heads and must be divided; known names (num_heads, n_kv_heads,
    all_head_size, ..) need no mention. Children with one value per element of a head (q_norm, k_norm) become
    SequenceNorm. With sequence_parallel input and output are shards of `sequence_dim`.

    A DTensor can say equal shards of whole heads only. ValueError, with the module unchanged, when query or key/value
    heads do not divide by the mesh: `interlace.parallelize` and `ParallelAttention` cut those too.
    """

    def __init__(
        self,
        q: str = "q_proj",
        k: str = "k_proj",
        v: str = "v_proj",
        o: str = "o_proj",
        *,
        head_dim: int | None = None,
        local_attributes: Sequence[str] = (),
        sequence_parallel: bool = False,
        sequence_dim: int = SEQUENCE_DIM,
    ) -> None:
        self.inputs, self.output = (q, k, v), o
        self.head_dim, self.local_attributes = head_dim, tuple(local_attributes)
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        size = device_mesh.size()
        linears = [child_linear("Attention", module, name) for name in (*self.inputs, self.output)]
        numbers = self._local_numbers(module, linears, size)
        norms = self._norms(module)
        options = {"sequence_parallel": self.sequence_parallel, "sequence_dim": self.sequence_dim}
        for style, child in (
            (QKV(*self.inputs, **options), module),  # type: ignore[arg-type]
            (RowLinear(**options), linears[-1]),  # type: ignore[arg-type]
            *((SequenceNorm(), norm) for norm in norms),
        ):
            style.src_data_rank = self.src_data_rank
            style._apply(child, device_mesh)
        for name, number in numbers.items():
            setattr(module, name, number)
        return module

    def _local_numbers(self, module: nn.Module, linears: list[nn.Linear], size: int) -> dict[str, int]:
        """The module's attributes that count heads, as this rank has them."""
        query, key, value, output = linears
        head_dim = self._head_dim_of(module)
        kind = type(module).__name__
        heads, kv_heads = query.out_features // head_dim, key.out_features // head_dim
        if query.out_features % head_dim or key.out_features % head_dim or value.out_features % kv_heads:
            raise ValueError(
                f"Attention: {kind} has projections of {query.out_features}, {key.out_features} and "
                f"{value.out_features} features, which are not heads of head_dim={head_dim}; pass head_dim"
            )
        if output.in_features * kv_heads != value.out_features * heads:
            raise ValueError(
                f"Attention: {self.output} of {kind} reads {output.in_features} features, but the heads give "
                f"{value.out_features // kv_heads * heads}"
            )
        if heads % size or kv_heads % size:
            raise ValueError(
                f"Attention: {heads} query and {kv_heads} key/value heads of {kind} do not divide by the mesh of "
                f"{size} ranks, and a DTensor cannot place them otherwise; use interlace.parallelize, which splits "
                "heads unevenly and replicates key/value heads"
            )
        counts, widths = (heads, kv_heads), (query.out_features,)
        numbers: dict[str, int] = {}
        for names, totals in ((HEAD_COUNTS, counts), (WIDTHS, widths)):
            found = {name: getattr(module, name, None) for name in names}
            numbers |= {name: n // size for name, n in found.items() if type(n) is int and n in totals}
        for name in self.local_attributes:
            number = getattr(module, name, None)
            if type(number) is not int or number % size:
                raise ValueError(
                    f"Attention: {kind}.{name} is {number!r}; expected an integer that divides by the mesh of "
                    f"{size} ranks"
                )
            numbers[name] = number // size
        return numbers

    def _head_dim_of(self, module: nn.Module) -> int:
        found = self.head_dim
        if found is None:
            found = next((getattr(module, name) for name in HEAD_DIM if hasattr(module, name)), None)
        if type(found) is not int or found < 1:
            raise ValueError(
                f"Attention: head_dim of {type(module).__name__} is {found!r}; pass head_dim=, an integer >= 1"
            )
        return found

    def _norms(self, module: nn.Module) -> list[nn.Module]:
        """Children that see one head at a time; ValueError for parameters that are of anything else."""
        kind, head_dim = type(module).__name__, self._head_dim_of(module)
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own:
            raise ValueError(
                f"Attention: {kind} has parameters of its own ({', '.join(own)}) that may differ between heads; "
                "use interlace.parallelize"
            )
        linears = {id(module.get_submodule(name)) for name in (*self.inputs, self.output)}
        norms = []
        for name, child in module.named_modules():
            shapes = {tuple(param.shape) for _, param in child.named_parameters(recurse=False)}
            if child is module or id(child) in linears or not shapes:
                continue
            if shapes != {(head_dim,)}:
                raise ValueError(
                    f"Attention: {name} of {kind} has parameters of shapes {sorted(shapes)}, not one value per element "
                    f"of a head ({head_dim}); use interlace.parallelize, or split {kind} by ColumnLinear and RowLinear"
                )
            check_untouched(f"Attention: {name}", child)
            norms.append(child)
        return norms
