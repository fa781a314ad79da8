// gemm_all_reduce and gemm_reduce_scatter, below the tensors: partial products, exchanged and summed in rank order.
#pragma once

#include "core/schedule.h"
#include "cpu/product.h"
#include "runtime/group.h"

namespace interlace {

struct ReduceProblem {
  ReduceProblem(Group& of, Product& with) : group(of), product(with) {}

  Group& group;
  Product& product;
  const Rows* x = nullptr;  // one per term of the product
  int terms = 1;
  int64_t rows = 0;  // of x; for reduce-scatter those of all owners
  Range owners[kMaxRanks];  // reduce-scatter: the rows of every rank, one after the other
  int64_t first_panel = 0;  // the panels of this piece of the call
  int64_t panels = 0;
  Dtype dtype = Dtype::kFloat32;  // of the output
  Dtype wire = Dtype::kFloat32;  // of partial tiles on their way to the owner
  char* out = nullptr;  // all-reduce: [rows][n]; reduce-scatter: [own rows][n]; dense
  const float* bias = nullptr;  // padded to whole panels
};

// Bytes of one half of the workspace that `rows` rows need, for pieces of a call.
int64_t one_shot_bytes(int64_t rows, int64_t n);
int64_t owner_all_reduce_bytes(int64_t rows, int64_t panels, Dtype dtype, Dtype wire);
int64_t owner_reduce_scatter_bytes(int64_t rows, int64_t panels, Dtype wire);

// Each runs inside one epoch of the group, between begin() and finish().
void one_shot_all_reduce(const ReduceProblem& problem);
void one_shot_reduce_scatter(const ReduceProblem& problem);
void owner_all_reduce(const ReduceProblem& problem);
void owner_reduce_scatter(const ReduceProblem& problem);

}  // namespace interlace
