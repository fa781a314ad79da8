#include "cuda/kernels/barrier.cuh"
#include "cuda/kernels/launch.h"

namespace interlace {

cudaError_t launch_barrier(const SymmetricGroup& group, int ranks_played, cudaStream_t stream) {
  barrier_kernel<<<dim3(1, ranks_played), kBarrierThreads, 0, stream>>>(group);
  return cudaGetLastError();
}

cudaError_t launch_push_barrier(const SymmetricGroup& group, cudaStream_t stream) {
  push_barrier_kernel<<<1, kBarrierThreads, 0, stream>>>(group);
  return cudaGetLastError();
}

}  // namespace interlace
