#include "cuda/kernels/all_gather_gemm.cuh"
#include "cuda/kernels/fused_gemm_sm80.cuh"
#include "cuda/kernels/fused_launch.h"
#include "cuda/kernels/launch_shared.cuh"

namespace interlace {

cudaError_t launch_all_gather_gemm_sm80(const SymmetricGroup& group, const GemmArguments& arguments,
                                        const GatherArguments& gather, const GemmVariant& variant, int blocks,
                                        cudaStream_t stream) {
  if (arguments.count < 1 || arguments.count > kMaxProducts) return cudaErrorInvalidValue;
  const GatheredRows gathered =
      gathered_rows(group, group.first_rank, gather.schedule, arguments.products[0].depth, variant.dtype);
  return gemm_sm80::with_instance(
      variant,
      [&]<class Mainloop>(Mainloop) {
        return launch_with_shared(all_gather_gemm_kernel<Mainloop>, blocks, Mainloop::kThreads,
                                  Mainloop::kSharedBytes, stream, group, arguments, prepared(gather),
                                  gathered);
      },
      cudaErrorInvalidValue);
}

}  // namespace interlace
