#include "cuda/host/budget.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/host/cuda_error.h"
#include "runtime/errors.h"

namespace interlace {

Budget choose_budget(const char* op, const DeviceShare& share, int64_t blocks, int64_t comm_blocks,
                     int64_t useful) {
  const int64_t limit = share.blocks();
  check_value(blocks >= 0 && comm_blocks >= 0, op, ": blocks=", blocks, ", comm_blocks=", comm_blocks,
              "; expected numbers >= 0 (blocks=0: all the device has)");
  check_value(blocks <= limit, op, ": ", blocks, " blocks of ", share.ranks, " ranks do not fit on ",
              share.multiprocessors, " multiprocessors at once; use at most ", limit, " blocks");
  const int64_t least = comm_blocks + 1;
  const int64_t chosen = blocks > 0 ? blocks : std::min(limit, std::max(least, useful));
  check_value(chosen >= least, op, ": comm_blocks=", comm_blocks, " of ", chosen,
              " blocks leave none to multiply; lower comm_blocks or raise blocks");
  return {static_cast<int32_t>(chosen), static_cast<int32_t>(comm_blocks)};
}

int multiprocessors(int device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  return count;
}

int compute_capability(int device) {
  int major = 0, minor = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

}  // namespace interlace
