// What the tests of the fused GEMMs share: matrices of small integers, whose products and sums are exact.
#pragma once

#include <vector>

#include "cuda/kernels/element.cuh"
#include "emu/operand_value.h"
#include "emu/testing.h"

namespace interlace::emu {

// -1, 0 or 1, different for every matrix and place: 8 ranks' sums over a depth of 30 stay below 256, exact in bf16.
inline float small_integer(int matrix, int64_t row, int64_t column) {
  const auto mixed = static_cast<uint32_t>(row * 2654435761u + column * 40503u + matrix * 97u) * 2246822519u;
  return static_cast<float>((mixed >> 13) % 3) - 1.0f;
}

// [rows, columns] with a pitch of its own; `shift` elements off a 16-byte boundary. Starts as NaN, and so do the
// elements between the rows: nobody may read or write them.
template <class T> class Matrix {
 public:
  Matrix() = default;
  Matrix(int64_t rows, int64_t columns, int64_t stride, int64_t shift = 0)
      : rows_(rows), columns_(columns), stride_(stride), shift_(shift) {
    storage_.resize(static_cast<size_t>((rows * stride + shift) / Pack<T>::kElements + 2));
    std::memset(static_cast<void*>(storage_.data()), 0xff, storage_.size() * sizeof(Pack<T>));
  }
  T* data() { return reinterpret_cast<T*>(storage_.data()) + shift_; }
  int64_t stride() const { return stride_; }
  T& at(int64_t row, int64_t column) { return data()[row * stride_ + column]; }
  void fill(int matrix, int64_t first_row = 0) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t column = 0; column < columns_; ++column)
        set_value(small_integer(matrix, first_row + row, column), at(row, column));
    }
  }
  // Nothing was stored between the rows, or behind the last.
  void require_gaps(const std::string& what) {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t column = columns_; column < stride_; ++column)
        require(std::isnan(value_of(at(row, column))), what + ": stored behind the end of a row");
    }
    require(std::isnan(value_of(data()[rows_ * stride_])), what + ": stored behind the end");
  }

 private:
  int64_t rows_ = 0, columns_ = 0, stride_ = 0, shift_ = 0;
  std::vector<Pack<T>> storage_;
};

inline std::string place(const char* what, int rank, int call, int64_t row, int64_t column) {
  return std::string(what) + ", rank " + std::to_string(rank) + ", call " + std::to_string(call) + ", row " +
         std::to_string(row) + ", column " + std::to_string(column);
}

inline void require_equal(float got, float want, const std::string& where) {
  require(got == want, where + ": " + std::to_string(got) + " instead of " + std::to_string(want));
}

// Elements between the rows of an operand: as mainloops that load 16 bytes want it, or odd.
template <class Element> int64_t operand_stride(int64_t depth, int64_t gap, bool aligned) {
  constexpr int64_t kElements = Pack<Element>::kElements;
  return aligned ? (depth + kElements - 1) / kElements * kElements : depth + gap;
}

template <class Element>
constexpr Dtype dtype_of = sizeof(Element) == 1                ? Dtype::kFloat8E4m3
                           : std::is_same_v<Element, BFloat16> ? Dtype::kBFloat16
                                                               : Dtype::kFloat16;

}  // namespace interlace::emu
