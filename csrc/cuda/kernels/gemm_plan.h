// sm_90 GEMMs, host side: what they cannot multiply, and the tensor maps they need. Pure; no CUDA here.
#pragma once

#include <cstdint>

#include "cuda/kernels/gemm_arguments.h"

namespace interlace {

constexpr int64_t kMaxTensorDim = int64_t{1} << 31;  // coordinates are 32-bit and signed
constexpr int64_t kMaxTensorStride = int64_t{1} << 40;  // bytes; cuTensorMapEncodeTiled

// nullptr, or why TMA cannot read this matrix of `outer` rows.
inline const char* tensor_map_refuses(const void* address, int64_t inner, int64_t outer,
                                      int64_t stride_bytes) {
  if (reinterpret_cast<uintptr_t>(address) % kTransferBytes != 0)
    return "TMA reads matrices that start at a multiple of 16 bytes; this one does not";
  if (outer > 1 && stride_bytes % kTransferBytes != 0)
    return "TMA reads matrices whose rows are a multiple of 16 bytes apart; pad the inner dimension";
  if (inner < 1 || outer < 1) return "a matrix without elements has no tensor map";
  if (inner >= kMaxTensorDim || outer >= kMaxTensorDim) return "a dimension has 2^31 elements or more";
  if (stride_bytes >= kMaxTensorStride) return "rows are 2^40 bytes or more apart";
  return nullptr;
}

// nullptr when the sm_90 kernels can multiply this, otherwise the reason, a sentence for the user.
inline const char* gemm_sm90_refuses(const GemmArguments& arguments, const GemmVariant& variant) {
  const bool fp8 = variant.dtype == Dtype::kFloat8E4m3;
  if (!fp8 && variant.dtype != Dtype::kBFloat16 && variant.dtype != Dtype::kFloat16)
    return "there are kernels for bfloat16, float16 and float8_e4m3fn only";
  if (variant.tile_columns != 128 && variant.tile_columns != 256) return "tiles have 128 or 256 columns";
  if (variant.tile_columns == 256 && variant.dtype != Dtype::kBFloat16)
    return "tiles of 256 columns are built for bfloat16 only";
  if (fp8 && variant.mn_major) return "wgmma reads fp8 weights as [N, K] rows only; store the transpose";
  if (arguments.rows < 0) return "a negative number of rows";
  if (arguments.count < 1 || arguments.count > kMaxProducts) return "1 to 4 products in one call";
  if (fp8 && arguments.summed && arguments.count > 1)
    return "products with scales of their own are not summed";
  const int64_t size = dtype_size(variant.dtype);
  for (int32_t p = 0; p < arguments.count; ++p) {
    const GemmProduct& product = arguments.products[p];
    const int32_t source = arguments.summed ? p : 0;
    const int64_t x_stride = arguments.x_stride[source] * size;
    const char* refused = nullptr;
    if (arguments.rows > 0) {  // a rank without rows of its own brings no map of x
      refused = tensor_map_refuses(arguments.x[source], product.depth, arguments.rows, x_stride);
    }
    if (refused != nullptr) return refused;
    const int64_t inner = variant.mn_major ? product.columns : product.depth;
    const int64_t outer = variant.mn_major ? product.depth : product.columns;
    refused = tensor_map_refuses(product.weight, inner, outer, product.stride * size);
    if (refused != nullptr) return refused;
  }
  return nullptr;
}

namespace detail {

inline TensorMapRequest request_rows(const void* address, const GemmVariant& variant, int64_t inner,
                                     int64_t outer, int64_t stride, uint32_t box_outer) {
  const int64_t size = dtype_size(variant.dtype);
  // a single row has no stride, but the map wants a legal one
  const int64_t bytes = (stride * size + kTransferBytes - 1) / kTransferBytes * kTransferBytes;
  return {address,  variant.dtype, inner, outer, bytes, static_cast<uint32_t>(kStageRowBytes / size),
          box_outer};
}

}  // namespace detail

// Fills `requests` in the order of GemmTensorMapsOf; the arguments must be legal.
inline void tensor_map_plan(const GemmArguments& arguments, const GemmVariant& variant,
                            const GatheredRows& gathered, TensorMapRequest (&requests)[kTensorMaps]) {
  for (TensorMapRequest& request : requests) request = {};
  const uint32_t stage_depth = static_cast<uint32_t>(kStageRowBytes / dtype_size(variant.dtype));
  for (int32_t p = 0; p < arguments.count; ++p) {
    const GemmProduct& product = arguments.products[p];
    if (arguments.rows > 0 && (p == 0 || arguments.summed)) {
      requests[p] = detail::request_rows(arguments.x[p], variant, product.depth, arguments.rows,
                                         arguments.x_stride[p], kGemmBlockRows);
    }
    TensorMapRequest& weight = requests[kMaxProducts + kGatheredMaps + p];
    if (variant.mn_major) {
      weight = detail::request_rows(product.weight, variant, product.columns, product.depth, product.stride,
                                    stage_depth);
    } else {
      weight = detail::request_rows(product.weight, variant, product.depth, product.columns, product.stride,
                                    static_cast<uint32_t>(variant.tile_columns));
    }
  }
  for (int half = 0; half < kGatheredMaps; ++half) {
    if (gathered.rows == 0 || gathered.halves[half] == nullptr) continue;
    requests[kMaxProducts + half] =
        detail::request_rows(gathered.halves[half], variant, arguments.products[0].depth, gathered.rows,
                             gathered.stride, kGemmBlockRows);
  }
}

}  // namespace interlace
