// Products for the tests of the GEMM mainloops: operands, maps, the expected bits.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/kernels/gemm_plan.h"
#include "cuda/kernels/plain_gemm_sm90.cuh"
#include "emu/tensor_maps.h"
#include "emu/testing.h"

namespace interlace::emu {

struct ProductSize {
  int64_t columns;
  int64_t depth;
};

struct Case {
  int64_t rows;
  std::vector<ProductSize> products;
  bool summed = false;
  bool bias = false;
  bool residual = false;
  bool row_wise = false;
  bool unaligned = false;  // rows at any address: not for TMA
  uint32_t blocks = 2;
};

constexpr int64_t kGuardColumns = 3;  // behind the columns of out: out rows are not aligned to 16 bytes
constexpr float kGuard = -777.0f;

// Small integers, different everywhere: sums are exact in fp32, so every order of summation gives the same bits.
inline int small(int64_t a, int64_t b, int64_t salt) {
  return static_cast<int>((a * 7 + b * 13 + salt * 5 + a * b) % 7) - 3;
}

inline void set_element(int value, BFloat16& out) { from_float(static_cast<float>(value), out); }
inline void set_element(int value, Float16& out) { from_float(static_cast<float>(value), out); }
inline void set_element(int value, Float8E4m3& out) {
  constexpr uint8_t kMagnitudes[4] = {0x00, 0x38, 0x40, 0x44};  // 0, 1, 2, 3
  out.bits = kMagnitudes[value < 0 ? -value : value] | (value < 0 ? 0x80 : 0);
}
inline void set_rubbish(BFloat16& out) { out.bits = 0x7fc0; }
inline void set_rubbish(Float16& out) { out.bits = 0x7e00; }
inline void set_rubbish(Float8E4m3& out) { out.bits = 0x7f; }

// A matrix whose rows start at multiples of 16 bytes, with NaN between them: they must be neither read nor multiplied.
// unaligned: only the elements are aligned.
template <class T> struct Matrix {
  int64_t outer, inner, stride, start;
  std::vector<Pack<T>> storage;

  Matrix(int64_t outer, int64_t inner, int64_t salt, bool transposed, bool unaligned)
      : outer(outer), inner(inner), start(unaligned ? 1 : 0) {
    constexpr int64_t kElements = Pack<T>::kElements;
    stride = (inner + kElements - 1) / kElements * kElements + (unaligned ? 1 : kElements);
    storage.resize(static_cast<size_t>(outer * stride / kElements + 2));
    for (int64_t i = 0; i < outer * stride; ++i) set_rubbish(data()[i]);
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t i = 0; i < inner; ++i) {
        set_element(transposed ? small(i, o, salt) : small(o, i, salt), data()[o * stride + i]);
      }
    }
  }
  T* data() { return storage[0].elements + start; }
};

// Powers of two: scaling is exact too.
inline float x_scale_of(int64_t row) { return row % 2 == 0 ? 2.0f : 0.5f; }
inline float weight_scale_of(int64_t column) { return column % 3 == 0 ? 4.0f : 0.25f; }

template <class Tile> struct Problem {
  using T = typename Tile::Element;
  using Out = typename Tile::Out;

  const Case& test;
  std::vector<Matrix<T>> x, weights;
  std::vector<std::vector<Out>> outs, biases;
  std::vector<Out> residual;
  std::vector<float> x_scale;
  std::vector<std::vector<float>> weight_scales;
  GemmArguments arguments{};
  GemmTensorMaps maps{};

  explicit Problem(const Case& test) : test(test) {
    const int64_t count = static_cast<int64_t>(test.products.size());
    arguments.rows = test.rows;
    arguments.count = static_cast<int32_t>(count);
    arguments.summed = test.summed;
    arguments.row_wise = test.row_wise;
    for (int64_t p = 0; p < count; ++p) {
      const auto [columns, depth] = test.products[p];
      if (p == 0 || test.summed) x.emplace_back(test.rows, depth, p, false, test.unaligned);
      if constexpr (Tile::kMnMajor) {
        weights.emplace_back(depth, columns, p + 9, true, test.unaligned);
      } else {
        weights.emplace_back(columns, depth, p + 9, false, test.unaligned);
      }
      fill_epilogue(p, columns);
    }
    for (size_t p = 0; p < x.size(); ++p) {
      arguments.x[p] = x[p].data();
      arguments.x_stride[p] = x[p].stride;
    }
    arguments.x_scale = x_scale.data();
    if (test.residual) {
      arguments.residual = residual.data();
      arguments.residual_stride = test.products[0].columns + 1;
    }
    for (int64_t p = 0; p < count; ++p) {
      arguments.products[p] = {weights[p].data(),
                               test.products[p].columns,
                               test.products[p].depth,
                               weights[p].stride,
                               test.bias ? biases[p].data() : nullptr,
                               weight_scales[p].data(),
                               outs[p].data(),
                               test.products[p].columns + kGuardColumns};
    }
    if (!test.unaligned) encode_maps();
  }

  void fill_epilogue(int64_t p, int64_t columns) {
    outs.emplace_back(static_cast<size_t>((test.rows + 1) * (columns + kGuardColumns)));
    for (Out& element : outs.back()) from_float(kGuard, element);
    biases.emplace_back(static_cast<size_t>(columns));
    weight_scales.emplace_back(static_cast<size_t>(columns));
    for (int64_t n = 0; n < columns; ++n) {
      from_float(static_cast<float>(small(n, p, 2)), biases.back()[n]);
      weight_scales.back()[n] = weight_scale_of(n);
    }
    if (p > 0) return;
    residual.resize(static_cast<size_t>(test.rows * (columns + 1)));
    for (size_t i = 0; i < residual.size(); ++i) from_float(static_cast<float>(small(i, 3, 3)), residual[i]);
    for (int64_t m = 0; m < test.rows; ++m) x_scale.push_back(x_scale_of(m));
  }

  static GemmVariant variant() {
    const Dtype narrow = std::is_same_v<T, BFloat16> ? Dtype::kBFloat16 : Dtype::kFloat16;
    return {Tile::kFloat8 ? Dtype::kFloat8E4m3 : narrow, Tile::kMnMajor, Tile::kColumns};
  }

  void encode_maps() {
    const char* const refused = gemm_sm90_refuses(arguments, variant());
    require(refused == nullptr, refused == nullptr ? "" : refused);
    maps = encoded_maps(arguments, variant(), {});
  }

  float expected(int64_t p, int64_t m, int64_t n) const {
    int64_t sum = 0;
    for (int64_t s = test.summed ? 0 : p; s <= (test.summed ? arguments.count - 1 : p); ++s) {
      for (int64_t k = 0; k < test.products[s].depth; ++k) {
        sum += small(m, k, test.summed ? s : 0) * small(n, k, s + 9);
      }
    }
    float value = static_cast<float>(sum);
    if (Tile::kFloat8) {
      value *= x_scale_of(test.row_wise ? m : 0) * weight_scale_of(test.row_wise ? n : 0);
    }
    if (test.bias) value += to_float(biases[p][n]);
    if (test.residual) value += to_float(residual[m * (test.products[0].columns + 1) + n]);
    Out rounded;
    from_float(value, rounded);
    return to_float(rounded);
  }

  void check() const {
    for (int32_t p = 0; p < arguments.outs(); ++p) {
      const int64_t columns = test.products[p].columns, stride = columns + kGuardColumns;
      for (int64_t m = 0; m <= test.rows; ++m) {
        for (int64_t n = 0; n < stride; ++n) {
          const bool inside = m < test.rows && n < columns;
          const float want = inside ? expected(p, m, n) : to_float(outs[p].back());
          const float got = to_float(outs[p][m * stride + n]);
          require(got == want, "product " + std::to_string(p) + ", row " + std::to_string(m) + ", column " +
                                   std::to_string(n) + (inside ? "" : " (outside)") + ": " +
                                   std::to_string(got) + " instead of " + std::to_string(want) +
                                   "; tile of " + std::to_string(Tile::kColumns) + ", depth " +
                                   std::to_string(test.products[p].depth));
        }
      }
    }
  }
};

template <class Tile> void run(const Case& test, uint64_t seed) {
  World world(seed);
  Problem<Tile> problem(test);
  Device device(world, 0, {test.blocks, kGemmThreads, kGemmSharedBytes<Tile>});
  device.launch([&] { plain_gemm_sm90_kernel<Tile>(problem.maps, problem.arguments); });
  require_finished(world);
  problem.check();
}

}  // namespace interlace::emu
