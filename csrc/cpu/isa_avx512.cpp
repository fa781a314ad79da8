// The kernels for AVX-512 F/BW/DQ/VL. Compiled with these flags: nothing here may run before isa() has picked it.
#include <immintrin.h>

#include "core/signal.h"
#include "cpu/isa.h"

namespace interlace {
namespace isa_avx512_kernels {

constexpr int kWidth = 16;
#include "cpu/isa_kernels.inl"

void stream_fence() { _mm_sfence(); }

void stream_tile(Dtype wire, void* out, const float* tile, int64_t n) {
  alignas(64) char row[kTileColumns * 4];
  const int64_t bytes = kTileColumns * dtype_size(wire);
  for (int64_t i = 0; i < n; i += kTileColumns) {
    store_tile(wire, row, kTileColumns, tile + i, 1, kTileColumns, nullptr);
    char* o = static_cast<char*>(out) + i * dtype_size(wire);
    for (int64_t b = 0; b < bytes; b += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(o + b), _mm512_load_si512(row + b));
    }
  }
}

// 16 x 16 words in registers: four rounds of interleaving, each doubling the run of words that are in place.
inline void transpose_16x16(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

void transpose_words(uint32_t* panel, const uint32_t* rows, int64_t row_stride, int64_t columns,
                     int64_t words) {
  if (columns < kTileColumns) return transpose_words_plain(panel, rows, row_stride, columns, words);
  int64_t k = 0;
  for (; k + 16 <= words; k += 16) {
    for (int64_t j = 0; j < kTileColumns; j += 16) {
      __m512i block[16];
      for (int i = 0; i < 16; ++i) block[i] = _mm512_loadu_si512(rows + (j + i) * row_stride + k);
      transpose_16x16(block);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (k + i) * kTileColumns + j, block[i]);
    }
  }
  if (k < words) transpose_words_plain(panel + k * kTileColumns, rows + k, row_stride, columns, words - k);
}

}  // namespace isa_avx512_kernels

const Isa& isa_avx512() {
  using namespace isa_avx512_kernels;
  static const Isa table{"avx512",     sum,   sum_rows,        add_tile,         store_tile, stream_tile,
                         stream_fence, widen, transpose_words, interleave_pairs, dot_tile,   panel_tile};
  return table;
}

}  // namespace interlace
