#include "cuda/kernels/fused_gemm_sm90.cuh"
#include "cuda/kernels/fused_launch.h"
#include "cuda/kernels/gemm_reduce.cuh"
#include "cuda/kernels/launch_shared.cuh"

namespace interlace {

cudaError_t launch_gemm_reduce_sm90(const SymmetricGroup& group, const GemmArguments& arguments,
                                    const ReduceArguments& reduce, const GemmTensorMaps& maps,
                                    const GemmVariant& variant, int blocks, cudaStream_t stream) {
  return gemm_sm90::with_instance(
      variant,
      [&]<class Mainloop>(Mainloop) {
        return launch_with_shared(gemm_reduce_kernel<Mainloop>, blocks, Mainloop::kThreads,
                                  Mainloop::kSharedBytes, stream, group, arguments, prepared(reduce), maps);
      },
      cudaErrorInvalidValue);
}

}  // namespace interlace
