// What the host encodes for the sm_90 GEMMs.
#pragma once

#include "cuda/kernels/gemm_plan.h"
#include "cuda/kernels/gemm_sm90.cuh"
#include "emu/testing.h"

namespace interlace::emu {

inline GemmTensorMaps encoded_maps(const GemmArguments& arguments, const GemmVariant& variant,
                                   const GatheredRows& gathered) {
  GemmTensorMaps maps{};
  TensorMapRequest requests[kTensorMaps];
  tensor_map_plan(arguments, variant, gathered, requests);
  static_assert(sizeof(maps) == kTensorMaps * sizeof(ptx::TensorMap));
  auto* const map = reinterpret_cast<ptx::TensorMap*>(&maps);
  for (int i = 0; i < kTensorMaps; ++i) {
    const TensorMapRequest& request = requests[i];
    if (request.address == nullptr) continue;
    const int64_t size = dtype_size(request.dtype);
    map[i] = make_tensor_map(request.address, request.inner, request.outer, request.outer_stride_bytes / size,
                             static_cast<int>(size), static_cast<int>(request.box_inner),
                             static_cast<int>(request.box_outer));
  }
  return maps;
}

}  // namespace interlace::emu
