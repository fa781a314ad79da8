"""The ops as products in pieces, each under the collective of another: torch.distributed and the library's GEMM alone.

Works wherever torch.distributed does: on GPUs without peer access, over PCIe, between hosts, and with gloo on CPU
tensors. A piece is the part of one rank. In step i a rank sends to the rank i after it and receives from the rank i
before it, so every link is used in every step and shards may be of any length. On CUDA the transfers run on NCCL's
stream beside the products of the caller's stream.
"""

from .gather import all_gather_gemm, all_gather_gemm_scaled
from .reduce import (
    gemm_all_reduce,
    gemm_all_reduce_norm,
    gemm_reduce_scatter,
    gemm_reduce_scatter_norm,
    gemm_reduce_scatter_scaled,
    sum_gemm_all_reduce,
    sum_gemm_reduce_scatter,
)

__all__ = [
    "all_gather_gemm",
    "all_gather_gemm_scaled",
    "gemm_all_reduce",
    "gemm_all_reduce_norm",
    "gemm_reduce_scatter",
    "gemm_reduce_scatter_norm",
    "gemm_reduce_scatter_scaled",
    "sum_gemm_all_reduce",
    "sum_gemm_reduce_scatter",
]
