// The functions of cuda/kernels/ptx_sm90.cuh on emulated threads. Same names, same meaning.
#pragma once

#include <cstdint>

#include "emu/ptx.h"

namespace interlace::ptx {

using TensorMap = emu::TensorMap;

inline bool elect_sync() {
  emu::current_block->sync_warp(emu::Ordering::kNone);
  return emu::current_block->lane() == 0;
}

template <int kRegisters> inline void setmaxnreg_inc() { emu::current_block->take_registers(kRegisters); }
template <int kRegisters> inline void setmaxnreg_dec() { emu::current_block->give_registers(kRegisters); }

inline void mbarrier_init(uint32_t barrier, uint32_t threads) {
  emu::current_block->init_barrier(barrier, threads);
}
inline void fence_mbarrier_init() { emu::current_block->show_barriers(); }
inline void mbarrier_arrive(uint32_t barrier) { emu::current_block->arrive_at_barrier(barrier, 0); }
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  emu::current_block->arrive_at_barrier(barrier, bytes);
}
inline bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  return emu::current_block->wait_for_barrier(barrier, parity, emu::Waiting::kMbarrierTry);
}
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  emu::current_block->wait_for_barrier(barrier, parity, emu::Waiting::kMbarrier);
}

// The emulator follows the fence for global memory; for shared memory it does not tell the proxies apart.
inline void fence_proxy_async() { emu::current_block->fence_proxy(); }
inline void fence_proxy_async_global() { emu::current_block->fence_proxy(); }
inline void fence_proxy_async_shared() {}

inline void prefetch_tensormap(const TensorMap&) {}
inline void cp_async_bulk_tensor_2d(uint32_t shared, const TensorMap& map, int32_t column, int32_t row,
                                    uint32_t barrier) {
  emu::current_block->copy_box(shared, map, column, row, barrier);
}

inline void wgmma_fence() { emu::current_block->tensor_cores().fence(emu::current_block->thread()); }
inline void wgmma_commit_group() { emu::current_block->tensor_cores().commit(emu::current_block->thread()); }
template <int kGroups> inline void wgmma_wait_group() { emu::current_block->finish_products(kGroups); }
template <int kCount> inline void wgmma_registers(float (&)[kCount]) {}

inline void wgmma(float* d, uint32_t columns, uint64_t a, uint64_t b, emu::Element element, bool transposed,
                  int accumulate) {
  emu::Block& block = *emu::current_block;
  block.tensor_cores().issue(block.thread(), block.threads(), d,
                             {a, b, columns, 0, element, transposed, accumulate != 0});
}
template <int kTransposeB>
inline void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  wgmma(d, 128, a, b, emu::Element::kBf16, kTransposeB != 0, accumulate);
}
template <int kTransposeB>
inline void wgmma_m64n256k16_bf16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  wgmma(d, 256, a, b, emu::Element::kBf16, kTransposeB != 0, accumulate);
}
template <int kTransposeB>
inline void wgmma_m64n128k16_f16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  wgmma(d, 128, a, b, emu::Element::kF16, kTransposeB != 0, accumulate);
}
template <int kTransposeB>
inline void wgmma_m64n256k16_f16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  wgmma(d, 256, a, b, emu::Element::kF16, kTransposeB != 0, accumulate);
}
inline void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  wgmma(d, 128, a, b, emu::Element::kE4m3, false, accumulate);
}

inline uint16_t cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  return static_cast<uint16_t>(emu::e4m3_from_float(low) | emu::e4m3_from_float(high) << 8);
}

// A loop over the peers in place of the switch. Plain accesses, so that every race shows.
template <typename Add> inline Vector16 multimem_ld_reduce(const void* multicast, Add add) {
  check_vector(multicast, "multimem_ld_reduce");
  const emu::World::Multicast& memory = emu::current_block->world().multicast_of(multicast, 16);
  const auto offset = static_cast<const char*>(multicast) - memory.start;
  float sums[8] = {};
  for (const char* peer : memory.peers) {
    const Vector16 value = ld_v4_b32(peer + offset);
    for (int i = 0; i < 8; ++i) add(value, i, sums[i]);
  }
  Vector16 sum;
  add.pack(sums, sum);
  return sum;
}
struct AddF32 {
  void operator()(const Vector16& value, int i, float& sum) const {
    if (i < 4) sum += std::bit_cast<float>(value.words[i]);
  }
  void pack(const float (&sums)[8], Vector16& sum) const {
    for (int i = 0; i < 4; ++i) sum.words[i] = std::bit_cast<uint32_t>(sums[i]);
  }
};
struct AddBf16 {
  void operator()(const Vector16& value, int i, float& sum) const {
    sum += std::bit_cast<float>(value.words[i / 2] >> (i % 2 * 16) << 16);
  }
  void pack(const float (&sums)[8], Vector16& sum) const {
    for (int i = 0; i < 4; ++i) sum.words[i] = cvt_rn_bf16x2_f32(sums[2 * i], sums[2 * i + 1]);
  }
};
struct AddF16 {
  void operator()(const Vector16& value, int i, float& sum) const {
    sum += cvt_f32_f16(static_cast<uint16_t>(value.words[i / 2] >> (i % 2 * 16)));
  }
  void pack(const float (&sums)[8], Vector16& sum) const {
    for (int i = 0; i < 4; ++i) sum.words[i] = cvt_rn_f16x2_f32(sums[2 * i], sums[2 * i + 1]);
  }
};
inline Vector16 multimem_ld_reduce_add_f32(const void* multicast) {
  return multimem_ld_reduce(multicast, AddF32());
}
inline Vector16 multimem_ld_reduce_add_bf16x2(const void* multicast) {
  return multimem_ld_reduce(multicast, AddBf16());
}
inline Vector16 multimem_ld_reduce_add_f16x2(const void* multicast) {
  return multimem_ld_reduce(multicast, AddF16());
}
inline void multimem_st_v4(void* multicast, const Vector16& value) {
  check_vector(multicast, "multimem_st_v4");
  const emu::World::Multicast& memory = emu::current_block->world().multicast_of(multicast, 16);
  const auto offset = static_cast<const char*>(multicast) - memory.start;
  for (char* peer : memory.peers) st_v4_b32(peer + offset, value);
}

// Both addresses are the same memory here, and accesses to it are ordered like any others.
inline void fence_proxy_alias() {}

}  // namespace interlace::ptx
