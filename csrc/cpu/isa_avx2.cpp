// The kernels for AVX2 + FMA + F16C. Compiled with these flags: nothing here may run before isa() has picked it.
#include <immintrin.h>

#include "core/signal.h"
#include "cpu/isa.h"

namespace interlace {
namespace isa_avx2_kernels {

constexpr int kWidth = 8;
#include "cpu/isa_kernels.inl"

void stream_fence() { _mm_sfence(); }

void stream_tile(Dtype wire, void* out, const float* tile, int64_t n) {
  alignas(64) char row[kTileColumns * 4];
  const int64_t bytes = kTileColumns * dtype_size(wire);
  for (int64_t i = 0; i < n; i += kTileColumns) {
    store_tile(wire, row, kTileColumns, tile + i, 1, kTileColumns, nullptr);
    for (int64_t b = 0; b < bytes; b += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(static_cast<char*>(out) + i * dtype_size(wire) + b),
                          _mm256_load_si256(reinterpret_cast<const __m256i*>(row + b)));
    }
  }
}

}  // namespace isa_avx2_kernels

const Isa& isa_avx2() {
  using namespace isa_avx2_kernels;
  static const Isa table{"avx2",           sum,        sum_rows,
                         add_tile,         store_tile, stream_tile,
                         stream_fence,     widen,      transpose_words_plain,
                         interleave_pairs, dot_tile,   panel_tile};
  return table;
}

}  // namespace interlace
