// The functions of cuda/kernels/ptx_sm80.cuh on emulated threads. Same names, same meaning.
#pragma once

#include <cstdint>

#include "emu/ptx.h"

namespace interlace::ptx {

inline void cp_async_16(uint32_t shared, const void* global, uint32_t valid = 16) {
  emu::Block& block = *emu::current_block;
  block.async_copies().issue(block.thread(), shared, global, valid);
}
inline void cp_async_commit_group() {
  emu::current_block->async_copies().commit(emu::current_block->thread());
}
template <int kGroups> inline void cp_async_wait_group() {
  emu::current_block->async_copies().wait(emu::current_block->thread(), kGroups);
}

inline void ldmatrix_x4(uint32_t shared, uint32_t (&fragment)[4]) {
  emu::current_block->load_matrix(shared, fragment, false);
}
inline void ldmatrix_x4_trans(uint32_t shared, uint32_t (&fragment)[4]) {
  emu::current_block->load_matrix(shared, fragment, true);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emu::current_block->multiply(d, a, b0, b1, emu::Element::kBf16);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emu::current_block->multiply(d, a, b0, b1, emu::Element::kF16);
}

}  // namespace interlace::ptx
