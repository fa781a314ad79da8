#include "cpu/host.h"

#include <algorithm>
#include <cstring>

#include "cpu/scratch.h"

namespace interlace {
namespace {

using torch::headeronly::ScalarType;

std::string list(const Sizes& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

Tensor permute(const Tensor& tensor, const Sizes& order) {
  StableIValue stack[] = {torch::stable::detail::from(tensor), torch::stable::detail::from(order)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::permute", "", stack, TORCH_ABI_VERSION));
  return torch::stable::contiguous(torch::stable::detail::to<Tensor>(stack[0]));
}

// Can the leading dims be walked with one stride?
bool folds(const Tensor& x) {
  const int64_t ndim = x.dim();
  if (ndim == 0 || (x.size(ndim - 1) > 1 && x.stride(ndim - 1) != 1)) return false;
  int64_t expected = -1;
  for (int64_t d = ndim - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (expected >= 0 && x.stride(d) != expected) return false;
    expected = x.stride(d) * x.size(d);
  }
  return true;
}

int64_t row_stride(const Tensor& x) {
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) > 1) return x.stride(d);
  }
  return x.size(x.dim() - 1);
}

}  // namespace

Dtype dtype_of(const Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::Double: return Dtype::kFloat64;
    default: break;
  }
  fail_argument("TypeError", op, ": expected float32, bfloat16, float16 or float64, got ",
                torch::headeronly::toString(tensor.scalar_type()), "; cast the tensor first");
}

Dtype summable_dtype(const Tensor& tensor, const char* op) {
  if (tensor.scalar_type() == ScalarType::Int) return Dtype::kInt32;
  if (tensor.scalar_type() == ScalarType::Long) return Dtype::kInt64;
  return dtype_of(tensor, op);
}

ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBFloat16: return ScalarType::BFloat16;
    case Dtype::kFloat16: return ScalarType::Half;
    case Dtype::kFloat64: return ScalarType::Double;
    case Dtype::kInt32: return ScalarType::Int;
    case Dtype::kInt64: return ScalarType::Long;
    case Dtype::kBytes: return ScalarType::Byte;
    case Dtype::kFloat8E4m3: return ScalarType::Float8_e4m3fn;
    case Dtype::kFloat32: break;
  }
  return ScalarType::Float;
}

Sizes shape_of(const Tensor& tensor) {
  Sizes shape;
  for (int64_t d = 0; d < tensor.dim(); ++d) shape.push_back(tensor.size(d));
  return shape;
}

int64_t wrap_dim(int64_t dim, int64_t ndim, const char* op, const char* what) {
  check_value(dim >= -ndim && dim < ndim, op, ": ", what, "=", dim, " is out of range for a tensor of ", ndim,
              " dims");
  return dim < 0 ? dim + ndim : dim;
}

Tensor empty_like_shape(const Tensor& like, const Sizes& shape) {
  return torch::stable::new_empty(like, shape);
}

Tensor move_dim_to_front(const Tensor& tensor, int64_t dim) {
  if (dim == 0) return tensor;
  bool already = true;  // only dims of size 1 before it
  for (int64_t d = 0; d < dim; ++d) already = already && tensor.size(d) == 1;
  Sizes order{dim};
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d != dim) order.push_back(d);
  }
  if (already) {
    Sizes shape;
    for (int64_t d : order) shape.push_back(tensor.size(d));
    return torch::stable::reshape(tensor, shape);
  }
  return permute(tensor, order);
}

Tensor move_front_to_dim(const Tensor& tensor, int64_t dim) {
  if (dim == 0) return tensor;
  Sizes order;
  for (int64_t d = 1; d <= dim; ++d) order.push_back(d);
  order.push_back(0);
  for (int64_t d = dim + 1; d < tensor.dim(); ++d) order.push_back(d);
  return permute(tensor, order);
}

RowsView rows_of(const Tensor& x, const char* op) {
  check_value(x.dim() >= 1, op, ": x is a scalar; expected [.., K]");
  RowsView view;
  view.dtype = dtype_of(x, op);
  view.keep = folds(x) ? x : torch::stable::contiguous(x);
  view.depth = x.size(x.dim() - 1);
  view.rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) view.rows *= x.size(d);
  view.stride = row_stride(view.keep) * dtype_size(view.dtype);
  view.data = static_cast<const char*>(view.keep.data_ptr());
  return view;
}

WeightView weight_of(const Tensor& weight, int64_t packed_rows, int64_t depth, Dtype dtype, const char* op,
                     Tensors& keep) {
  WeightView view;
  view.dtype = dtype;
  view.k = depth;
  if (packed_rows >= 0) {
    const int64_t panels = ceil_div(packed_rows, kTileColumns);
    const Dtype compute = compute_dtype(dtype);
    check_type(dtype_of(weight, op) == compute, op, ": x is ", dtype_name(dtype), ", the packed weight is ",
               dtype_name(dtype_of(weight, op)), "; cast one of them or use torch.autocast");
    check_value(weight.dim() == 2 && weight.size(0) == panels &&
                    weight.size(1) * dtype_size(compute) == panel_bytes(compute, depth) &&
                    weight.is_contiguous(),
                op, ": packed weight ", list(shape_of(weight)), " does not fit N=", packed_rows,
                ", K=", depth, "; pack it again with interlace.pack_weights");
    view.data = weight.data_ptr();
    view.n = packed_rows;
    view.packed = true;
    return view;
  }
  check_value(weight.dim() == 2 && weight.size(1) == depth, op, ": x has K=", depth,
              ", expected a weight [N, ", depth, "], got ", list(shape_of(weight)));
  check_type(dtype_of(weight, op) == dtype, op, ": x is ", dtype_name(dtype), ", weight is ",
             dtype_name(dtype_of(weight, op)), "; cast one of them or use torch.autocast");
  view.n = weight.size(0);
  Tensor plain = weight;
  if (weight.stride(1) != 1 && weight.stride(0) != 1) {
    plain = torch::stable::contiguous(weight);
    keep.push_back(plain);
  }
  view.data = plain.data_ptr();
  view.stride_n = plain.stride(0);
  view.stride_k = plain.stride(1);
  return view;
}

Rows staged(const RowsView& x, Dtype compute, Scratch& lease) {
  const int64_t padded = padded_depth(compute, x.depth);
  if (x.dtype == compute && padded == x.depth) return {x.data, x.stride};
  const int64_t stride = padded * dtype_size(compute);
  lease = Scratch(x.rows * stride);
  stage_rows(x.dtype, compute, x.data, x.stride, x.rows, x.depth, lease.data());
  return {lease.data(), stride};
}

void check_bias(const std::optional<Tensor>& bias, int64_t n, Dtype dtype, const char* op) {
  if (!bias.has_value()) return;
  check_value(bias->dim() == 1 && bias->size(0) == n, op, ": expected a bias [", n, "], got ",
              list(shape_of(*bias)));
  check_type(dtype_of(*bias, op) == dtype, op, ": x is ", dtype_name(dtype), ", bias is ",
             dtype_name(dtype_of(*bias, op)), "; cast one of them or use torch.autocast");
}

const float* bias_of(const std::optional<Tensor>& bias, int64_t n, Dtype dtype, Scratch& lease) {
  if (!bias.has_value()) return nullptr;
  const int64_t padded = ceil_div(n, kTileColumns) * kTileColumns;
  lease = Scratch(padded * 4);
  auto* values = reinterpret_cast<float*>(lease.data());
  const Tensor dense = torch::stable::contiguous(*bias);
  isa().widen(dtype, values, dense.data_ptr(), n);
  std::fill(values + n, values + padded, 0.0f);
  return values;
}

Call describe(Op op, const Tensor& x, int64_t dim, int64_t columns, size_t weights, uint32_t options,
              Dtype dtype) {
  Call call;
  call.op = op;
  call.dtype = dtype;
  call.dim = static_cast<int32_t>(dim);
  const int64_t folded = x.dim() > kMaxDims ? x.dim() - kMaxDims : 0;
  int64_t first = 1;
  for (int64_t d = 0; d <= folded && d < x.dim(); ++d) first *= x.size(d);
  call.ndim = static_cast<uint32_t>(x.dim() - folded);
  for (int64_t d = folded; d < x.dim(); ++d) call.shape[d - folded] = d == folded ? first : x.size(d);
  call.columns = columns;
  call.weights = static_cast<uint32_t>(weights);
  call.options = options;
  return call;
}

void note_path(Op op, Algorithm algorithm, const char* reason) {
  note_path({op, algorithm_name(algorithm), reason, algorithm != Algorithm::kReference});
}

}  // namespace interlace
