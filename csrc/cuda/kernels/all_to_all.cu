#include "cuda/kernels/all_to_all.cuh"

#include "cuda/kernels/collective_launch.h"
#include "cuda/kernels/launching.cuh"

namespace interlace {
namespace {

struct Kernels {
  using Kernel = void (*)(SymmetricGroup, AllToAllArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = all_to_all_kernel<T, kBound>;
};

}  // namespace

cudaError_t launch_all_to_all(const SymmetricGroup& group, int ranks_played,
                              const AllToAllArguments& arguments, int64_t element_bytes, int blocks,
                              cudaStream_t stream) {
  const Kernels::Kernel kernel = copying_instance<Kernels>(element_bytes, group.world_size);
  AllToAllArguments copies = arguments;
  for (int i = 0; i < ranks_played; ++i) {
    copies.sent[i] = copied(arguments.sent[i], element_bytes);
    copies.received[i] = copied(arguments.received[i], element_bytes);
  }
  copies.largest = arguments.largest * copies_per_element(element_bytes);
  kernel<<<dim3(blocks, ranks_played), kShardThreads, 0, stream>>>(group, copies);
  return cudaGetLastError();
}

}  // namespace interlace
