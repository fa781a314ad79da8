// all_gather_gemm, below the tensors: the ranks' shards are multiplied where they lie.
#pragma once

#include <vector>

#include "cpu/product.h"
#include "runtime/group.h"

namespace interlace {

struct GatherOutput {
  Product* product = nullptr;
  char* out = nullptr;            // [sum of rows][n], dense
  const float* bias = nullptr;    // padded to whole panels
};

struct GatherProblem {
  explicit GatherProblem(Group& of) : group(of) {}

  Group& group;
  Dtype dtype = Dtype::kFloat32;
  Dtype compute = Dtype::kFloat32;
  const char* x = nullptr;        // own shard as it came
  int64_t x_stride = 0;           // bytes
  int64_t depth = 0;
  std::vector<int64_t> rows;      // of every rank
  std::vector<GatherOutput> outs; // one per weight
  char* gathered = nullptr;       // [sum of rows][depth] of dtype, dense, or null
};

// Bytes of one half that a piece of `rows` rows of every shard needs.
int64_t gather_bytes(const GatherProblem& problem, int64_t rows);

// One epoch handles rows [first, first + count) of every shard: stage and publish the own ones, then multiply.
void stage_piece(const GatherProblem& problem, int64_t own_rows, int64_t first, int64_t count);
void multiply_piece(const GatherProblem& problem, int64_t first, int64_t count);

}  // namespace interlace
