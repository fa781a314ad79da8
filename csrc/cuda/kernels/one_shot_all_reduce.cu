#include "cuda/kernels/one_shot_all_reduce.cuh"

#include "cuda/kernels/launch.h"

namespace interlace {
namespace {

using Kernel = void (*)(SymmetricGroup, AllReduceArguments);

template <typename T> Kernel kernel_for(int world_size) {
  constexpr Kernel kKernels[kMaxRanks] = {one_shot_all_reduce_kernel<T, 1>, one_shot_all_reduce_kernel<T, 2>,
                                          one_shot_all_reduce_kernel<T, 3>, one_shot_all_reduce_kernel<T, 4>,
                                          one_shot_all_reduce_kernel<T, 5>, one_shot_all_reduce_kernel<T, 6>,
                                          one_shot_all_reduce_kernel<T, 7>, one_shot_all_reduce_kernel<T, 8>};
  return kKernels[world_size - 1];
}

}  // namespace

cudaError_t launch_one_shot_all_reduce(const SymmetricGroup& group, int ranks_played,
                                       const AllReduceArguments& arguments, Dtype dtype, int blocks,
                                       cudaStream_t stream) {
  Kernel kernel = nullptr;
  switch (dtype) {
    case Dtype::kFloat32: kernel = kernel_for<float>(group.world_size); break;
    case Dtype::kBFloat16: kernel = kernel_for<BFloat16>(group.world_size); break;
    case Dtype::kFloat16: kernel = kernel_for<Float16>(group.world_size); break;
    default: return cudaErrorInvalidValue;
  }
  kernel<<<dim3(blocks, ranks_played), kAllReduceThreads, 0, stream>>>(group, arguments);
  return cudaGetLastError();
}

}  // namespace interlace
