#include "cuda/kernels/all_gather.cuh"

#include "cuda/kernels/collective_launch.h"
#include "cuda/kernels/launching.cuh"
#include "cuda/kernels/switch_wire.cuh"

namespace interlace {
namespace {

struct Kernels {
  using Kernel = void (*)(SymmetricGroup, ShardArguments);
  template <typename T, int> static constexpr Kernel kernel = all_gather_kernel<T, kThroughSwitch>;
};

}  // namespace

cudaError_t launch_all_gather_multimem(const SymmetricGroup& group, int ranks_played,
                                       const ShardArguments& arguments, int64_t element_bytes, int blocks,
                                       cudaStream_t stream) {
  if (group.multicast == nullptr) return cudaErrorInvalidValue;
  const Kernels::Kernel kernel = copying_instance<Kernels>(element_bytes, group.world_size);
  ShardArguments copies = arguments;
  copies.elements = copied(arguments.elements, element_bytes);
  kernel<<<dim3(blocks, ranks_played), kShardThreads, 0, stream>>>(group, copies);
  return cudaGetLastError();
}

}  // namespace interlace
