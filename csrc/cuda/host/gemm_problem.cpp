#include "cuda/host/gemm_problem.h"

#include <string>

#include "cuda/kernels/gemm_plan.h"

namespace interlace {
namespace {

struct StoredWeight {
  bool k_major = false;  // can be read as [N, K] rows
  bool mn_major = false;  // can be read as [K, N] rows
};

StoredWeight storage_of(const Tensor& weight) {
  const int64_t n = weight.size(0), k = weight.size(1);
  return {k <= 1 || weight.stride(1) == 1, n <= 1 || weight.stride(0) == 1};
}

// One layout for all weights: [N, K] rows where all allow it.
bool common_layout(const char* op, const Tensors& weights) {
  bool k_major = true, mn_major = true;
  for (const Tensor& weight : weights) {
    check_value(weight.dim() == 2, op, ": a weight is ", shape_text(weight), "; expected [N, K]");
    const StoredWeight stored = storage_of(weight);
    check_value(stored.k_major || stored.mn_major, op, ": a weight ", shape_text(weight), " has strides ",
                list_text({weight.stride(0), weight.stride(1)}),
                "; expected 1 for one of them, call contiguous()");
    k_major = k_major && stored.k_major;
    mn_major = mn_major && stored.mn_major;
  }
  check_value(
      k_major || mn_major, op,
      ": some weights are stored by rows and some by columns; expected one layout, call contiguous()");
  return !k_major;
}

GemmProduct product_of(const char* op, const Tensor& weight, bool mn_major, int64_t depth) {
  const int64_t n = weight.size(0), k = weight.size(1);
  check_value(k == depth, op, ": a weight is ", shape_text(weight), " and x has ", depth,
              " columns; expected [N, ", depth, "]");
  check_value(n >= 1 && k >= 1, op, ": a weight is ", shape_text(weight), "; expected no empty dimension");
  check_value(n < kMaxTensorDim && k < kMaxTensorDim, op, ": a weight is ", shape_text(weight),
              "; a dimension of 2^31 or more is not served, cut it");
  const int64_t outer = mn_major ? k : n, inner = mn_major ? n : k;
  GemmProduct product{};
  product.weight = weight.data_ptr();
  product.columns = n;
  product.depth = k;
  product.stride = outer > 1 ? weight.stride(mn_major ? 1 : 0) : inner;
  check_value(product.stride >= inner, op, ": a weight ", shape_text(weight), " has rows that overlap");
  return product;
}

const float* scale_of(const char* op, const char* what, const Tensor& scale, int64_t length, bool row_wise) {
  check_dtype(op, what, scale, Dtype::kFloat32);
  const int64_t expected = row_wise ? length : 1;
  check_value(scale.numel() == expected && scale.is_contiguous(), op, ": ", what, " is ", shape_text(scale),
              "; expected ", expected, row_wise ? " contiguous values, one a row" : " value");
  return static_cast<const float*>(scale.data_ptr());
}

void set_scales(GemmProblem& problem, const GemmOperands& operands) {
  const char* const op = problem.op;
  const bool fp8 = problem.variant.dtype == Dtype::kFloat8E4m3;
  GemmArguments& arguments = problem.arguments;
  const auto scales = static_cast<int64_t>(operands.weight_scales.size());
  check_value(scales == (fp8 ? arguments.count : 0) && operands.x_scale.has_value() == fp8, op, ": got ",
              scales, " weight scales and ", operands.x_scale.has_value() ? "a" : "no", " scale of x for ",
              dtype_name(problem.variant.dtype), " operands; expected ",
              fp8 ? "a scale for x and for each weight" : "none");
  if (!fp8) return;
  check_value(!operands.summed || arguments.count == 1, op,
              ": products of float8 are not summed; call it for each");
  arguments.row_wise = operands.x_scale->numel() != 1 || arguments.rows == 1;
  for (int32_t p = 0; p < arguments.count; ++p) {
    check_value(operands.weight_scales[p].has_value(), op, ": weight ", p, " has no scale; float8 needs one");
    // one value for one column may stand for either kind
    if (operands.weight_scales[p]->numel() != arguments.products[p].columns) arguments.row_wise = false;
  }
  arguments.x_scale = scale_of(op, "x_scale", *operands.x_scale, arguments.rows, arguments.row_wise);
  problem.tensors.push_back(*operands.x_scale);
  for (int32_t p = 0; p < arguments.count; ++p) {
    const Tensor& scale = *operands.weight_scales[p];
    arguments.products[p].weight_scale =
        scale_of(op, "weight_scale", scale, arguments.products[p].columns, arguments.row_wise);
    problem.tensors.push_back(scale);
  }
}

}  // namespace

GemmProblem gemm_problem(const char* op, const GemmOperands& operands, int64_t tile_columns) {
  const auto count = static_cast<int64_t>(operands.weights.size());
  const auto sources = static_cast<int64_t>(operands.xs.size());
  check_value(count >= 1 && count <= kMaxProducts, op, ": got ", count, " weights; expected 1 to ",
              kMaxProducts);
  check_value(sources == (operands.summed ? count : 1), op, ": got ", sources, " x for ", count,
              operands.summed ? " summed products; expected one each" : " weights; expected one x");
  check_value(tile_columns == 128 || tile_columns == 256, op, ": got tile_columns=", tile_columns,
              "; expected 128 or 256");
  GemmProblem problem;
  problem.op = op;
  GemmArguments& arguments = problem.arguments;
  problem.variant.dtype = dtype_of(op, "x", operands.xs[0]);
  check_type(problem.variant.dtype != Dtype::kFloat32, op,
             ": x is float32; the fused kernels multiply bfloat16, float16 and float8_e4m3fn");
  problem.variant.tile_columns = static_cast<int32_t>(tile_columns);
  problem.variant.mn_major = common_layout(op, operands.weights);
  problem.out_dtype = problem.variant.dtype == Dtype::kFloat8E4m3 ? Dtype::kBFloat16 : problem.variant.dtype;
  arguments.count = static_cast<int32_t>(count);
  arguments.summed = operands.summed;
  for (int64_t p = 0; p < count; ++p) {
    const Tensor& x = operands.xs[operands.summed ? p : 0];
    const Tensor& weight = operands.weights[p];
    check_dtype(op, "x", x, problem.variant.dtype);
    check_dtype(op, "weight", weight, problem.variant.dtype);
    const Matrix rows = matrix_of(op, "x", x);
    if (p == 0) arguments.rows = rows.rows;
    check_value(rows.rows == arguments.rows, op, ": got x of ", arguments.rows, " and of ", rows.rows,
                " rows; expected as many, they are summed");
    arguments.x[p] = rows.data;
    arguments.x_stride[p] = rows.stride;
    arguments.products[p] = product_of(op, weight, problem.variant.mn_major, rows.columns);
    check_value(!operands.summed || arguments.products[p].columns == problem.columns(), op,
                ": got weights of ", problem.columns(), " and of ", arguments.products[p].columns,
                " rows; expected as many");
    problem.tensors.push_back(weight);
  }
  problem.tensors.insert(problem.tensors.end(), operands.xs.begin(), operands.xs.end());
  set_scales(problem, operands);
  return problem;
}

void GemmProblem::set_outs(const Tensors& outs, int64_t rows) {
  const auto expected = arguments.outs();
  check_value(static_cast<int64_t>(outs.size()) == expected, op, ": got ", outs.size(), " outs; expected ",
              expected);
  for (int32_t p = 0; p < expected; ++p) {
    check_dtype(op, "out", outs[p], out_dtype);
    const Matrix out = matrix_of(op, "out", outs[p], rows, arguments.products[p].columns);
    arguments.products[p].out = out.data;
    arguments.products[p].out_stride = out.stride;
    tensors.push_back(outs[p]);
  }
}

void GemmProblem::set_biases(const OptionalTensors& biases) {
  const auto expected = arguments.outs();
  check_value(static_cast<int64_t>(biases.size()) == expected, op, ": got ", biases.size(),
              " biases; expected one (or None) for each of ", expected, " outs");
  for (int32_t p = 0; p < expected; ++p) {
    if (!biases[p].has_value()) continue;
    check_dtype(op, "bias", *biases[p], out_dtype);
    arguments.products[p].bias = vector_of(op, "bias", *biases[p], arguments.products[p].columns);
    tensors.push_back(*biases[p]);
  }
}

void GemmProblem::set_residual(const OptionalTensor& residual, int64_t rows) {
  if (!residual.has_value()) return;
  check_value(arguments.outs() == 1, op, ": a residual needs one out, got ", arguments.outs());
  check_dtype(op, "residual", *residual, out_dtype);
  const Matrix matrix = matrix_of(op, "residual", *residual, rows, columns());
  arguments.residual = matrix.data;
  arguments.residual_stride = matrix.stride;
  tensors.push_back(*residual);
}

Mainloop choose_mainloop(const GemmProblem& problem, int64_t requested, int capability) {
  check_value(requested == 0 || requested == 80 || requested == 90, problem.op, ": got mainloop=", requested,
              "; expected 0, 80 or 90");
  check_value(capability >= 80, problem.op, ": compute capability ", capability / 10, ".", capability % 10,
              "; the fused kernels need 8.0 or later, use backend reference");
  const char* refused = capability / 10 == 9 ? gemm_sm90_refuses(problem.arguments, problem.variant)
                                             : "wgmma needs compute capability 9.0";
  if (requested != 80 && refused == nullptr) return Mainloop::kSm90;
  check_value(requested != 90, problem.op, ": the sm_90 mainloop cannot multiply this: ", refused);
  check_value(problem.variant.dtype != Dtype::kFloat8E4m3, problem.op,
              ": float8 needs the sm_90 mainloop, which ",
              "cannot multiply this: ", refused == nullptr ? "another one was asked for" : refused);
  return Mainloop::kSm80;
}

LaunchPlace launch_place(const GemmProblem& problem, const LaunchWish& wish, int64_t ranks_on_device,
                         int64_t useful_blocks, int64_t others) {
  LaunchPlace place{};
  place.device = common_device(problem.op, problem.tensors);
  place.mainloop = choose_mainloop(problem, wish.mainloop, compute_capability(place.device));
  const DeviceShare share{multiprocessors(place.device) - others, ranks_on_device};
  place.budget = choose_budget(problem.op, share, wish.blocks, wish.comm_blocks, useful_blocks);
  place.stream = current_stream(place.device);
  return place;
}

}  // namespace interlace
