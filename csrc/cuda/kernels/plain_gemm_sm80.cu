#include "cuda/kernels/plain_gemm_sm80.cuh"

#include "cuda/kernels/launch_shared.cuh"
#include "cuda/kernels/plain_gemm.h"

namespace interlace {
namespace {

template <class T>
cudaError_t launch(const GemmArguments& arguments, bool mn_major, int blocks, cudaStream_t stream) {
  const auto kernel = mn_major ? plain_gemm_sm80_kernel<gemm_sm80::GemmTile<T, true>>
                               : plain_gemm_sm80_kernel<gemm_sm80::GemmTile<T, false>>;
  return launch_with_shared(kernel, blocks, gemm_sm80::kThreads, gemm_sm80::kSharedBytes, stream, arguments);
}

}  // namespace

cudaError_t launch_plain_gemm_sm80(const GemmArguments& arguments, const GemmVariant& variant, int blocks,
                                   cudaStream_t stream) {
  if (variant.tile_columns != gemm_sm80::kTileColumns) return cudaErrorInvalidValue;
  switch (variant.dtype) {
    case Dtype::kBFloat16: return launch<BFloat16>(arguments, variant.mn_major, blocks, stream);
    case Dtype::kFloat16: return launch<Float16>(arguments, variant.mn_major, blocks, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace interlace
