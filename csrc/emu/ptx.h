// The functions of cuda/kernels/ptx.cuh on emulated threads. Same names, same meaning.
#pragma once

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>

#include "emu/block.h"

#define INTERLACE_DEVICE inline
#define INTERLACE_KERNEL(max_threads) inline void
#define INTERLACE_SHARED static thread_local  // the OS thread is the block
#define INTERLACE_DYNAMIC_SHARED(name) char* const name = ::interlace::emu::current_block->shared().start()
#define INTERLACE_PARAMETER const
#define INTERLACE_UNROLL
#define INTERLACE_UNROLL_BY_2
#define INTERLACE_ROLLED

namespace interlace::ptx {

inline uint32_t tid_x() { return emu::current_block->thread(); }
inline uint32_t ntid_x() { return emu::current_block->threads(); }
inline uint32_t ctaid_x() { return emu::current_block->index(); }
inline uint32_t nctaid_x() { return emu::current_block->blocks(); }
inline uint32_t ctaid_y() { return 0; }  // one rank per launch

inline void barrier_sync() { emu::current_block->sync(true); }
inline bool barrier_red_and(bool value) { return emu::current_block->sync(value); }
inline void bar_sync(uint32_t number, uint32_t threads) { emu::current_block->sync_named(number, threads); }
inline void bar_arrive(uint32_t number, uint32_t threads) {
  emu::current_block->arrive_named(number, threads);
}
inline void warp_sync() { emu::current_block->sync_warp(emu::Ordering::kMemory); }
inline uint32_t shfl_idx_u32(uint32_t value, uint32_t lane) {
  return emu::current_block->shuffle(value, lane);
}
inline float shfl_bfly_f32(float value, uint32_t mask) {
  emu::Block& block = *emu::current_block;
  return std::bit_cast<float>(block.shuffle(std::bit_cast<uint32_t>(value), block.lane() ^ mask));
}

inline uint32_t ld_acquire_sys_u32(const uint32_t* address) {
  const uint32_t value = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  emu::current_block->note_poll(address, value);
  return value;
}
inline uint32_t ld_acquire_gpu_u32(const uint32_t* address) { return ld_acquire_sys_u32(address); }
inline uint32_t ld_relaxed_sys_u32(const uint32_t* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
inline void st_release_sys_u32(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
  emu::current_block->world().note_progress();
}
inline void st_release_gpu_u32(uint32_t* address, uint32_t value) { st_release_sys_u32(address, value); }
inline void st_relaxed_sys_u32(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
  emu::current_block->world().note_progress();
}
inline uint32_t atom_add_acq_rel_gpu_u32(uint32_t* address, uint32_t value) {
  emu::current_block->world().note_progress();
  return __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);
}
inline uint32_t atom_add_relaxed_gpu_u32(uint32_t* address, uint32_t value) {
  emu::current_block->world().note_progress();
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline void red_add_release_sys_u32(uint32_t* address, uint32_t value) {
  __atomic_fetch_add(address, value, __ATOMIC_RELEASE);
  emu::current_block->world().note_progress();
}
inline void red_add_release_gpu_u32(uint32_t* address, uint32_t value) {
  red_add_release_sys_u32(address, value);
}
inline uint32_t atom_exch_relaxed_gpu_u32(uint32_t* address, uint32_t value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}

struct alignas(16) Vector16 {
  uint32_t words[4];
};
// Misaligned accesses trap on the device, not here.
inline void check_vector(const void* address, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emu::misuse("%s: misaligned address %p", what, address);
}
inline Vector16 ld_v4_b32(const void* address) {
  check_vector(address, "ld_v4_b32");
  return *static_cast<const Vector16*>(address);
}
inline Vector16 ld_nc_v4_b32(const void* address) { return ld_v4_b32(address); }
inline void st_v4_b32(void* address, const Vector16& value) {
  check_vector(address, "st_v4_b32");
  *static_cast<Vector16*>(address) = value;
}
inline void st_cs_v4_b32(void* address, const Vector16& value) { st_v4_b32(address, value); }

inline uint32_t shared_address(const void* pointer) {
  return emu::current_block->shared().address_of(pointer);
}

inline uint64_t globaltimer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}
inline void nanosleep_u32(uint32_t) { emu::current_block->pause(emu::Waiting::kSignal); }

inline float mov_b32_f32(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t mov_f32_b32(float value) { return std::bit_cast<uint32_t>(value); }
inline float fma_rn_f32(float a, float b, float c) { return std::fma(a, b, c); }
inline float sqrt_rn_f32(float a) { return std::sqrt(a); }
inline uint16_t cvt_rn_bf16_f32(float value) { return emu::bfloat16_from_float(value); }
inline uint16_t cvt_rn_f16_f32(float value) { return emu::float16_from_float(value); }
inline uint32_t cvt_rn_bf16x2_f32(float low, float high) {
  return cvt_rn_bf16_f32(low) | static_cast<uint32_t>(cvt_rn_bf16_f32(high)) << 16;
}
inline uint32_t cvt_rn_f16x2_f32(float low, float high) {
  return cvt_rn_f16_f32(low) | static_cast<uint32_t>(cvt_rn_f16_f32(high)) << 16;
}
inline float cvt_f32_f16(uint16_t bits) { return emu::float_from_float16(bits); }

}  // namespace interlace::ptx
