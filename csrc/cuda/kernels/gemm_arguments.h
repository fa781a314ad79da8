// What a GEMM kernel is given: operands, tile shapes, and which tensor maps sm_90 needs. Host and device read this file.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "core/qualifiers.h"

namespace interlace {

constexpr int kMaxProducts = 4;  // n weights of one gather, or n summed products
constexpr int kGemmBlockRows = 128;  // rows of a tile, in both mainloops
constexpr int kTransferBytes = 16;  // alignment of what TMA and cp.async read

// One weight and what belongs to it. weight [columns, depth], stored as it is or (mn_major) as its transpose
// [depth, columns]; elements along the stored rows are neighbours.
struct GemmProduct {
  const void* weight;
  int64_t columns;  // N
  int64_t depth;  // K
  int64_t stride;  // elements between rows of the stored matrix
  const void* bias;  // [columns] in the element type of out, or null
  const float* weight_scale;  // fp8: 1 value, or [columns] with GemmArguments::row_wise
  void* out;  // [rows, columns]
  int64_t out_stride;  // elements between rows of out
};

// out[p] = x[p] weight[p]^T (+ bias[p]) for each product; or, summed, out[0] = sum over p of x[p] weight[p]^T
// (+ bias[0]) (+ residual). Accumulated in fp32; fp8 operands give bf16. All weights are stored the same way.
struct GemmArguments {
  const void* x[kMaxProducts];  // [rows, depth] each; not summed: all products multiply x[0]
  int64_t x_stride[kMaxProducts];  // elements between rows
  const float* x_scale;  // fp8: 1 value, or [rows] with row_wise
  int64_t rows;  // M
  GemmProduct products[kMaxProducts];
  int32_t count;  // products
  bool summed;
  bool row_wise;  // fp8 scales per row of x and per column of out instead of one each
  const void* residual;  // [rows, columns] added to out[0], or null
  int64_t residual_stride;

  // How many products one tile of out is summed over, and how many outs there are.
  INTERLACE_HD constexpr int32_t segments() const { return summed ? count : 1; }
  INTERLACE_HD constexpr int32_t outs() const { return summed ? 1 : count; }
};

// Which instance of a kernel: it fixes the instructions.
struct GemmVariant {
  Dtype dtype;  // of x and the weights: bf16, fp16 or fp8 e4m3
  bool mn_major;
  int32_t tile_columns;  // 128 or 256
};

// ---- sm_90: tensor maps ----
//
// A stage of the pipeline holds 128 bytes of K for each row of the tile: one box row, one row of the 128-byte swizzle.
constexpr int kStageRowBytes = 128;
constexpr int kGatheredMaps = 2;  // the gathered rows in half 0 and half 1
constexpr int kTensorMaps = 2 * kMaxProducts + kGatheredMaps;

// TensorMap: CUtensorMap on host and device, ptx::TensorMap (of the same meaning) in the emulator.
template <class TensorMap> struct GemmTensorMapsOf {
  TensorMap x[kMaxProducts];
  TensorMap gathered[kGatheredMaps];
  TensorMap weights[kMaxProducts];
};

// A matrix to encode: 2-D, `inner` elements lie side by side; swizzle of 128 bytes, out-of-range elements read as zero.
struct TensorMapRequest {
  const void* address;  // null: this map is not used
  Dtype dtype;
  int64_t inner, outer;  // elements
  int64_t outer_stride_bytes;
  uint32_t box_inner, box_outer;  // elements
};

// Rows that peers bring, as the kernel's second source of x: [rows, depth] in each half, or nothing.
struct GatheredRows {
  const void* halves[kGatheredMaps] = {};
  int64_t rows = 0;
  int64_t stride = 0;  // elements between rows
};

}  // namespace interlace
