// What the collectives over rows with a fused norm are given. Host and device read this file.
#pragma once

#include <cstdint>

#include "core/staging.h"

namespace interlace {

// sums = sum over ranks of input + bias + residual, in fp32 and rounded once;
// outs = sums * rsqrt(mean over columns of sums^2 + eps) * norm_weight, in fp32 from the rounded sums and rounded once.
// All tensors are dense rows of one dtype. Tables are of the ranks this launch plays, counted from first_rank.
struct RowArguments {
  const void* inputs[kMaxRanks];  // [rows, columns]
  const void*
      residuals[kMaxRanks];  // like sums, or null: nothing is added; equal on all ranks for an all-reduce
  void* sums[kMaxRanks];  // may be the residual; null: not wanted
  void* outs[kMaxRanks];  // null: no norm
  const void* bias;  // [columns], or null
  const void* norm_weight;  // [columns], or null: 1
  float eps;
  int64_t columns;
  Shards rows;  // reduce-scatter: whose they are; all-reduce: only the total counts
};

// Whether every row that a launch of `ranks_played` touches starts at a multiple of 16 bytes and is a whole number of
// packs: then the fast instance serves. Ranks may differ in it.
inline bool rows_are_aligned(const RowArguments& arguments, int ranks_played, int64_t element_bytes) {
  const auto aligned = [](const void* tensor) {
    return reinterpret_cast<uintptr_t>(tensor) % kStagingPackBytes == 0;
  };
  bool all = arguments.columns * element_bytes % kStagingPackBytes == 0 && aligned(arguments.bias) &&
             aligned(arguments.norm_weight);
  for (int i = 0; i < ranks_played; ++i) {
    all = all && aligned(arguments.inputs[i]) && aligned(arguments.residuals[i]) &&
          aligned(arguments.sums[i]) && aligned(arguments.outs[i]);
  }
  return all;
}

}  // namespace interlace
