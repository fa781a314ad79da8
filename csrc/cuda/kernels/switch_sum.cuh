// Sums and broadcasts by the switch between GPUs (NVLS). Only instances for sm_90 and later use what is here.
#pragma once

#include "cuda/kernels/device_sm90.cuh"
#include "cuda/kernels/element.cuh"
#include "cuda/kernels/gemm_hooks.h"

#include <type_traits>

namespace interlace {

template <class T> INTERLACE_DEVICE ptx::Vector16 load_by_switch(const char* multicast) {
  if constexpr (std::is_same_v<T, float>)
    return ptx::multimem_ld_reduce_add_f32(multicast);
  else if constexpr (std::is_same_v<T, BFloat16>)
    return ptx::multimem_ld_reduce_add_bf16x2(multicast);
  else
    return ptx::multimem_ld_reduce_add_f16x2(multicast);
}

// The 16 bytes at this place of all ranks, summed in fp32 in the order of the switch, as floats.
template <class T> INTERLACE_DEVICE void sum_16_bytes_by_switch(const char* multicast, float* values) {
  const ptx::Vector16 vector = load_by_switch<T>(multicast);
  Pack<T> pack;
  *reinterpret_cast<ptx::Vector16*>(&pack) = vector;
  INTERLACE_UNROLL
  for (int i = 0; i < Pack<T>::kElements; ++i) values[i] = to_float(pack.elements[i]);
}

// One pack of columns.
template <class Out>
INTERLACE_DEVICE void sum_by_switch(const char* multicast, bool float32, float (&values)[kStoreColumns]) {
  if (!float32) return sum_16_bytes_by_switch<Out>(multicast, values);
  INTERLACE_UNROLL
  for (int half = 0; half < 2; ++half) {
    sum_16_bytes_by_switch<float>(multicast + half * kPackBytes, values + half * Pack<float>::kElements);
  }
}

// At this place of all ranks.
template <class Out> INTERLACE_DEVICE void store_by_switch(Pack<Out>* multicast, const Pack<Out>& pack) {
  ptx::multimem_st_v4(multicast, *reinterpret_cast<const ptx::Vector16*>(&pack));
}

// After an acquire, when one of the two sides uses the switch: a multicast address is another way to the same memory,
// and only this fence orders accesses that come on different ways.
template <bool kSwitch> INTERLACE_DEVICE void acquire_through_switch(bool by_switch) {
  if constexpr (kSwitch) {
    if (by_switch) ptx::fence_proxy_alias();
  }
}

}  // namespace interlace
