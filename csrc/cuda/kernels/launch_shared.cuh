// Launch of a kernel that needs more shared memory than every kernel may have.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace interlace {

template <class... Parameters>
cudaError_t launch_with_shared(void (*kernel)(Parameters...), int blocks, int threads, uint32_t shared_bytes,
                               cudaStream_t stream, const Parameters&... parameters) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<blocks, threads, shared_bytes, stream>>>(parameters...);
  return cudaGetLastError();
}

}  // namespace interlace
