// Failures of the CUDA runtime and driver, as exceptions that name the call.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace interlace {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // a launch error stays until it is read, and would be blamed on the next call
  throw std::runtime_error(std::string("interlace: ") + call + " failed: " + cudaGetErrorName(error) + ": " +
                           cudaGetErrorString(error));
}

}  // namespace interlace
