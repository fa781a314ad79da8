// gemm on sm_80 and later: the plain product.
#pragma once

#include "cuda/kernels/gemm_sm80.cuh"
#include "cuda/kernels/plain_gemm.cuh"

namespace interlace {

template <class Tile>
INTERLACE_KERNEL(gemm_sm80::kThreads)
plain_gemm_sm80_kernel(INTERLACE_PARAMETER GemmArguments arguments) {
  INTERLACE_DYNAMIC_SHARED(shared);
  PlainHooks<Tile> hooks{arguments};
  const GatheredRows nothing;
  gemm_sm80::gemm_tiles<Tile>(nothing, arguments, hooks, ptx::ctaid_x(), ptx::nctaid_x(), shared);
}

}  // namespace interlace
