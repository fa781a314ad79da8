// Elementwise and packing kernels, built once per instruction set and picked at load.
//
// Tiles are [rows][kTileColumns] fp32, dense. "parts" are the contributions of the ranks, in rank order: sums are
// always taken in that order, so that every rank and every run gets the same bits.
#pragma once

#include <cstdint>

#include "core/call.h"

namespace interlace {

constexpr int64_t kTileColumns = 64;  // columns of a weight panel: four AVX-512 registers, one brgemm call

struct Isa {
  const char* name;
  // out[i] = sum over parts, accumulated in fp32 (fp64 for fp64)
  void (*sum)(Dtype dtype, void* out, const void* const* parts, int count, int64_t n);
  // out[row, :columns] = sum over fp32 parts + bias; parts and out are row-major with `columns` columns
  void (*sum_rows)(Dtype out_dtype, void* out, const float* const* parts, int count, int64_t rows,
                   int64_t columns, const float* bias);
  // tile = sum over parts, part `own` being the tile itself; the others are dense tiles of `wire` type
  void (*add_tile)(Dtype wire, float* tile, const void* const* parts, int count, int own, int64_t n);
  // out[row * ld + column] = tile + bias, for the first `columns` columns
  void (*store_tile)(Dtype dtype, void* out, int64_t ld, const float* tile, int64_t rows, int64_t columns,
                     const float* bias);
  // the same for a dense tile that bypasses this core's cache; `out` is 64-byte aligned. stream_fence() makes such
  // stores visible before whatever this thread publishes next.
  void (*stream_tile)(Dtype dtype, void* out, const float* tile, int64_t n);
  void (*stream_fence)();
  void (*widen)(Dtype dtype, float* out, const void* in, int64_t n);
  // panel[k][column] = rows[column][k] in 32-bit words, zero beyond `columns`
  void (*transpose_words)(uint32_t* panel, const uint32_t* rows, int64_t row_stride, int64_t columns,
                          int64_t words);
  // panel[k][column] = (low: rows[2k][column], high: rows[2k + 1][column]), zero beyond `columns` and beyond `depth`
  void (*interleave_pairs)(uint32_t* panel, const uint16_t* rows, int64_t row_stride, int64_t columns,
                           int64_t depth);
  // tile[m][column] = x[m, :] . w[column, :], for weights in plain layout; tile columns beyond `columns` are zero
  void (*dot_tile)(Dtype dtype, const void* x, int64_t x_stride, int64_t rows, const void* w,
                   int64_t w_stride, int64_t columns, int64_t depth, float* tile);
  // tile[m][column] = x[m, :] . panel[:, column] in fp32, for few rows: four sums over every fourth k, because one
  // chain over all of them rounds twice as badly as torch's own product
  void (*panel_tile)(const float* x, int64_t x_stride, int64_t rows, const float* panel, int64_t depth,
                     float* tile);
};

const Isa& isa();  // the one in use
void cap_isa(const char* name);  // "generic", "avx2", "avx512", "": never beyond what the processor has

const Isa& isa_generic();
#if !defined(INTERLACE_NO_X86)
const Isa& isa_avx2();
const Isa& isa_avx512();
#endif

}  // namespace interlace
