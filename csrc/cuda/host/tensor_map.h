// Tensor maps of TMA, encoded by the driver and remembered.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <mutex>
#include <unordered_map>

#include "cuda/kernels/gemm_arguments.h"

namespace interlace {

using GemmTensorMaps = GemmTensorMapsOf<CUtensorMap>;
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// cuTensorMapEncodeTiled of the driver that is running. The library does not link the driver: it also loads where
// there is none.
EncodeTiled driver_encode_tiled();

// A map is a function of the request alone, so a map found by the whole request is right even if the memory behind
// the address was freed and given out again. Bounded: new addresses come up for ever in a training run.
class TensorMapCache {
 public:
  static constexpr size_t kCapacity = 4096;  // of 128 bytes each

  explicit TensorMapCache(EncodeTiled encode) : encode_(encode) {}
  CUtensorMap get(const TensorMapRequest& request);
  size_t size() const;

 private:
  struct Hash {
    size_t operator()(const TensorMapRequest& request) const;
  };
  struct Equal {
    bool operator()(const TensorMapRequest& a, const TensorMapRequest& b) const;
  };
  EncodeTiled encode_;
  mutable std::mutex mutex_;
  std::unordered_map<TensorMapRequest, CUtensorMap, Hash, Equal> maps_;
};

// All maps of a GEMM, in the order of tensor_map_plan; unused ones are zero. Through the cache of this process.
GemmTensorMaps encode_maps(const TensorMapRequest (&requests)[kTensorMaps]);

}  // namespace interlace
