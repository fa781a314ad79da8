// What the lanes of one warp do together: shuffles, ldmatrix, mma.
#pragma once

#include <cstdint>

#include "emu/number.h"
#include "emu/rendezvous.h"
#include "emu/shared_memory.h"
#include "emu/tensor_core.h"

namespace interlace::emu {

// Operands of one lane's mma_m16n8k16.
struct Fragments {
  float* d;
  uint32_t a[4], b[2];
};

struct Warp {
  Rendezvous rendezvous;
  uint32_t lanes[2][kWarpThreads];  // values shown, by parity of the meeting
  uint32_t* matrices[kWarpThreads];  // where ldmatrix puts the lane's fragment
  Fragments fragments[kWarpThreads];

  INTERLACE_EMU_HIDDEN uint32_t (&shown()) [kWarpThreads] { return lanes[rendezvous.generation & 1]; }
};

// All lanes have given the address of a row: matrix m's row r comes from lane 8 * m + r.
INTERLACE_EMU_HIDDEN inline void load_matrices(const SharedMemory& shared, const Warp& warp,
                                               const uint32_t (&addresses)[kWarpThreads], bool transposed) {
  for (uint32_t matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[8][8];
    for (uint32_t row = 0; row < 8; ++row) {
      __builtin_memcpy(elements[row], shared.start() + (addresses[matrix * 8 + row] - kFirstAddress), 16);
    }
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
      const uint32_t major = lane / 4, minor = lane % 4 * 2;
      const uint32_t low = transposed ? elements[minor][major] : elements[major][minor];
      const uint32_t high = transposed ? elements[minor + 1][major] : elements[major][minor + 1];
      warp.matrices[lane][matrix] = low | high << 16;
    }
  }
}

// One element of two, the lower or the upper half, as fp32.
INTERLACE_EMU_HIDDEN_INLINE float half_of_register(uint32_t bits, uint32_t upper, Element element,
                                                   const float* float16) {
  const uint32_t half = upper != 0 ? bits >> 16 : bits & 0xffff;
  return element == Element::kF16 ? float16[half] : __builtin_bit_cast(float, half << 16);
}

// All lanes have shown their fragments: d[16, 8] += a[16, 16] * b[16, 8].
INTERLACE_EMU_FAST inline void multiply_fragments(const Warp& warp, Element element, const float* float16) {
  float a[16][16], b[16][8];  // [k][m], [k][n]
  for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
    const Fragments& from = warp.fragments[lane];
    const uint32_t group = lane / 4, pair = lane % 4 * 2;
    for (uint32_t upper = 0; upper < 2; ++upper) {
      for (uint32_t i = 0; i < 4; ++i) {
        a[pair + upper + i / 2 * 8][group + i % 2 * 8] = half_of_register(from.a[i], upper, element, float16);
      }
      for (uint32_t i = 0; i < 2; ++i) {
        b[pair + upper + i * 8][group] = half_of_register(from.b[i], upper, element, float16);
      }
    }
  }
  float sums[16][8] = {};
  for (uint32_t k = 0; k < 16; ++k) {
    for (uint32_t m = 0; m < 16; ++m) {
      for (uint32_t n = 0; n < 8; ++n) sums[m][n] += a[k][m] * b[k][n];
    }
  }
  for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      warp.fragments[lane].d[i] += sums[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    }
  }
}

}  // namespace interlace::emu
