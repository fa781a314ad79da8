// interlace::all_gather_gemm and column_gemm (the same products without a gather), for CPU tensors.
#include "cpu/all_gather_gemm.h"

#include <algorithm>

#include "cpu/brgemm.h"
#include "cpu/collectives.h"
#include "cpu/host.h"

namespace interlace {
namespace {

constexpr uint32_t kWantsGathered = 2;

std::vector<WeightView> weights_of(const Tensors& weights, const Sizes& packed_rows, const RowsView& x,
                                   const char* op, Tensors& keep) {
  check_value(packed_rows.empty() || packed_rows.size() == weights.size(), op, ": ", weights.size(),
              " weights but ", packed_rows.size(), " packed_rows");
  std::vector<WeightView> views;
  for (size_t i = 0; i < weights.size(); ++i) {
    views.push_back(
        weight_of(weights[i], packed_rows.empty() ? -1 : packed_rows[i], x.depth, x.dtype, op, keep));
  }
  return views;
}

void check_biases(const OptionalTensors& biases, const std::vector<WeightView>& weights, Dtype dtype,
                  const char* op) {
  check_value(biases.size() == weights.size(), op, ": ", weights.size(), " weights but ", biases.size(),
              " biases; give None where there is none");
  for (size_t i = 0; i < biases.size(); ++i) check_bias(biases[i], weights[i].n, dtype, op);
}

std::string joined(const std::vector<int64_t>& values) {
  std::string text;
  for (int64_t value : values) text += (text.empty() ? "" : ", ") + std::to_string(value);
  return "[" + text + "]";
}

// With the total given, shards must be torch.chunk's; without it they may be of any length.
void check_shards(const std::vector<int64_t>& extents, const std::optional<int64_t>& gather_size) {
  if (!gather_size.has_value()) return;
  std::vector<int64_t> expected;
  const int world = static_cast<int>(extents.size());
  for (int r = 0; r < world; ++r) expected.push_back(chunk_range(*gather_size, world, r).size());
  if (extents == expected) return;
  throw CollectiveFailure(FailureKind::kInvalid,
                          "all_gather_gemm: the ranks bring shards of length " + joined(extents) +
                              ", gather_size=" + std::to_string(*gather_size) + " means " + joined(expected) +
                              "; pass the total length, or none");
}

Tensor library_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

struct GatherCall {
  Tensor x;  // the gathered dim in front, dense
  const Tensors& weights;
  const OptionalTensors& biases;
  bool want_gathered = false;
  Call call;
  std::optional<int64_t> gather_size;
  int64_t granule = 1;  // rows of x per index of the gathered dim
};

Tensor output(const GatherCall& args, int64_t total, int64_t columns) {
  Sizes shape = shape_of(args.x);
  shape[0] = total;
  shape.back() = columns;
  return empty_like_shape(args.x, shape);
}

// Tiles over the shards where they lie, in pieces when a shard is larger than the workspace.
std::tuple<Tensor, Tensors> run_tiles(Group& group, const GatherCall& args, const RowsView& x,
                                      const std::vector<WeightView>& weights) {
  GatherProblem problem(group);
  problem.dtype = x.dtype;
  problem.compute = compute_dtype(x.dtype);
  problem.x = x.data;
  problem.x_stride = x.stride;
  problem.depth = x.depth;
  // one epoch carries lengths and rows: each rank stages before it knows the others' lengths. Whether all fit is
  // known to all alike once they have met.
  const int64_t own = args.x.size(0);
  group.begin(args.call, own);
  const bool fits = gather_bytes(problem, x.rows) <= group.half_bytes();
  if (fits) stage_piece(problem, x.rows, 0, x.rows);
  group.meet();
  const std::vector<int64_t> extents = extents_of(group);
  check_shards(extents, args.gather_size);
  int64_t total = 0;
  for (int64_t extent : extents) {
    problem.rows.push_back(extent * args.granule);
    total += extent;
  }

  Tensor gathered = args.want_gathered ? output(args, total, x.depth) : empty_like_shape(args.x, Sizes{0});
  if (args.want_gathered) problem.gathered = static_cast<char*>(gathered.data_ptr());
  Tensors outs;
  std::vector<Scratch> leases(weights.size());
  std::vector<std::unique_ptr<Product>> products;
  for (size_t i = 0; i < weights.size(); ++i) {
    outs.push_back(output(args, total, weights[i].n));
    const int64_t rows = total * args.granule;
    products.push_back(
        std::make_unique<Product>(std::vector<WeightView>{weights[i]}, rows, rows > kGatherFirstRows));
    if (torch::stable::get_num_threads() > 1) products.back()->pack_all();
    problem.outs.push_back({products.back().get(), static_cast<char*>(outs.back().data_ptr()),
                            bias_of(args.biases[i], weights[i].n, x.dtype, leases[i])});
  }
  const int64_t longest = *std::max_element(problem.rows.begin(), problem.rows.end());
  if (gather_bytes(problem, longest) <= group.half_bytes()) {
    multiply_piece(problem, 0, longest);
    group.finish();
    return {gathered, outs};
  }
  group.finish();
  int64_t piece = longest;
  while (piece > 1 && gather_bytes(problem, piece) > group.max_half_bytes()) piece = ceil_div(piece, 2);
  group.require(gather_bytes(problem, piece));
  for (int64_t first = 0; first < longest; first += piece) {
    const int64_t count = std::min(piece, longest - first);
    group.begin(args.call, own);
    stage_piece(problem, x.rows, first, count);
    multiply_piece(problem, first, count);
    group.finish();
  }
  return {gathered, outs};
}

// Plain gather, then torch's own product: splitting a library GEMM costs more than it hides.
std::tuple<Tensor, Tensors> run_library(Group& group, const GatherCall& args) {
  const Tensor x = torch::stable::contiguous(args.x);
  const std::vector<int64_t> extents = exchange_extents(group, args.call, x.size(0));
  check_shards(extents, args.gather_size);
  int64_t total = 0;
  for (int64_t extent : extents) total += extent;
  Tensor gathered = output(args, total, x.size(x.dim() - 1));
  const int64_t width = args.granule * x.size(x.dim() - 1) * dtype_size(dtype_of(x, "all_gather_gemm"));
  all_gather_rows(group, args.call, static_cast<const char*>(x.data_ptr()),
                  static_cast<char*>(gathered.data_ptr()), extents, width);
  Tensors outs;
  for (size_t i = 0; i < args.weights.size(); ++i) {
    outs.push_back(library_linear(gathered, args.weights[i], args.biases[i]));
  }
  if (!args.want_gathered) gathered = empty_like_shape(x, Sizes{0});
  return {gathered, outs};
}

// The inner dim is gathered: columns of x, not rows. Gather, then multiply; nothing to hide.
std::tuple<Tensor, Tensors> gather_columns(Group& group, const Tensor& x_shard, const Tensors& weights,
                                           const OptionalTensors& biases, bool want_gathered, Call call) {
  const Tensor x = torch::stable::contiguous(move_dim_to_front(x_shard, x_shard.dim() - 1));
  call.shape[call.ndim - 1] = kGatheredDim;
  const std::vector<int64_t> extents = exchange_extents(group, call, x.size(0));
  int64_t rows = 1;
  Sizes shape = shape_of(x);
  for (size_t d = 1; d < shape.size(); ++d) rows *= shape[d];
  shape[0] = 0;
  for (int64_t extent : extents) shape[0] += extent;
  Tensor gathered = empty_like_shape(x, shape);
  all_gather_rows(group, call, static_cast<const char*>(x.data_ptr()),
                  static_cast<char*>(gathered.data_ptr()), extents,
                  rows * dtype_size(dtype_of(x, "all_gather_gemm")));
  const Tensor full = move_front_to_dim(gathered, x.dim() - 1);
  note_path(Op::kAllGatherGemm, Algorithm::kLibrary, "the inner dim is gathered: all_gather, then torch.mm");
  Tensors outs;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_value(weights[i].dim() == 2 && weights[i].size(1) == shape[0],
                "all_gather_gemm: gathered x has K=", shape[0], ", expected a weight [N, ", shape[0], "]");
    outs.push_back(library_linear(full, weights[i], biases[i]));
  }
  return {want_gathered ? full : empty_like_shape(x, Sizes{0}), outs};
}

std::tuple<Tensor, Tensors> gather_in_group(Group& group, const Tensor& x_shard, const Tensors& weights,
                                            const OptionalTensors& biases, int64_t gather_dim,
                                            bool return_gathered, const std::optional<int64_t>& gather_size,
                                            const Sizes& packed_rows) {
  const char* op = op_name(Op::kAllGatherGemm);
  check_value(x_shard.dim() >= 1 && !weights.empty(), op, ": expected x [.., K] and at least one weight");
  const int64_t dim = wrap_dim(gather_dim, x_shard.dim(), op, "gather_dim");
  // the columns of a weight differ between ranks when they do not divide: they are not compared
  Call call = describe(Op::kAllGatherGemm, x_shard, dim, 0, weights.size(),
                       return_gathered ? kWantsGathered : 0, dtype_of(x_shard, op));
  if (dim == x_shard.dim() - 1) return gather_columns(group, x_shard, weights, biases, return_gathered, call);
  const Tensor moved = move_dim_to_front(x_shard, dim);
  const RowsView x = rows_of(moved, op);
  Tensors keep;
  const std::vector<WeightView> views = weights_of(weights, packed_rows, x, op, keep);
  check_biases(biases, views, x.dtype, op);
  call = describe(Op::kAllGatherGemm, moved, dim, 0, weights.size(), return_gathered ? kWantsGathered : 0,
                  x.dtype);
  call.shape[0] = kGatheredDim;
  call.total = gather_size.value_or(-1);
  GatherCall args{moved, weights, biases, return_gathered, call, gather_size, 1};
  for (int64_t d = 1; d + 1 < moved.dim(); ++d) args.granule *= moved.size(d);
  const Choice choice = choose_gemm(Op::kAllGatherGemm, engine(), x.dtype, x.rows);
  note_path(Op::kAllGatherGemm, choice.algorithm, choice.reason);
  auto [gathered, outs] =
      choice.algorithm == Algorithm::kLibrary ? run_library(group, args) : run_tiles(group, args, x, views);
  if (dim != 0) {
    if (return_gathered) gathered = move_front_to_dim(gathered, dim);
    for (Tensor& out : outs) out = move_front_to_dim(out, dim);
  }
  return {gathered, outs};
}

std::tuple<Tensor, Tensors> all_gather_gemm(const Tensor& x_shard, const Tensors& weights,
                                            const OptionalTensors& biases, int64_t gather_dim,
                                            const std::string& group_name, bool return_gathered,
                                            const std::optional<int64_t>& gather_size,
                                            const Sizes& packed_rows) {
  const auto group = fused_group(Op::kAllGatherGemm, group_name);
  if (group == nullptr) {
    StableIValue stack[] = {
        torch::stable::detail::from(x_shard),     torch::stable::detail::from(weights),
        torch::stable::detail::from(biases),      torch::stable::detail::from(gather_dim),
        torch::stable::detail::from(group_name),  torch::stable::detail::from(return_gathered),
        torch::stable::detail::from(gather_size), torch::stable::detail::from(packed_rows)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("interlace::all_gather_gemm_reference", "", stack, TORCH_ABI_VERSION));
    return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensors>(stack[1])};
  }
  return in_group(*group, [&] {
    return gather_in_group(*group, x_shard, weights, biases, gather_dim, return_gathered, gather_size,
                           packed_rows);
  });
}

// Y_i = x W_i^T + b_i with the tile engine where it pays: packed weights, or few rows.
Tensors column_gemm(const Tensor& x, const Tensors& weights, const OptionalTensors& biases,
                    const std::string&, const Sizes& packed_rows) {
  const char* op = "column_gemm";
  check_value(x.dim() >= 1 && weights.size() == biases.size(), op, ": ", weights.size(), " weights but ",
              biases.size(), " biases; give None where there is none");
  Tensors outs;
  const Dtype dtype = dtype_of(x, op);
  if (packed_rows.empty()) {
    for (size_t i = 0; i < weights.size(); ++i) outs.push_back(library_linear(x, weights[i], biases[i]));
    return outs;
  }
  const RowsView view = rows_of(x, op);
  Tensors keep;
  const std::vector<WeightView> views = weights_of(weights, packed_rows, view, op, keep);
  check_biases(biases, views, dtype, op);
  for (size_t i = 0; i < weights.size(); ++i) {
    Product product({views[i]}, view.rows, view.rows > kSuperblockRows);
    Scratch row_lease;
    Scratch bias_lease;
    const Rows rows = staged(view, product.compute(), row_lease);
    Sizes shape = shape_of(x);
    shape.back() = views[i].n;
    outs.push_back(empty_like_shape(x, shape));
    const float* bias = bias_of(biases[i], views[i].n, dtype, bias_lease);
    auto* out = static_cast<char*>(outs.back().data_ptr());
    const int64_t blocks = ceil_div(view.rows, kSuperblockRows);
    run_units(
        blocks * product.panels(), blocks * product.panels(), [](int64_t) {},
        [&](int64_t unit) {
          const int64_t row = unit / product.panels() * kSuperblockRows;
          const int64_t panel = unit % product.panels();
          const Rows at{rows.data + row * rows.stride, rows.stride};
          product.unit(&at, std::min(kSuperblockRows, view.rows - row), panel,
                       [&](int64_t r, int64_t count, const float* tile) {
                         isa().store_tile(
                             dtype, out + ((row + r) * views[i].n + panel * kTileColumns) * dtype_size(dtype),
                             views[i].n, tile, count, product.columns(panel),
                             bias == nullptr ? nullptr : bias + panel * kTileColumns);
                       });
        },
        [](int64_t) {});
  }
  return outs;
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_IMPL(interlace, CPU, m) {
  m.impl("all_gather_gemm", TORCH_BOX(&interlace::all_gather_gemm));
  m.impl("column_gemm", TORCH_BOX(&interlace::column_gemm));
}
