#include "cuda/kernels/publish_chunk.cuh"

#include "cuda/kernels/collective_launch.h"

namespace interlace {

cudaError_t launch_publish_chunk(const SymmetricGroup& group, int peer, int64_t chunk, cudaStream_t stream) {
  publish_chunk_kernel<<<1, 1, 0, stream>>>(group, peer, chunk);
  return cudaGetLastError();
}

}  // namespace interlace
