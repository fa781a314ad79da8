// interlace::gemm_all_reduce, gemm_reduce_scatter and their sums over several products, for CPU tensors.
#include "cpu/brgemm.h"
#include "cpu/collectives.h"
#include "cpu/gemm_reduce.h"
#include "cpu/host.h"

namespace interlace {
namespace {

constexpr uint32_t kHasBias = 1;
constexpr uint32_t kLengthsExchanged = 4;

// One call of either op, after the arguments are understood.
struct ReduceCall {
  Op op;
  Tensors xs;       // rows that belong to one owner are contiguous: the scattered dim is in front
  Tensors weights;
  std::optional<Tensor> bias;
  int64_t packed_rows = -1;
  int64_t dim = 0;
  std::vector<Range> parts = {};  // of the scattered dim, by rank
  int64_t granule = 1;            // rows of x per index of the scattered dim
};

struct Operands {
  std::vector<RowsView> views;
  std::vector<WeightView> weights;
  Tensors keep;
};

Operands operands_of(const ReduceCall& args) {
  const char* op = op_name(args.op);
  check_value(!args.xs.empty() && args.xs.size() == args.weights.size() && args.xs.size() <= 16, op,
              ": expected 1 to 16 products, got ", args.xs.size(), " x and ", args.weights.size(),
              " weights");
  Operands operands;
  for (size_t i = 0; i < args.xs.size(); ++i) {
    operands.views.push_back(rows_of(args.xs[i], op));
    const RowsView& x = operands.views.back();
    operands.weights.push_back(
        weight_of(args.weights[i], args.packed_rows, x.depth, x.dtype, op, operands.keep));
    check_value(x.rows == operands.views[0].rows && x.dtype == operands.views[0].dtype &&
                    operands.weights[i].n == operands.weights[0].n,
                op, ": the products of a sum need equal rows, N and dtype");
  }
  return operands;
}

Call call_of(const ReduceCall& args, const Operands& operands) {
  Call call = describe(args.op, args.xs[0], args.dim, operands.weights[0].n, args.xs.size(),
                       args.bias.has_value() ? kHasBias : 0, operands.views[0].dtype);
  // ranks may hold parts of different depth: K is not compared
  call.shape[call.ndim - 1] = kAnySize;
  return call;
}

// Partial tiles of bf16 products travel in bf16 and are summed in fp32; the owner's own part is never rounded. The
// error against fp64 stays below sqrt(1 + (W - 1) / W), 1.41 times, that of one unsharded bf16 product.
Dtype wire_of(Dtype dtype) { return dtype == Dtype::kBFloat16 ? dtype : Dtype::kFloat32; }

void run_tiles(Group& group, const ReduceCall& args, const Operands& operands, const Call& call,
               Choice choice, Tensor& out) {
  const RowsView& x = operands.views[0];
  const bool scatter = args.op == Op::kGemmReduceScatter;
  const bool one_shot = choice.algorithm == Algorithm::kOneShot;
  Product product(operands.weights, x.rows, scatter || x.rows > kSuperblockRows);
  if (torch::stable::get_num_threads() > 1) product.pack_all();
  std::vector<Scratch> leases(operands.views.size() + 1);
  std::vector<Rows> rows;
  for (size_t i = 0; i < operands.views.size(); ++i) {
    rows.push_back(staged(operands.views[i], product.compute(), leases[i]));
  }
  ReduceProblem problem(group, product);
  problem.x = rows.data();
  problem.terms = static_cast<int>(rows.size());
  problem.rows = x.rows;
  for (size_t r = 0; r < args.parts.size(); ++r) {
    problem.owners[r] = {args.parts[r].begin * args.granule, args.parts[r].end * args.granule};
  }
  problem.dtype = x.dtype;
  problem.wire = wire_of(x.dtype);
  problem.out = static_cast<char*>(out.data_ptr());
  problem.bias = bias_of(args.bias, product.n(), x.dtype, leases.back());

  auto bytes = [&](int64_t panels) {
    if (one_shot) return one_shot_bytes(x.rows, product.n());
    if (scatter) return owner_reduce_scatter_bytes(x.rows, panels, problem.wire);
    return owner_all_reduce_bytes(x.rows, panels, x.dtype, problem.wire);
  };
  int64_t piece = product.panels();
  while (!one_shot && piece > 1 && bytes(piece) > group.max_half_bytes()) piece = ceil_div(piece, 2);
  group.require(bytes(piece));
  for (int64_t first = 0; first < product.panels(); first += piece) {
    problem.first_panel = first;
    problem.panels = std::min(piece, product.panels() - first);
    group.begin(call, 0);
    if (one_shot) {
      scatter ? one_shot_reduce_scatter(problem) : one_shot_all_reduce(problem);
    } else {
      scatter ? owner_reduce_scatter(problem) : owner_all_reduce(problem);
    }
    group.finish();
  }
}

Tensor to_dtype(const Tensor& tensor, Dtype dtype) { return torch::stable::to(tensor, scalar_type(dtype)); }

// total[row][column] += values[row * row_step][column], both fp32 or both fp64
void add_rows(Dtype wide, Tensor& total, const Tensor& values, int64_t rows, int64_t columns,
              int64_t row_step) {
  auto add = [&](auto zero) {
    auto* to = static_cast<decltype(zero)*>(total.data_ptr());
    const auto* from = static_cast<const decltype(zero)*>(values.data_ptr());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < columns; ++i) to[row * columns + i] += from[row * row_step + i];
    }
  };
  wide == Dtype::kFloat64 ? add(double{}) : add(float{});
}

// torch.mm in fp32 (fp64 for fp64), then the plain collective in that type, then bias and rounding.
void run_library(Group& group, const ReduceCall& args, const Operands& operands, const Call& call,
                 Tensor& out) {
  const Dtype dtype = operands.views[0].dtype;
  const Dtype wide = dtype == Dtype::kFloat64 ? dtype : Dtype::kFloat32;
  const int64_t rows = operands.views[0].rows;
  const int64_t n = operands.weights[0].n;
  std::optional<Tensor> partial;
  for (size_t i = 0; i < args.xs.size(); ++i) {
    const Tensor x = to_dtype(torch::stable::reshape(args.xs[i], Sizes{rows, operands.views[i].depth}), wide);
    const Tensor product = torch::stable::contiguous(
        torch::stable::matmul(x, torch::stable::transpose(to_dtype(args.weights[i], wide), 0, 1)));
    if (partial.has_value()) {
      add_rows(wide, *partial, product, rows, n, n);
    } else {
      partial = product;
    }
  }
  const bool scatter = args.op == Op::kGemmReduceScatter;
  const int64_t out_rows = scatter ? args.parts[group.rank()].size() * args.granule : rows;
  Tensor sum = empty_like_shape(*partial, Sizes{out_rows, n});
  const auto* in = static_cast<const char*>(partial->data_ptr());
  auto* to = static_cast<char*>(sum.data_ptr());
  if (scatter) {
    reduce_scatter_rows(group, call, wide, in, to, args.parts, args.granule * n);
  } else {
    all_reduce_flat(group, call, wide, in, to, rows * n);
  }
  if (args.bias.has_value()) {
    add_rows(wide, sum, torch::stable::contiguous(to_dtype(*args.bias, wide)), out_rows, n, 0);
  }
  Tensor flat = torch::stable::reshape(out, Sizes{out_rows, n});
  torch::stable::copy_(flat, to_dtype(sum, dtype));
}

Tensor run(Group& group, const ReduceCall& args, Sizes out_shape) {
  const char* op = op_name(args.op);
  const Operands operands = operands_of(args);
  const RowsView& x = operands.views[0];
  Choice choice = choose_gemm(args.op, engine(), x.dtype, x.rows);
  if (choice.algorithm == Algorithm::kOneShot &&
      one_shot_bytes(x.rows, operands.weights[0].n) > group.max_half_bytes()) {
    choice = {Algorithm::kOwner, "the output is larger than the workspace: pieces of owned tiles"};
  }
  check_bias(args.bias, operands.weights[0].n, x.dtype, op);
  Tensor out = empty_like_shape(args.xs[0], out_shape);
  note_path(args.op, choice.algorithm, choice.reason);
  const Call call = call_of(args, operands);
  if (operands.weights[0].n == 0) {
    group.begin(call, 0);
    group.finish();
  } else if (choice.algorithm == Algorithm::kLibrary) {
    run_library(group, args, operands, call, out);
  } else {
    run_tiles(group, args, operands, call, choice, out);
  }
  return out;
}

Tensor all_reduce_sum(const Tensors& xs, const Tensors& weights, const std::optional<Tensor>& bias,
                      int64_t packed_rows, Group& group) {
  return in_group(group, [&] {
    const ReduceCall args{Op::kGemmAllReduce, xs, weights, bias, packed_rows, 0};
    check_value(!xs.empty() && xs[0].dim() >= 1 && !weights.empty(),
                "gemm_all_reduce: expected x [.., K] and a weight [N, K]");
    Sizes shape = shape_of(xs[0]);
    shape.back() = packed_rows >= 0 ? packed_rows : weights[0].size(0);
    return run(group, args, shape);
  });
}

// The part of `size` indices that each rank keeps: torch.chunk's, or the lengths that the ranks ask for.
std::vector<Range> parts_of(Group& group, const ReduceCall& args, int64_t size,
                            const std::optional<int64_t>& length) {
  if (!length.has_value()) return chunk_ranges(size, group.world_size());
  Call call = describe(args.op, args.xs[0], args.dim, size, args.xs.size(), kLengthsExchanged,
                       dtype_of(args.xs[0], op_name(args.op)));
  call.shape[call.ndim - 1] = kAnySize;
  const std::vector<Range> parts = consecutive_ranges(exchange_extents(group, call, *length));
  if (parts.back().end == size) return parts;
  throw CollectiveFailure(FailureKind::kInvalid, std::string(op_name(args.op)) +
                                                     ": the lengths of the ranks add up to " +
                                                     std::to_string(parts.back().end) +
                                                     ", the scattered dim has " + std::to_string(size));
}

// Cut along the last dim: the columns of the output are scattered, so the product is not fused.
Tensor scatter_columns(Group& group, const Tensors& xs, const Tensors& weights,
                       const std::optional<Tensor>& bias, int64_t packed_rows,
                       const std::optional<int64_t>& length) {
  ReduceCall args{Op::kGemmAllReduce, xs, weights, bias, packed_rows, xs[0].dim() - 1};
  Sizes shape = shape_of(xs[0]);
  shape.back() = packed_rows >= 0 ? packed_rows : weights[0].size(0);
  const Range mine = parts_of(group, args, shape.back(), length)[group.rank()];
  const Tensor full = run(group, args, shape);
  Tensor part = torch::stable::narrow(const_cast<Tensor&>(full), full.dim() - 1, mine.begin, mine.size());
  note_path(Op::kGemmReduceScatter, Algorithm::kOwner,
            "columns are scattered: gemm_all_reduce, own columns kept");
  return torch::stable::contiguous(part);
}

Tensor reduce_scatter_sum(const Tensors& xs, const Tensors& weights, const std::optional<Tensor>& bias,
                          int64_t dim, int64_t packed_rows, const std::optional<int64_t>& length,
                          Group& group) {
  return in_group(group, [&] {
    const char* op = op_name(Op::kGemmReduceScatter);
    check_value(!xs.empty() && xs[0].dim() >= 1 && !weights.empty(), op,
                ": expected x [.., K] and a weight [N, K]");
    const int64_t at = wrap_dim(dim, xs[0].dim(), op, "scatter_dim");
    if (at == xs[0].dim() - 1) {
      return scatter_columns(group, xs, weights, bias, packed_rows, length);
    }
    ReduceCall args{Op::kGemmReduceScatter, {}, weights, bias, packed_rows, at};
    for (const Tensor& x : xs) args.xs.push_back(move_dim_to_front(x, at));
    Sizes shape = shape_of(args.xs[0]);
    for (size_t d = 1; d + 1 < shape.size(); ++d) args.granule *= shape[d];
    args.parts = parts_of(group, args, shape[0], length);
    shape[0] = args.parts[group.rank()].size();
    shape.back() = packed_rows >= 0 ? packed_rows : weights[0].size(0);
    return move_front_to_dim(run(group, args, shape), at);
  });
}

Tensor gemm_all_reduce(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                       const std::string& group_name, const std::optional<int64_t>& packed_rows) {
  if (const auto group = fused_group(Op::kGemmAllReduce, group_name)) {
    return all_reduce_sum({x}, {weight}, bias, packed_rows.value_or(-1), *group);
  }
  return call_python<Tensor>("interlace::gemm_all_reduce_reference", x, weight, bias, group_name,
                             packed_rows);
}

Tensor gemm_reduce_scatter(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                           int64_t scatter_dim, const std::string& group_name,
                           const std::optional<int64_t>& packed_rows, const std::optional<int64_t>& length) {
  if (const auto group = fused_group(Op::kGemmReduceScatter, group_name)) {
    return reduce_scatter_sum({x}, {weight}, bias, scatter_dim, packed_rows.value_or(-1), length, *group);
  }
  return call_python<Tensor>("interlace::gemm_reduce_scatter_reference", x, weight, bias, scatter_dim,
                             group_name, packed_rows, length);
}

Tensor sum_gemm_all_reduce(const Tensors& xs, const Tensors& weights, const std::string& group_name) {
  if (const auto group = fused_group(Op::kGemmAllReduce, group_name)) {
    return all_reduce_sum(xs, weights, std::nullopt, -1, *group);
  }
  return call_python<Tensor>("interlace::sum_gemm_all_reduce_reference", xs, weights, group_name);
}

Tensor sum_gemm_reduce_scatter(const Tensors& xs, const Tensors& weights, int64_t scatter_dim,
                               const std::string& group_name, const std::optional<int64_t>& length) {
  if (const auto group = fused_group(Op::kGemmReduceScatter, group_name)) {
    return reduce_scatter_sum(xs, weights, std::nullopt, scatter_dim, -1, length, *group);
  }
  return call_python<Tensor>("interlace::sum_gemm_reduce_scatter_reference", xs, weights, scatter_dim,
                             group_name, length);
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_IMPL(interlace, CPU, m) {
  m.impl("gemm_all_reduce", TORCH_BOX(&interlace::gemm_all_reduce));
  m.impl("gemm_reduce_scatter", TORCH_BOX(&interlace::gemm_reduce_scatter));
  m.impl("sum_gemm_all_reduce", TORCH_BOX(&interlace::sum_gemm_all_reduce));
  m.impl("sum_gemm_reduce_scatter", TORCH_BOX(&interlace::sum_gemm_reduce_scatter));
}
