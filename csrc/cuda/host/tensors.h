// From torch tensors to the plain structs the kernels take. Checks name op, what came, what is expected; whether a tensor
// lies on a GPU is checked last, so that everything before works, and is tested, on any machine.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "core/call.h"
#include "cuda/kernels/segment.h"
#include "runtime/errors.h"

namespace interlace {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = std::vector<OptionalTensor>;
using Sizes = std::vector<int64_t>;

// "[4, 8]"
std::string shape_text(const Tensor& tensor);
std::string list_text(const Sizes& sizes);

// The dtypes that kernels read; TypeError for others.
Dtype dtype_of(const char* op, const char* what, const Tensor& tensor);
void check_dtype(const char* op, const char* what, const Tensor& tensor, Dtype expected);

// A 2-D tensor whose rows lie apart and whose columns are neighbours.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;  // elements between rows
};
Matrix matrix_of(const char* op, const char* what, const Tensor& tensor);
// The same, of this shape.
Matrix matrix_of(const char* op, const char* what, const Tensor& tensor, int64_t rows, int64_t columns);
// Elements of a contiguous 1-D tensor of this length.
void* vector_of(const char* op, const char* what, const Tensor& tensor, int64_t length);

// Index of the GPU all of them lie on.
int32_t common_device(const char* op, const Tensors& tensors);
void append(Tensors& all, const OptionalTensor& tensor);

cudaStream_t current_stream(int32_t device);

// The group's part of every schema: segment and host page addresses, multicast, half_bytes, rank, timeout.
// pages: one, of this rank; or those of all ranks, which are then virtual ranks on this device.
struct GroupTail {
  Sizes segments;
  Sizes pages;
  int64_t multicast;
  int64_t half_bytes;
  int64_t rank;
  double timeout;  // seconds

  int64_t world_size() const { return static_cast<int64_t>(segments.size()); }
  int64_t ranks_on_device() const { return static_cast<int64_t>(pages.size()); }
};
SymmetricGroup group_of(const char* op, const GroupTail& tail);
// ValueError unless a half holds `needed` bytes.
void check_half(const char* op, const GroupTail& tail, int64_t needed);
// Rows of every rank, none negative; their sum fits the kernels' 32-bit rows.
void check_rows(const char* op, const Sizes& rows, int64_t world_size);

}  // namespace interlace

#define INTERLACE_TAIL_SCHEMA \
  "int[] segments, int[] pages, int multicast, int half_bytes, int rank, float timeout"
#define INTERLACE_TAIL_PARAMETERS                                                                   \
  std::vector<int64_t> segments, std::vector<int64_t> pages, int64_t multicast, int64_t half_bytes, \
      int64_t rank, double timeout
#define INTERLACE_TAIL_ARGUMENTS \
  interlace::GroupTail { segments, pages, multicast, half_bytes, rank, timeout }
