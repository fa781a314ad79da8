// Bodies of cpu/isa.h. Included once per instruction set, inside a namespace of its own, after kWidth (floats in a
// vector register) is defined. Loops are written for the vectoriser: the compiler flags of the file decide.
// The namespace matters: two sets must never share an inline function, or the linker may keep the wrong one.

using Floats = float __attribute__((vector_size(kWidth * 4)));
using Words = uint32_t __attribute__((vector_size(kWidth * 4)));
using Halves = uint16_t __attribute__((vector_size(kWidth * 2)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  _Float16 value;
};

inline float to_float(float v) { return v; }
inline float to_float(BFloat16 v) { return __builtin_bit_cast(float, static_cast<uint32_t>(v.bits) << 16); }
inline float to_float(Float16 v) { return static_cast<float>(v.value); }
inline double to_float(double v) { return v; }
inline int32_t to_float(int32_t v) { return v; }
inline int64_t to_float(int64_t v) { return v; }

template <class T> inline T from_float(float v);
template <> inline float from_float<float>(float v) { return v; }
template <> inline Float16 from_float<Float16>(float v) { return {static_cast<_Float16>(v)}; }
template <> inline BFloat16 from_float<BFloat16>(float v) {
  // round to nearest even; NaN stays NaN (the carry could turn it into infinity)
  const uint32_t bits = __builtin_bit_cast(uint32_t, v);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(v == v ? rounded : 0x7fc0u)};
}

template <class F> inline void with_dtype(Dtype dtype, F&& body) {
  switch (dtype) {
    case Dtype::kBFloat16: return body(BFloat16{});
    case Dtype::kFloat16: return body(Float16{});
    default: return body(float{});
  }
}

// Count is a template argument for the common worlds: the inner loop over parts then unrolls.
template <class T, class Acc, int kCount>
void sum_parts(T* __restrict out, const T* const* parts, int count, int64_t n) {
  const T* p[kCount > 0 ? kCount : kMaxRanks];
  const int total = kCount > 0 ? kCount : count;
  for (int r = 0; r < total; ++r) p[r] = parts[r];
  for (int64_t i = 0; i < n; ++i) {
    Acc sum = to_float(p[0][i]);
    for (int r = 1; r < total; ++r) sum += to_float(p[r][i]);
    if constexpr (__is_same(T, Acc)) {
      out[i] = sum;
    } else {
      out[i] = from_float<T>(sum);
    }
  }
}

template <class T, class Acc> void sum_typed(void* out, const void* const* parts, int count, int64_t n) {
  auto* o = static_cast<T*>(out);
  auto p = reinterpret_cast<const T* const*>(parts);
  if (count == 2) return sum_parts<T, Acc, 2>(o, p, count, n);
  if (count == 3) return sum_parts<T, Acc, 3>(o, p, count, n);
  if (count == 4) return sum_parts<T, Acc, 4>(o, p, count, n);
  sum_parts<T, Acc, 0>(o, p, count, n);
}

void sum(Dtype dtype, void* out, const void* const* parts, int count, int64_t n) {
  if (dtype == Dtype::kFloat64) return sum_typed<double, double>(out, parts, count, n);
  if (dtype == Dtype::kInt32) return sum_typed<int32_t, int32_t>(out, parts, count, n);
  if (dtype == Dtype::kInt64) return sum_typed<int64_t, int64_t>(out, parts, count, n);
  with_dtype(dtype, [&](auto zero) { sum_typed<decltype(zero), float>(out, parts, count, n); });
}

template <class T, int kCount, bool kBias>
void sum_row(T* __restrict out, const float* const* parts, int count, int64_t offset, int64_t columns,
             const float* __restrict bias) {
  const float* p[kCount > 0 ? kCount : kMaxRanks];
  const int total = kCount > 0 ? kCount : count;
  for (int r = 0; r < total; ++r) p[r] = parts[r] + offset;
  for (int64_t i = 0; i < columns; ++i) {
    float sum = p[0][i];
    for (int r = 1; r < total; ++r) sum += p[r][i];
    if constexpr (kBias) sum += bias[i];
    out[i] = from_float<T>(sum);
  }
}

template <class T, int kCount>
void sum_rows_counted(T* out, const float* const* parts, int count, int64_t rows, int64_t columns,
                      const float* bias) {
  if (bias == nullptr) return sum_row<T, kCount, false>(out, parts, count, 0, rows * columns, nullptr);
  for (int64_t row = 0; row < rows; ++row) {
    sum_row<T, kCount, true>(out + row * columns, parts, count, row * columns, columns, bias);
  }
}

void sum_rows(Dtype out_dtype, void* out, const float* const* parts, int count, int64_t rows, int64_t columns,
              const float* bias) {
  with_dtype(out_dtype, [&](auto zero) {
    auto* o = static_cast<decltype(zero)*>(out);
    if (count == 2) return sum_rows_counted<decltype(zero), 2>(o, parts, count, rows, columns, bias);
    if (count == 3) return sum_rows_counted<decltype(zero), 3>(o, parts, count, rows, columns, bias);
    if (count == 4) return sum_rows_counted<decltype(zero), 4>(o, parts, count, rows, columns, bias);
    sum_rows_counted<decltype(zero), 0>(o, parts, count, rows, columns, bias);
  });
}

template <class Wire, int kCount>
void add_tile_counted(float* tile, const void* const* parts, int count, int own, int64_t n) {
  const int total = kCount > 0 ? kCount : count;
  const Wire* p[kMaxRanks];
  for (int r = 0; r < total; ++r) p[r] = static_cast<const Wire*>(parts[r]);
  if (kCount == 2) {
    const Wire* __restrict peer = p[1 - own];  // a + b == b + a: the order of two does not matter
    for (int64_t i = 0; i < n; ++i) tile[i] += to_float(peer[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float mine = tile[i];
    float sum = own == 0 ? mine : to_float(p[0][i]);
    for (int r = 1; r < total; ++r) sum += r == own ? mine : to_float(p[r][i]);
    tile[i] = sum;
  }
}

void add_tile(Dtype wire, float* tile, const void* const* parts, int count, int own, int64_t n) {
  with_dtype(wire, [&](auto zero) {
    using Wire = decltype(zero);
    if (count == 2) return add_tile_counted<Wire, 2>(tile, parts, count, own, n);
    if (count == 3) return add_tile_counted<Wire, 3>(tile, parts, count, own, n);
    if (count == 4) return add_tile_counted<Wire, 4>(tile, parts, count, own, n);
    add_tile_counted<Wire, 0>(tile, parts, count, own, n);
  });
}

template <class T>
void store_row(T* __restrict out, const float* __restrict tile, const float* __restrict bias,
               int64_t columns) {
  if (bias == nullptr) {
    for (int64_t i = 0; i < columns; ++i) out[i] = from_float<T>(tile[i]);
  } else {
    for (int64_t i = 0; i < columns; ++i) out[i] = from_float<T>(tile[i] + bias[i]);
  }
}

void store_tile(Dtype dtype, void* out, int64_t ld, const float* tile, int64_t rows, int64_t columns,
                const float* bias) {
  with_dtype(dtype, [&](auto zero) {
    auto* o = static_cast<decltype(zero)*>(out);
    for (int64_t row = 0; row < rows; ++row) {
      if (columns == kTileColumns) {
        store_row(o + row * ld, tile + row * kTileColumns, bias, kTileColumns);
      } else {
        store_row(o + row * ld, tile + row * kTileColumns, bias, columns);
      }
    }
  });
}

void widen(Dtype dtype, float* __restrict out, const void* in, int64_t n) {
  with_dtype(dtype, [&](auto zero) {
    const auto* p = static_cast<const decltype(zero)*>(in);
    for (int64_t i = 0; i < n; ++i) out[i] = to_float(p[i]);
  });
}

void interleave_pairs(uint32_t* __restrict panel, const uint16_t* rows, int64_t row_stride, int64_t columns,
                      int64_t depth) {
  for (int64_t k = 0; k < depth; k += 2) {
    const uint16_t* low = rows + k * row_stride;
    const uint16_t* high = low + row_stride;
    uint32_t* out = panel + k / 2 * kTileColumns;
    if (k + 1 < depth) {
      for (int64_t j = 0; j < columns; ++j) out[j] = low[j] | static_cast<uint32_t>(high[j]) << 16;
    } else {
      for (int64_t j = 0; j < columns; ++j) out[j] = low[j];
    }
    for (int64_t j = columns; j < kTileColumns; ++j) out[j] = 0;
  }
}

// 16 words of every column at a time: the block of the panel (4 KiB) stays in L1 while columns are read in a row.
void transpose_words_plain(uint32_t* __restrict panel, const uint32_t* rows, int64_t row_stride,
                           int64_t columns, int64_t words) {
  for (int64_t k = 0; k < words; k += 16) {
    const int64_t depth = words - k < 16 ? words - k : 16;
    for (int64_t j = 0; j < kTileColumns; ++j) {
      for (int64_t i = 0; i < depth; ++i) {
        panel[(k + i) * kTileColumns + j] = j < columns ? rows[j * row_stride + k + i] : 0;
      }
    }
  }
}

inline Floats load_floats(const float* p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
inline Floats load_floats(const BFloat16* p) {
  Halves half;
  __builtin_memcpy(&half, p, sizeof(half));
  return reinterpret_cast<Floats>(__builtin_convertvector(half, Words) << 16);
}

inline float add_across(Floats v) {
  float sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += v[i];
  return sum;
}

// kRows x kColumns dot products at once: each vector of x and w is loaded once for all of them.
template <class T, int kRows, int kColumns>
void dot_block(const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t depth, float* tile) {
  Floats sums[kRows][kColumns] = {};
  int64_t k = 0;
  for (; k + kWidth <= depth; k += kWidth) {
    Floats columns[kColumns];
    for (int j = 0; j < kColumns; ++j) {
      columns[j] = load_floats(w + j * w_stride + k);
      __builtin_prefetch(w + (j + kColumns) * w_stride + k);
    }
    for (int i = 0; i < kRows; ++i) {
      const Floats row = load_floats(x + i * x_stride + k);
      for (int j = 0; j < kColumns; ++j) sums[i][j] += row * columns[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      float sum = add_across(sums[i][j]);
      for (int64_t t = k; t < depth; ++t)
        sum += to_float(x[i * x_stride + t]) * to_float(w[j * w_stride + t]);
      tile[i * kTileColumns + j] = sum;
    }
  }
}

template <class T>
void dot_columns(const T* x, int64_t x_stride, int64_t rows, const T* w, int64_t w_stride, int64_t columns,
                 int64_t depth, float* tile) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) {
    int64_t i = 0;
    const T* four = w + j * w_stride;
    for (; i + 4 <= rows; i += 4) {
      dot_block<T, 4, 4>(x + i * x_stride, x_stride, four, w_stride, depth, tile + i * kTileColumns + j);
    }
    for (; i < rows; ++i) {
      dot_block<T, 1, 4>(x + i * x_stride, x_stride, four, w_stride, depth, tile + i * kTileColumns + j);
    }
  }
  for (; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      dot_block<T, 1, 1>(x + i * x_stride, x_stride, w + j * w_stride, w_stride, depth,
                         tile + i * kTileColumns + j);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (j = columns; j < kTileColumns; ++j) tile[i * kTileColumns + j] = 0;
  }
}

void dot_tile(Dtype dtype, const void* x, int64_t x_stride, int64_t rows, const void* w, int64_t w_stride,
              int64_t columns, int64_t depth, float* tile) {
  if (dtype == Dtype::kBFloat16) {
    dot_columns(static_cast<const BFloat16*>(x), x_stride, rows, static_cast<const BFloat16*>(w), w_stride,
                columns, depth, tile);
  } else {
    dot_columns(static_cast<const float*>(x), x_stride, rows, static_cast<const float*>(w), w_stride, columns,
                depth, tile);
  }
}

void panel_tile(const float* x, int64_t x_stride, int64_t rows, const float* panel, int64_t depth,
                float* tile) {
  constexpr int kSets = 4;
  constexpr int kVectors = kTileColumns / kWidth;
  for (int64_t row = 0; row < rows; ++row) {
    const float* values = x + row * x_stride;
    Floats sums[kSets][kVectors] = {};
    int64_t k = 0;
    for (; k + kSets <= depth; k += kSets) {
      for (int set = 0; set < kSets; ++set) {
        const float* line = panel + (k + set) * kTileColumns;
        __builtin_prefetch(line + 32 * kTileColumns);
        for (int v = 0; v < kVectors; ++v) sums[set][v] += values[k + set] * load_floats(line + v * kWidth);
      }
    }
    for (; k < depth; ++k) {
      for (int v = 0; v < kVectors; ++v) {
        sums[0][v] += values[k] * load_floats(panel + k * kTileColumns + v * kWidth);
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const Floats total = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
      __builtin_memcpy(tile + row * kTileColumns + v * kWidth, &total, sizeof(total));
    }
  }
}
