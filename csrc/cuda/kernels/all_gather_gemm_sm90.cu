#include "cuda/kernels/all_gather_gemm.cuh"
#include "cuda/kernels/fused_gemm_sm90.cuh"
#include "cuda/kernels/fused_launch.h"
#include "cuda/kernels/launch_shared.cuh"

namespace interlace {

cudaError_t launch_all_gather_gemm_sm90(const SymmetricGroup& group, const GemmArguments& arguments,
                                        const GatherArguments& gather, const GemmTensorMaps& maps,
                                        const GemmVariant& variant, int blocks, cudaStream_t stream) {
  return gemm_sm90::with_instance(
      variant,
      [&]<class Mainloop>(Mainloop) {
        return launch_with_shared(all_gather_gemm_kernel<Mainloop>, blocks, Mainloop::kThreads,
                                  Mainloop::kSharedBytes, stream, group, arguments, prepared(gather), maps);
      },
      cudaErrorInvalidValue);
}

}  // namespace interlace
