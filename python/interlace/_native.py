"""Interim: schemas defined from Python until the native library lands."""

from __future__ import annotations

import torch

from . import reference

SCHEMAS = (
    "all_gather_gemm(Tensor x_shard, Tensor[] weights, Tensor?[] biases, int gather_dim, str group_name, "
    "bool return_gathered, SymInt? gather_size=None, SymInt[] packed_rows=[]) -> (Tensor, Tensor[])",
    "gemm_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, int scatter_dim, str group_name, SymInt? packed_rows=None) -> Tensor",
    "gemm_all_reduce(Tensor x, Tensor weight, Tensor? bias, str group_name, SymInt? packed_rows=None) -> Tensor",
    "column_gemm(Tensor x, Tensor[] weights, Tensor?[] biases, str group_name, SymInt[] packed_rows=[]) -> Tensor[]",
    "sum_gemm_reduce_scatter(Tensor[] xs, Tensor[] weights, int scatter_dim, str group_name) -> Tensor",
    "sum_gemm_all_reduce(Tensor[] xs, Tensor[] weights, str group_name) -> Tensor",
    "all_reduce(Tensor x, str group_name) -> Tensor",
    "all_gather(Tensor x, int dim, str group_name, SymInt? gather_size=None) -> Tensor",
    "reduce_scatter(Tensor x, int dim, str group_name) -> Tensor",
    "all_to_all(Tensor x, SymInt[]? output_split_sizes, SymInt[]? input_split_sizes, str group_name) -> Tensor",
)
_LIB = torch.library.Library("interlace", "DEF")
for _s in SCHEMAS:
    _LIB.define(_s)
L = torch.nn.functional.linear
R = reference
_LIB.impl("all_gather_gemm", lambda x, w, b, d, g, r, n=None, p=(): R.all_gather_gemm(x, w, b, d, g, r, n), "CPU")
_LIB.impl("gemm_reduce_scatter", lambda x, w, b, d, g, p=None: R.gemm_reduce_scatter(x, w, b, d, g), "CPU")
_LIB.impl("gemm_all_reduce", lambda x, w, b, g, p=None: R.gemm_all_reduce(x, w, b, g), "CPU")
_LIB.impl("column_gemm", lambda x, w, b, g, p=(): [L(x, i, j) for i, j in zip(w, b, strict=True)], "CPU")
_LIB.impl(
    "sum_gemm_reduce_scatter", lambda x, w, d, g: R.reduce_scatter(sum(L(i, j) for i, j in zip(x, w, strict=True)), d, g), "CPU"
)
_LIB.impl("sum_gemm_all_reduce", lambda x, w, g: R.all_reduce(sum(L(i, j) for i, j in zip(x, w, strict=True)), g), "CPU")
for _n in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
    _LIB.impl(_n, getattr(R, _n), "CPU")
