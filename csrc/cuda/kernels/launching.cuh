// Which instance of a kernel a launch needs: by element type and by a bound on the number of ranks.
#pragma once

#include "core/call.h"
#include "core/gemm_schedule.h"
#include "core/signal.h"
#include "cuda/kernels/element.cuh"

namespace interlace {

// Kernels::kernel<T, kBound>: the instance for at most kBound ranks. A bound above the number of ranks costs a few skipped
// instructions, an instance for every number a longer build.
template <typename Kernels, typename T> typename Kernels::Kernel instance_for(int world_size) {
  static_assert(kMaxRanks == 8);
  if (world_size <= 2) return Kernels::template kernel<T, 2>;
  if (world_size <= 4) return Kernels::template kernel<T, 4>;
  return Kernels::template kernel<T, 8>;
}

// For ops that sum; null when there is none for the dtype.
template <typename Kernels> typename Kernels::Kernel summing_instance(Dtype dtype, int world_size) {
  switch (dtype) {
    case Dtype::kFloat32: return instance_for<Kernels, float>(world_size);
    case Dtype::kBFloat16: return instance_for<Kernels, BFloat16>(world_size);
    case Dtype::kFloat16: return instance_for<Kernels, Float16>(world_size);
    default: return nullptr;
  }
}

// Of a kernel over rows, Kernels::kernel<T, kBound, kAligned>: large, so two ranks take that for four, and rows of any
// alignment have one instance for all worlds.
template <typename Kernels> struct AlignedRows {
  using Kernel = typename Kernels::Kernel;
  template <typename T, int kBound>
  static constexpr Kernel kernel = Kernels::template kernel<T, (kBound < 4 ? 4 : kBound), true>;
};
template <typename Kernels> struct AnyRows {
  using Kernel = typename Kernels::Kernel;
  template <typename T, int> static constexpr Kernel kernel = Kernels::template kernel<T, kMaxRanks, false>;
};
template <typename Kernels> typename Kernels::Kernel row_instance(Dtype dtype, int world_size, bool aligned) {
  if (aligned) return summing_instance<AlignedRows<Kernels>>(dtype, world_size);
  return summing_instance<AnyRows<Kernels>>(dtype, world_size);
}

// For ops that copy: as elements of 2 bytes, or of 1, which few tensors need. Alignment decides how wide the accesses
// are, not this.
inline int64_t copies_per_element(int64_t element_bytes) {
  return element_bytes % 2 == 0 ? element_bytes / 2 : element_bytes;
}
template <typename Kernels> typename Kernels::Kernel copying_instance(int64_t element_bytes, int world_size) {
  if (element_bytes % 2 == 0) return instance_for<Kernels, uint16_t>(world_size);
  return instance_for<Kernels, uint8_t>(kMaxRanks);
}

// Shards of elements as shards of what copying_instance copies.
inline Shards copied(Shards shards, int64_t element_bytes) {
  for (int64_t& begin : shards.begins) begin *= copies_per_element(element_bytes);
  return shards;
}

}  // namespace interlace
