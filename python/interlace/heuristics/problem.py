"""One call as the choice sees it, and the answer. Only what is equal on all ranks of the group is in a Problem."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALGORITHMS", "GATHERS", "NORMS", "OPS", "PLAIN", "SCALED", "Decision", "Launch", "Problem"]

# fused: one kernel. one_shot, two_shot: the library's product and a kernel of ours for the collective. decomposed:
# the library's product in pieces under torch.distributed. baseline: the library's product, then torch.distributed.
ALGORITHMS = ("fused", "one_shot", "two_shot", "decomposed", "baseline")

GATHERS = ("all_gather_gemm", "all_gather_gemm_scaled")
NORMS = ("gemm_all_reduce_norm", "gemm_reduce_scatter_norm")
SCALED = ("all_gather_gemm_scaled", "gemm_reduce_scatter_scaled")
PLAIN = ("all_reduce", "all_gather", "reduce_scatter")
OPS = (*GATHERS, "gemm_reduce_scatter", "gemm_all_reduce", *NORMS, "gemm_reduce_scatter_scaled", *PLAIN)


@dataclass(frozen=True)
class Problem:
    """A call, described by what its ranks know alike.

    rows: of x over all ranks for gathers, of x for reductions. width: K of a gather, N of a reduction: the other one
    is cut over the ranks and may differ between them, so it takes part in no choice. products: weights of one gather
    or terms of one sum. dim_leads: the gathered or scattered dim comes first, so a rank's rows lie together.
    largest_dim: the longest dim of x, out or weight that all ranks know. itemsize: bytes of an element of x.
    out_dtype: of the output where it is not that of x.
    unavailable: why this group has no symmetric memory on its devices, empty when it has.
    """

    op: str
    dtype: str
    rows: int
    width: int
    world_size: int
    products: int = 1
    dim_leads: bool = True
    largest_dim: int = 0
    unavailable: str = ""
    itemsize: int = 2
    out_dtype: str = ""

    @property
    def message_bytes(self) -> int:
        """Bytes of the tensor that the collective puts together or takes apart."""
        return self.rows * self.width * self.itemsize


@dataclass(frozen=True)
class Launch:
    """How a kernel of ours is launched. tile_columns: 128 or 256. comm_blocks: blocks that move data, 0 = the copy
    engine. blocks: in all, 0 = every multiprocessor. float32_wire: partial sums travel unrounded."""

    tile_columns: int = 128
    comm_blocks: int = 8
    blocks: int = 0
    float32_wire: bool = False


@dataclass(frozen=True)
class Decision:
    """The algorithm, why it was taken, how it is launched, and why each other candidate was not."""

    algorithm: str
    reason: str
    launch: Launch = Launch()
    rejected: tuple[tuple[str, str], ...] = ()

    def why_not(self, algorithm: str) -> str:
        """Why `algorithm` was not taken; empty when it could have been."""
        return dict(self.rejected).get(algorithm, "")
