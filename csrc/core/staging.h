// Where the small-message ops put what the ranks show each other, and how much staging that takes. Everything is
// counted in packs of 16 bytes, so that staging is aligned whatever the tensors are.
#pragma once

#include <cstdint>

#include "core/gemm_schedule.h"
#include "core/qualifiers.h"
#include "core/schedule.h"

namespace interlace {

constexpr int64_t kStagingPackBytes = 16;

INTERLACE_HD constexpr int64_t packs_of(int64_t elements, int64_t element_bytes) {
  return ceil_div(elements * element_bytes, kStagingPackBytes);
}

INTERLACE_HD constexpr int64_t largest_of(const Shards& shards) {
  int64_t most = 0;
  for (int rank = 0; rank < shards.world_size; ++rank) {
    most = shards.rows(rank) > most ? shards.rows(rank) : most;
  }
  return most;
}

// A row, or a whole array, of `elements` is cut into one equal share of packs per rank; the last ones may be empty.
INTERLACE_HD constexpr int64_t share_of(int64_t elements, int64_t element_bytes, int world_size) {
  return ceil_div(packs_of(elements, element_bytes), world_size);
}

// Bytes of one half for each op. one-shot: every rank shows all its rows, each padded to packs.
INTERLACE_HD constexpr int64_t one_shot_half_bytes(int64_t rows, int64_t columns, int64_t element_bytes) {
  return rows * packs_of(columns, element_bytes) * kStagingPackBytes;
}

// two-shot: one slot per rank for the owner's share of every row; the gathered rows take as much in the other half.
INTERLACE_HD constexpr int64_t two_shot_half_bytes(int64_t rows, int64_t columns, int64_t element_bytes,
                                                   int world_size) {
  return world_size * rows * share_of(columns, element_bytes, world_size) * kStagingPackBytes;
}

// reduce_scatter, all_gather, all_to_all: one slot per rank, each as large as the largest piece.
INTERLACE_HD constexpr int64_t slots_half_bytes(int64_t largest_rows, int64_t columns, int64_t element_bytes,
                                                int world_size) {
  return world_size * largest_rows * packs_of(columns, element_bytes) * kStagingPackBytes;
}

static_assert(share_of(9, 2, 2) == 1 && share_of(17, 2, 2) == 2 && share_of(0, 2, 8) == 0);
static_assert(two_shot_half_bytes(1, 9, 2, 2) == 32 && slots_half_bytes(1, 9, 2, 2) == 64);

}  // namespace interlace
