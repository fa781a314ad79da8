#include "cuda/kernels/reduce_scatter_norm.cuh"

#include "cuda/kernels/collective_launch.h"
#include "cuda/kernels/launching.cuh"

namespace interlace {
namespace {

struct Kernels {
  using Kernel = void (*)(SymmetricGroup, RowArguments);
  template <typename T, int kBound, bool kAligned>
  static constexpr Kernel kernel = reduce_scatter_norm_kernel<T, kBound, kAligned>;
};

}  // namespace

cudaError_t launch_reduce_scatter_norm(const SymmetricGroup& group, int ranks_played,
                                       const RowArguments& arguments, Dtype dtype, int blocks,
                                       cudaStream_t stream) {
  const bool aligned = rows_are_aligned(arguments, ranks_played, dtype_size(dtype));
  const Kernels::Kernel kernel = row_instance<Kernels>(dtype, group.world_size, aligned);
  if (kernel == nullptr) return cudaErrorInvalidValue;
  kernel<<<dim3(blocks, ranks_played), kRowThreads, 0, stream>>>(group, arguments);
  return cudaGetLastError();
}

}  // namespace interlace
