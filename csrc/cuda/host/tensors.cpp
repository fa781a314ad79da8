#include "cuda/host/tensors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/core/ScalarType.h>

#include "cuda/kernels/gemm_plan.h"

namespace interlace {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kSegmentAlignment = alignof(SegmentControl);
constexpr int64_t kPageAlignment = alignof(HostPage);

std::optional<Dtype> known_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    case ScalarType::Float8_e4m3fn: return Dtype::kFloat8E4m3;
    default: return std::nullopt;
  }
}

}  // namespace

std::string list_text(const Sizes& sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string shape_text(const Tensor& tensor) {
  Sizes sizes;
  for (int64_t d = 0; d < tensor.dim(); ++d) sizes.push_back(tensor.size(d));
  return list_text(sizes);
}

Dtype dtype_of(const char* op, const char* what, const Tensor& tensor) {
  const auto dtype = known_dtype(tensor.scalar_type());
  check_type(dtype.has_value(), op, ": ", what, " is ", torch::headeronly::toString(tensor.scalar_type()),
             "; expected bfloat16, float16, float32 or float8_e4m3fn");
  return *dtype;
}

void check_dtype(const char* op, const char* what, const Tensor& tensor, Dtype expected) {
  check_type(known_dtype(tensor.scalar_type()) == expected, op, ": ", what, " is ",
             torch::headeronly::toString(tensor.scalar_type()), "; expected ", dtype_name(expected),
             ", cast it first");
}

Matrix matrix_of(const char* op, const char* what, const Tensor& tensor) {
  check_value(tensor.dim() == 2, op, ": ", what, " is ", shape_text(tensor),
              "; expected 2 dims, fold the others");
  const int64_t rows = tensor.size(0), columns = tensor.size(1);
  check_value(columns <= 1 || tensor.stride(1) == 1, op, ": ", what, " ", shape_text(tensor),
              " has neighbouring columns ", tensor.stride(1),
              " elements apart; expected 1, call contiguous()");
  check_value(rows < kMaxTensorDim && columns < kMaxTensorDim, op, ": ", what, " is ", shape_text(tensor),
              "; a dimension of 2^31 or more is not served, cut the tensor");
  const int64_t stride = rows > 1 ? tensor.stride(0) : columns;
  check_value(rows <= 1 || stride >= columns, op, ": ", what, " ", shape_text(tensor), " has rows ", stride,
              " elements apart, they overlap; call contiguous()");
  return {tensor.data_ptr(), rows, columns, stride};
}

Matrix matrix_of(const char* op, const char* what, const Tensor& tensor, int64_t rows, int64_t columns) {
  const Matrix matrix = matrix_of(op, what, tensor);
  check_value(matrix.rows == rows && matrix.columns == columns, op, ": ", what, " is ", shape_text(tensor),
              "; expected ", list_text({rows, columns}));
  return matrix;
}

void* vector_of(const char* op, const char* what, const Tensor& tensor, int64_t length) {
  check_value(tensor.dim() == 1 && tensor.size(0) == length, op, ": ", what, " is ", shape_text(tensor),
              "; expected ", list_text({length}));
  check_value(tensor.is_contiguous(), op, ": ", what, " has gaps; call contiguous()");
  return tensor.data_ptr();
}

int32_t common_device(const char* op, const Tensors& tensors) {
  int32_t device = -1;
  for (const Tensor& tensor : tensors) {
    check_value(tensor.is_cuda(), op, ": got a CPU tensor ", shape_text(tensor), "; expected CUDA tensors");
    const int32_t index = tensor.get_device_index();
    if (device < 0) device = index;
    check_value(index == device, op, ": got tensors on cuda:", device, " and cuda:", index,
                "; expected all on one device");
  }
  return device;
}

void append(Tensors& all, const OptionalTensor& tensor) {
  if (tensor.has_value()) all.push_back(*tensor);
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

SymmetricGroup group_of(const char* op, const GroupTail& tail) {
  const int64_t world_size = tail.world_size(), on_device = tail.ranks_on_device();
  check_value(world_size >= 1 && world_size <= kMaxRanks, op, ": got ", world_size,
              " segments; expected one per rank, 1 to ", kMaxRanks);
  check_value(tail.rank >= 0 && tail.rank < world_size, op, ": rank ", tail.rank, " is not in a group of ",
              world_size);
  check_value(on_device == 1 || on_device == world_size, op, ": got ", on_device,
              " host pages; expected 1, or one for each of ", world_size, " virtual ranks");
  check_value(tail.half_bytes >= 0 && tail.half_bytes % 16 == 0, op, ": half_bytes is ", tail.half_bytes,
              "; expected a multiple of 16");
  check_value(tail.timeout > 0, op, ": timeout is ", tail.timeout, " s; expected more than 0");
  check_value(tail.multicast >= 0 && tail.multicast % kSegmentAlignment == 0, op, ": multicast address ",
              tail.multicast, " is not aligned to ", kSegmentAlignment, " bytes");
  SymmetricGroup group{};
  for (int64_t rank = 0; rank < world_size; ++rank) {
    const int64_t address = tail.segments[rank];
    check_value(address != 0 && address % kSegmentAlignment == 0, op, ": the segment of rank ", rank, " at ",
                address, " is not aligned to ", kSegmentAlignment, " bytes");
    group.segments[rank] = reinterpret_cast<char*>(address);
  }
  for (int64_t i = 0; i < on_device; ++i) {
    const int64_t rank = on_device == 1 ? tail.rank : i, address = tail.pages[i];
    check_value(address != 0 && address % kPageAlignment == 0, op, ": the host page of rank ", rank, " at ",
                address, " is not pinned memory aligned to ", kPageAlignment, " bytes");
    group.pages[rank] = reinterpret_cast<HostPage*>(address);
  }
  group.multicast = reinterpret_cast<char*>(tail.multicast);
  group.half_bytes = tail.half_bytes;
  group.timeout_nanoseconds = static_cast<uint64_t>(tail.timeout * 1e9);
  group.world_size = static_cast<int32_t>(world_size);
  group.first_rank = static_cast<int32_t>(tail.rank);
  return group;
}

void check_half(const char* op, const GroupTail& tail, int64_t needed) {
  check_value(needed <= tail.half_bytes, op, ": ", needed, " bytes of staging do not fit into a half of ",
              tail.half_bytes, "; set up a larger workspace");
}

void check_rows(const char* op, const Sizes& rows, int64_t world_size) {
  check_value(static_cast<int64_t>(rows.size()) == world_size, op, ": got rows ", list_text(rows),
              "; expected one number for each of ", world_size, " ranks");
  int64_t total = 0;
  for (const int64_t count : rows) {
    check_value(count >= 0 && count < kMaxTensorDim, op, ": got rows ", list_text(rows),
                "; expected numbers from 0 to 2^31 - 1");
    total += count;
  }
  check_value(total < kMaxTensorDim, op, ": ", total,
              " rows in all; 2^31 or more are not served, cut the tensor");
}

}  // namespace interlace
