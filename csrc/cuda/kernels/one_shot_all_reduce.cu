#include "cuda/kernels/one_shot_all_reduce.cuh"

#include "cuda/kernels/launch.h"
#include "cuda/kernels/launching.cuh"

namespace interlace {
namespace {

struct Kernels {
  using Kernel = void (*)(SymmetricGroup, AllReduceArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = one_shot_all_reduce_kernel<T, kBound>;
};

}  // namespace

cudaError_t launch_one_shot_all_reduce(const SymmetricGroup& group, int ranks_played,
                                       const AllReduceArguments& arguments, Dtype dtype, int blocks,
                                       cudaStream_t stream) {
  const Kernels::Kernel kernel = summing_instance<Kernels>(dtype, group.world_size);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<dim3(blocks, ranks_played), kAllReduceThreads, 0, stream>>>(group, arguments);
  return cudaGetLastError();
}

}  // namespace interlace
