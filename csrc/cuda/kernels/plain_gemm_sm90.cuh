// gemm on sm_90: the plain product.
#pragma once

#include "cuda/kernels/gemm_sm90.cuh"
#include "cuda/kernels/plain_gemm.cuh"

namespace interlace {

template <class Tile>
INTERLACE_KERNEL(kGemmThreads)
plain_gemm_sm90_kernel(INTERLACE_PARAMETER GemmTensorMaps maps, INTERLACE_PARAMETER GemmArguments arguments) {
  INTERLACE_DYNAMIC_SHARED(shared);
  PlainHooks<Tile> hooks{arguments};
  gemm_tiles_sm90<Tile>(maps, arguments, hooks, ptx::ctaid_x(), ptx::nctaid_x(), shared);
}

}  // namespace interlace
