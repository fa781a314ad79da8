// From accumulators to packs: the tensor cores leave two neighbouring columns of a row with a thread, the hooks take
// eight. wgmma and mma.sync leave them alike, so both mainloops end here.
#pragma once

#include "cuda/kernels/device.cuh"
#include "cuda/kernels/gemm_hooks.h"

namespace interlace {

constexpr int kChunkColumns = 64;  // columns that a warp transposes at a time: 128 bytes of a 2-byte element
constexpr int kChunkRows = 16;
constexpr int kChunkFloats = kChunkRows * kChunkColumns;
constexpr int kChunkAccumulators = kChunkFloats / 32;  // of a thread

struct alignas(8) FloatPair {
  float values[2];
};
struct alignas(16) FloatQuad {
  float values[4];
};

// Where the 4 floats `half` of pack `pack` of row `row` lie in a chunk of 16 x 64. Neither the 8-byte stores of
// accumulators (4 rows x 4 threads at a time) nor the 16-byte loads of packs (8 packs of a row) meet in a bank.
INTERLACE_DEVICE int chunk_place(int row, int pack, int half) {
  return row * kChunkColumns + (half * 8 + (pack ^ (half * 4) ^ (row & 7))) * 4;
}

// A warp hands 16 rows and 64 columns of the tile to the hooks, from (first_row, first_column) on. Lane l holds, for
// every 8 columns, columns 2 * (l % 4) and the next of row l / 4 and then of row l / 4 + 8.
template <class Hooks>
INTERLACE_DEVICE void store_chunk(const float* accumulators, const TileWork& work, int first_row,
                                  int first_column, Hooks& hooks, float* chunk) {
  const int lane = static_cast<int>(ptx::tid_x() % 32);
  INTERLACE_UNROLL
  for (int pack = 0; pack < kChunkColumns / kStoreColumns; ++pack) {
    const float* const four = accumulators + pack * 4;
    INTERLACE_UNROLL
    for (int low = 0; low < 2; ++low) {
      float* const place = &chunk[chunk_place(lane / 4 + low * 8, pack, lane % 4 / 2) + lane % 2 * 2];
      const FloatPair pair{{four[2 * low], four[2 * low + 1]}};
      *reinterpret_cast<FloatPair*>(place) = pair;
    }
  }
  ptx::warp_sync();  // the pairs of all lanes are there
  const int pack = lane % 8;
  const int column = first_column + pack * kStoreColumns;
  const int valid = work.columns - column < kStoreColumns ? work.columns - column : kStoreColumns;
  INTERLACE_UNROLL_BY_2  // two packs in flight; all four of every chunk would be tens of KiB of instructions
      for (int quarter = 0; quarter < 4; ++quarter) {
    const int row = quarter * 4 + lane / 8;
    if (first_row + row >= work.rows || valid <= 0) continue;
    float v[kStoreColumns];
    INTERLACE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const FloatQuad quad = *reinterpret_cast<const FloatQuad*>(&chunk[chunk_place(row, pack, half)]);
      INTERLACE_UNROLL
      for (int i = 0; i < 4; ++i) v[half * 4 + i] = quad.values[i];
    }
    hooks.store(work, first_row + row, column, v, valid);
  }
  ptx::warp_sync();  // the chunk is read: the next may overwrite it
}

}  // namespace interlace
