// From torch tensors to the plain structs the kernels take, and the frame every op runs in.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/call.h"
#include "core/heuristics.h"
#include "core/schedule.h"
#include "cpu/product.h"
#include "runtime/group.h"

namespace interlace {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensors = std::vector<std::optional<Tensor>>;
using Sizes = std::vector<int64_t>;

Dtype dtype_of(const Tensor& tensor, const char* op);
Dtype summable_dtype(const Tensor& tensor, const char* op);  // int32 and int64 too
torch::headeronly::ScalarType scalar_type(Dtype dtype);
Sizes shape_of(const Tensor& tensor);
int64_t wrap_dim(int64_t dim, int64_t ndim, const char* op, const char* what);
Tensor empty_like_shape(const Tensor& like, const Sizes& shape);
Tensor move_dim_to_front(const Tensor& tensor, int64_t dim);  // contiguous
Tensor move_front_to_dim(const Tensor& tensor, int64_t dim);  // contiguous

// x as rows: leading dims folded, element stride 1. Copies when the strides do not allow it.
struct RowsView {
  Tensor keep;
  const char* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  int64_t rows = 0;
  int64_t depth = 0;
  int64_t stride = 0;  // bytes
};
RowsView rows_of(const Tensor& x, const char* op);

// packed_rows >= 0: `weight` holds panels and has this many rows. Tensors that had to be copied go into `keep`.
WeightView weight_of(const Tensor& weight, int64_t packed_rows, int64_t depth, Dtype dtype, const char* op,
                     Tensors& keep);
// x where the engine can read it: in place, else a padded copy in `lease`.
Rows staged(const RowsView& x, Dtype compute, Scratch& lease);
void check_bias(const std::optional<Tensor>& bias, int64_t n, Dtype dtype, const char* op);
// Bias as fp32 in `lease`, padded to whole panels; null for none.
const float* bias_of(const std::optional<Tensor>& bias, int64_t n, Dtype dtype, Scratch& lease);

Call describe(Op op, const Tensor& x, int64_t dim, int64_t columns, size_t weights, uint32_t options,
              Dtype dtype);

// A group's lock and error handling round one call of an op.
template <class Body> auto in_group(Group& group, Body&& body) {
  const std::lock_guard lock(group.mutex());
  group.start_op();
  try {
    return body();
  } catch (const std::exception& error) {
    group.fail_op(error);
    throw;
  }
}

void note_path(Op op, Algorithm algorithm, const char* reason);

// Call `interlace::<name>` through the dispatcher: the way to the ops that Python implements.
template <class Result, class... Arguments>
Result call_python(const char* name, const Arguments&... arguments) {
  StableIValue stack[] = {torch::stable::detail::from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Result>(stack[0]);
}

// Run `work(i)` for units [0, count): one by one, or by torch's threads in batches. `ready(i)` is called by this
// thread before unit i may start, `done(n)` after units [0, n) are complete; `chunk` units at a time at least.
template <class Ready, class Work, class Done>
void run_units(int64_t count, int64_t chunk, Ready&& ready, Work&& work, Done&& done) {
  const int64_t threads = torch::stable::get_num_threads();
  if (threads == 1) {
    for (int64_t i = 0; i < count; ++i) {
      ready(i);
      work(i);
      if ((i + 1) % chunk == 0 || i + 1 == count) done(i + 1);
    }
    return;
  }
  const int64_t batch = ceil_div(4 * threads, chunk) * chunk;
  for (int64_t first = 0; first < count; first += batch) {
    const int64_t last = std::min(count, first + batch);
    for (int64_t i = first; i < last; ++i) ready(i);
    torch::stable::parallel_for(first, last, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work(i);
    });
    done(last);
  }
}

}  // namespace interlace
