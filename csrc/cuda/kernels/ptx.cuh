// Device instructions, one per function, named after the instruction. csrc/emu/ptx.h has the same functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#define INTERLACE_DEVICE __device__ __forceinline__
// One block per multiprocessor is enough: blocks that wait for each other must all be resident.
#define INTERLACE_KERNEL(max_threads) __global__ void __launch_bounds__(max_threads, 1)
#define INTERLACE_SHARED __shared__
// The dynamic shared memory of the block, aligned for swizzled tiles; only what lies in it has a shared_address.
#define INTERLACE_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) char name[]
#define INTERLACE_PARAMETER const __grid_constant__
#define INTERLACE_UNROLL _Pragma("unroll")
#define INTERLACE_UNROLL_BY_2 _Pragma("unroll 2")
#define INTERLACE_ROLLED _Pragma("unroll 1")  // where copies of a loop body would not fit into the registers

namespace interlace::ptx {

// Special registers.
INTERLACE_DEVICE uint32_t tid_x() { return threadIdx.x; }
INTERLACE_DEVICE uint32_t ntid_x() { return blockDim.x; }
INTERLACE_DEVICE uint32_t ctaid_x() { return blockIdx.x; }
INTERLACE_DEVICE uint32_t nctaid_x() { return gridDim.x; }
INTERLACE_DEVICE uint32_t ctaid_y() { return blockIdx.y; }

// Block and warp. Intrinsics where there are some: the compiler then knows that the threads must converge.
INTERLACE_DEVICE void barrier_sync() { __syncthreads(); }
INTERLACE_DEVICE bool barrier_red_and(bool value) { return __syncthreads_and(value) != 0; }
INTERLACE_DEVICE void bar_sync(uint32_t number, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
INTERLACE_DEVICE void bar_arrive(uint32_t number, uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
INTERLACE_DEVICE void warp_sync() { __syncwarp(); }
INTERLACE_DEVICE uint32_t shfl_idx_u32(uint32_t value, uint32_t lane) {
  return __shfl_sync(0xffffffffu, value, static_cast<int>(lane));
}
INTERLACE_DEVICE float shfl_bfly_f32(float value, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, value, static_cast<int>(mask));
}

// Signals. acquire: what the writer did before its release is visible to the reader from here on, and through a
// block barrier to its whole block. .sys: also when the writer is another GPU or the host.
INTERLACE_DEVICE uint32_t ld_acquire_sys_u32(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
INTERLACE_DEVICE uint32_t ld_relaxed_sys_u32(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
INTERLACE_DEVICE void st_release_sys_u32(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
INTERLACE_DEVICE void st_relaxed_sys_u32(uint32_t* address, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
INTERLACE_DEVICE uint32_t atom_add_acq_rel_gpu_u32(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}
INTERLACE_DEVICE uint32_t atom_add_relaxed_gpu_u32(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}
INTERLACE_DEVICE void red_add_release_sys_u32(uint32_t* address, uint32_t value) {
  asm volatile("red.add.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
INTERLACE_DEVICE void red_add_release_gpu_u32(uint32_t* address, uint32_t value) {
  asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
INTERLACE_DEVICE uint32_t ld_acquire_gpu_u32(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
INTERLACE_DEVICE void st_release_gpu_u32(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
INTERLACE_DEVICE uint32_t atom_exch_relaxed_gpu_u32(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.exch.relaxed.gpu.global.b32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// Copies, 16 bytes at 16-byte aligned addresses. nc: the kernel's inputs only, never what another block or GPU may store
// while the kernel runs. cs: read or written once, leave the caches to others.
struct alignas(16) Vector16 {
  uint32_t words[4];
};
INTERLACE_DEVICE Vector16 ld_nc_v4_b32(const void* address) {
  Vector16 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
               : "l"(address));
  return value;
}
INTERLACE_DEVICE Vector16 ld_v4_b32(const void* address) {
  Vector16 value;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.words[0]), "=r"(value.words[1]), "=r"(value.words[2]), "=r"(value.words[3])
               : "l"(address)
               : "memory");
  return value;
}
INTERLACE_DEVICE void st_v4_b32(void* address, const Vector16& value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.words[0]),
               "r"(value.words[1]), "r"(value.words[2]), "r"(value.words[3])
               : "memory");
}
INTERLACE_DEVICE void st_cs_v4_b32(void* address, const Vector16& value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.words[0]),
               "r"(value.words[1]), "r"(value.words[2]), "r"(value.words[3])
               : "memory");
}

// Shared memory by its own 32-bit addresses, as the asynchronous instructions take them.
INTERLACE_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Time.
INTERLACE_DEVICE uint64_t globaltimer() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}
INTERLACE_DEVICE void nanosleep_u32(uint32_t nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
}

// Numbers.
INTERLACE_DEVICE float mov_b32_f32(uint32_t bits) {
  float value;
  asm("mov.b32 %0, %1;" : "=f"(value) : "r"(bits));
  return value;
}
INTERLACE_DEVICE uint32_t mov_f32_b32(float value) {
  uint32_t bits;
  asm("mov.b32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}
INTERLACE_DEVICE float fma_rn_f32(float a, float b, float c) {
  float value;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(a), "f"(b), "f"(c));
  return value;
}
INTERLACE_DEVICE float sqrt_rn_f32(float a) {
  float value;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(value) : "f"(a));
  return value;
}
INTERLACE_DEVICE uint16_t cvt_rn_bf16_f32(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
// Two in one register, `low` in the lower half.
INTERLACE_DEVICE uint32_t cvt_rn_bf16x2_f32(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
INTERLACE_DEVICE uint32_t cvt_rn_f16x2_f32(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
INTERLACE_DEVICE uint16_t cvt_rn_f16_f32(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
INTERLACE_DEVICE float cvt_f32_f16(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace interlace::ptx
