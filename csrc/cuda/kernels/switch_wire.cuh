// The wire through the switch that adds and copies (NVLS): for GPUs from sm_90 on, in groups with a multicast address.
#pragma once

#include <type_traits>

#include "cuda/kernels/device_sm90.cuh"
#include "cuda/kernels/wire.cuh"

namespace interlace {

// Instances for GPUs without the instructions are empty; nobody launches them, for there is no multicast address there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kHasSwitch = false;
#else
constexpr bool kHasSwitch = true;
#endif

// The switch sums in fp32, in an order of its own, and rounds; only the owner asks it, so all ranks hold the same bits.
// half(e) of every rank holds what it shows, one slot of `slot` packs per owner.
template <typename T> struct Wire<T, kThroughSwitch> {
  static constexpr int kRanks = kMaxRanks;
  const SymmetricGroup& group;
  const int rank;
  const uint32_t epoch;
  const int64_t slot;

  INTERLACE_DEVICE Words<T>* everywhere(uint32_t in) const {
    return reinterpret_cast<Words<T>*>(group.multicast + sizeof(SegmentControl) +
                                       parity(in) * group.half_bytes);
  }
  INTERLACE_DEVICE static void copy_words(const uint32_t (&from)[4], uint32_t (&to)[4]) {
    INTERLACE_UNROLL
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
  INTERLACE_DEVICE static ptx::Vector16 added_up(const Words<T>* multicast) {
    if constexpr (std::is_same_v<T, float>) return ptx::multimem_ld_reduce_add_f32(multicast);
    if constexpr (std::is_same_v<T, BFloat16>) return ptx::multimem_ld_reduce_add_bf16x2(multicast);
    if constexpr (std::is_same_v<T, Float16>) return ptx::multimem_ld_reduce_add_f16x2(multicast);
  }
  INTERLACE_DEVICE void show(int owner, int64_t place, const Words<T>& pack) const {
    reinterpret_cast<Words<T>*>(half_of(group, rank, epoch))[owner * slot + place] = pack;
  }
  // The multicast address is another way to the same memory: only this orders accesses that come on different ways.
  INTERLACE_DEVICE void acquire() const {
    if constexpr (kHasSwitch) ptx::fence_proxy_alias();
  }
  INTERLACE_DEVICE void sum(int64_t place, Totals<T>& totals) const {
    Words<T> sum{};
    if constexpr (kHasSwitch) copy_words(added_up(everywhere(epoch) + rank * slot + place).words, sum.words);
    unpack(sum, totals);
  }
  INTERLACE_DEVICE void publish(int64_t place, const Words<T>& pack, uint32_t in) const {
    ptx::Vector16 vector;
    copy_words(pack.words, vector.words);
    if constexpr (kHasSwitch) ptx::multimem_st_v4(everywhere(in) + place, vector);
  }
};

}  // namespace interlace
