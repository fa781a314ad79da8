#include "cuda/kernels/plain_gemm_sm90.cuh"

#include "cuda/kernels/plain_gemm.h"

namespace interlace {
namespace {

template <class Tile>
cudaError_t launch(const GemmArguments& arguments, const GemmTensorMaps& maps, int blocks,
                   cudaStream_t stream) {
  const auto kernel = plain_gemm_sm90_kernel<Tile>;
  constexpr uint32_t kBytes = kGemmSharedBytes<Tile>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, kGemmThreads, kBytes, stream>>>(maps, arguments);
  return cudaGetLastError();
}

template <class T, int kColumns>
cudaError_t launch_layout(const GemmArguments& arguments, const GemmTensorMaps& maps, bool mn_major,
                          int blocks, cudaStream_t stream) {
  if (mn_major) return launch<GemmTile<T, kColumns, true>>(arguments, maps, blocks, stream);
  return launch<GemmTile<T, kColumns, false>>(arguments, maps, blocks, stream);
}

}  // namespace

cudaError_t launch_plain_gemm_sm90(const GemmArguments& arguments, const GemmTensorMaps& maps,
                                   const GemmVariant& variant, int blocks, cudaStream_t stream) {
  const bool wide = variant.tile_columns == 256;
  switch (variant.dtype) {
    case Dtype::kBFloat16:
      if (wide) return launch_layout<BFloat16, 256>(arguments, maps, variant.mn_major, blocks, stream);
      return launch_layout<BFloat16, 128>(arguments, maps, variant.mn_major, blocks, stream);
    case Dtype::kFloat16:
      if (wide) break;
      return launch_layout<Float16, 128>(arguments, maps, variant.mn_major, blocks, stream);
    case Dtype::kFloat8E4m3:
      if (wide || variant.mn_major) break;
      return launch<GemmTile<Float8E4m3, 128, false>>(arguments, maps, blocks, stream);
    default: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace interlace
