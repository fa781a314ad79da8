// Instructions of sm_90a, one per function, named after the instruction. csrc/emu/ptx_sm90.h has the same functions.
//
// Two proxies: ordinary loads and stores (generic) and the copy engine with the tensor cores (asynchronous). Across
// proxies neither barriers nor acquires are enough: fence_proxy_async stands between.
#pragma once

#include <cuda.h>

#include "cuda/kernels/ptx.cuh"

namespace interlace::ptx {

// A tiled 2-d matrix in global memory, encoded by the host. A kernel parameter (INTERLACE_PARAMETER).
using TensorMap = CUtensorMap;

// One thread of the warp, the same for all of them. The warp must have converged.
INTERLACE_DEVICE bool elect_sync() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected)::"memory");
  return elected != 0;
}

// Registers per thread, by all threads of a warpgroup: a multiple of 8 in 24..256. inc waits until others gave some back.
template <int kRegisters> INTERLACE_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> INTERLACE_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barriers in shared memory (8 bytes each), which count threads and bytes. A phase is complete when `threads` have
// arrived and all expected bytes have come. arrive: release; a wait that succeeds: acquire (of the block).
INTERLACE_DEVICE void mbarrier_init(uint32_t barrier, uint32_t threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// After the inits and before the block barrier that shows them to the others: the copy engine sees them too.
INTERLACE_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
INTERLACE_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INTERLACE_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// True when the phase of this parity is complete; the first phase has parity 0, so that waiting for parity 1 passes on
// a new barrier. May wait a while, for a time that the hardware chooses.
INTERLACE_DEVICE bool mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}
// Waits only for threads of the own block and their copies, none of which waits for a peer without a deadline.
INTERLACE_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// What this thread did, or acquired, through the generic proxy is ordered before the asynchronous accesses that it (or
// whoever synchronizes with it) starts later.
INTERLACE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
INTERLACE_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
INTERLACE_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

INTERLACE_DEVICE void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// One thread: load the map's box whose first element is (column, row); what lies outside of the matrix becomes zero. The
// bytes of the whole box are counted at `barrier`.
INTERLACE_DEVICE void cp_async_bulk_tensor_2d(uint32_t shared, const TensorMap& map, int32_t column,
                                              int32_t row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(shared),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// Warpgroup matrix products: d[64, N] (+)= a[64, K] * b[N, K]^T, both by descriptor in shared memory, fp32 sums. All 128
// threads of a warpgroup, in this order: wgmma_fence, products, wgmma_commit_group, wgmma_wait_group. Between the first
// product and the wait, nobody touches `d` or overwrites the operands. accumulate = 0: d is overwritten.
// Thread t of the warpgroup holds rows 16*(t/32) + (t%32)/4 and 8 below; d[4*i .. 4*i+3] are columns 8*i + 2*(t%4), the
// next, and the same of the row 8 below.
INTERLACE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INTERLACE_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most kGroups of the latest groups are still running.
template <int kGroups> INTERLACE_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// The compiler must neither move reads or writes of these registers across, nor keep copies of them: stands after the
// fence and after the wait.
template <int kCount> INTERLACE_DEVICE void wgmma_registers(float (&d)[kCount]) {
  INTERLACE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define INTERLACE_R8(d, i)                                                                    \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define INTERLACE_R64(d, i)                                                                     \
  INTERLACE_R8(d, i), INTERLACE_R8(d, i + 8), INTERLACE_R8(d, i + 16), INTERLACE_R8(d, i + 24), \
      INTERLACE_R8(d, i + 32), INTERLACE_R8(d, i + 40), INTERLACE_R8(d, i + 48), INTERLACE_R8(d, i + 56)
#define INTERLACE_D64                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define INTERLACE_D128                                                                           \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// kTransposeB = 1: b is stored with N contiguous.
template <int kTransposeB>
INTERLACE_DEVICE void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" INTERLACE_D64
      "}, %64, %65, p, 1, 1, 0, %67;\n}"
      : INTERLACE_R64(d, 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}
template <int kTransposeB>
INTERLACE_DEVICE void wgmma_m64n256k16_bf16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" INTERLACE_D128
      "}, %128, %129, p, 1, 1, 0, %131;\n}"
      : INTERLACE_R64(d, 0), INTERLACE_R64(d, 64)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}
template <int kTransposeB>
INTERLACE_DEVICE void wgmma_m64n128k16_f16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" INTERLACE_D64 "}, %64, %65, p, 1, 1, 0, %67;\n}"
      : INTERLACE_R64(d, 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}
template <int kTransposeB>
INTERLACE_DEVICE void wgmma_m64n256k16_f16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" INTERLACE_D128
      "}, %128, %129, p, 1, 1, 0, %131;\n}"
      : INTERLACE_R64(d, 0), INTERLACE_R64(d, 64)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeB));
}
// e4m3: K contiguous only.
INTERLACE_DEVICE void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" INTERLACE_D64 "}, %64, %65, p, 1, 1;\n}"
      : INTERLACE_R64(d, 0)
      : "l"(a), "l"(b), "r"(accumulate));
}
#undef INTERLACE_R8
#undef INTERLACE_R64
#undef INTERLACE_D64
#undef INTERLACE_D128

// Two fp32 numbers to e4m3, `low` in the lower byte, beyond the range to the largest.
INTERLACE_DEVICE uint16_t cvt_rn_satfinite_e4m3x2_f32(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

// A multicast address stands for the same place on every GPU of the group: a load sums what lies there (in fp32), a
// store reaches all. 16 bytes. Like plain accesses of all the places: the signals around them order them.
INTERLACE_DEVICE Vector16 multimem_ld_reduce_add_f32(const void* multicast) {
  Vector16 sum;
  asm volatile("multimem.ld_reduce.weak.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3])
               : "l"(multicast)
               : "memory");
  return sum;
}
INTERLACE_DEVICE Vector16 multimem_ld_reduce_add_bf16x2(const void* multicast) {
  Vector16 sum;
  asm volatile("multimem.ld_reduce.weak.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3])
               : "l"(multicast)
               : "memory");
  return sum;
}
INTERLACE_DEVICE Vector16 multimem_ld_reduce_add_f16x2(const void* multicast) {
  Vector16 sum;
  asm volatile("multimem.ld_reduce.weak.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(sum.words[0]), "=r"(sum.words[1]), "=r"(sum.words[2]), "=r"(sum.words[3])
               : "l"(multicast)
               : "memory");
  return sum;
}
INTERLACE_DEVICE void multimem_st_v4(void* multicast, const Vector16& value) {
  asm volatile("multimem.st.weak.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(multicast), "r"(value.words[0]),
               "r"(value.words[1]), "r"(value.words[2]), "r"(value.words[3])
               : "memory");
}

// Orders accesses to the same memory through different addresses, such as a multicast and a plain one.
INTERLACE_DEVICE void fence_proxy_alias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

}  // namespace interlace::ptx
