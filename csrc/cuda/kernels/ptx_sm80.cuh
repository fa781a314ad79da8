// Instructions of sm_80 and later, one per function, named after the instruction. csrc/emu/ptx_sm80.h has the same
// functions.
#pragma once

#include "cuda/kernels/ptx.cuh"

namespace interlace::ptx {

// Copies into shared memory that go on while the thread does. 16 bytes, both addresses aligned to 16; of the source only
// `valid` bytes (0..16) are read, the rest of the destination becomes zero. What a thread's copies stored is visible to
// that thread after cp_async_wait_group, to others after a barrier that follows it.
INTERLACE_DEVICE void cp_async_16(uint32_t shared, const void* global, uint32_t valid = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid)
               : "memory");
}
INTERLACE_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most kGroups of this thread's latest groups are still on the way.
template <int kGroups> INTERLACE_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Four matrices of 8 rows x 16 bytes; lane l gives the address of row l % 8 of matrix l / 8. Lane l gets elements 2*(l%4)
// and the next of row l/4 of each matrix; _trans: of column l/4.
INTERLACE_DEVICE void ldmatrix_x4(uint32_t shared, uint32_t (&fragment)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}
INTERLACE_DEVICE void ldmatrix_x4_trans(uint32_t shared, uint32_t (&fragment)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

// d[16, 8] += a[16, 16] * b[16, 8], fp32 sums. Lane l, g = l / 4, t = l % 4, two neighbouring elements per register:
//   a: rows g, g+8 (columns 2t), then rows g, g+8 (columns 2t+8);  b: rows 2t, then 2t+8, of column g;
//   d: row g columns 2t, 2t+1, then row g+8.
INTERLACE_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INTERLACE_DEVICE void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace interlace::ptx
