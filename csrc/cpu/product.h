// The tile engine: x times the transpose of a weight, one tile at a time, in whatever order a schedule asks for.
//
// Weights are multiplied in panels of kTileColumns columns, depth first: [depth][64] fp32, or [depth / 2][64][2] bf16.
// A frozen weight may come in this layout; else panels are packed as they are needed, once per call.
#pragma once

#include <cstdint>
#include <vector>

#include "core/call.h"
#include "cpu/isa.h"
#include "cpu/scratch.h"

namespace interlace {

// A weight [n, k] with any strides (in elements), or one packed into panels.
struct WeightView {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  int64_t n = 0;
  int64_t k = 0;
  int64_t stride_n = 0;
  int64_t stride_k = 0;
  bool packed = false;
};

// Rows of x in compute type, depth padded to what the engine reads.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;  // bytes from row to row
};

// The type tiles are multiplied in: bf16 stays bf16 where the processor can, the rest becomes fp32.
Dtype compute_dtype(Dtype dtype);
// Depth as the engine sees it: even for bf16.
int64_t padded_depth(Dtype compute, int64_t depth);
// 32-bit words a panel holds per column.
int64_t panel_words(Dtype compute, int64_t depth);
inline int64_t panel_bytes(Dtype compute, int64_t depth) {
  return panel_words(compute, depth) * kTileColumns * 4;
}
void pack_panel(const WeightView& weight, int64_t panel, Dtype compute, uint32_t* out);
void unpack_panel(const WeightView& packed, int64_t panel, Dtype compute, void* out, int64_t out_stride);

// `rows` rows of x [rows][depth] with any row stride, element stride 1, into compute type with zero padding.
void stage_rows(Dtype dtype, Dtype compute, const char* x, int64_t row_stride_bytes, int64_t rows,
                int64_t depth, char* out);

constexpr int64_t kTileRows = 64;  // with kTileColumns: the fp32 tile is 16 KiB and stays in L1

class Product {
 public:
  // Sum over terms of x_i W_i^T, all of the same n and dtype. `rows` is how many rows will be asked for in all;
  // `revisits` says that panels are asked for again after other panels (they are then packed once and kept).
  Product(std::vector<WeightView> weights, int64_t rows, bool revisits);
  Product(const Product&) = delete;
  ~Product();

  Dtype compute() const { return compute_; }
  int64_t n() const { return weights_[0].n; }
  int64_t panels() const { return (n() + kTileColumns - 1) / kTileColumns; }
  int64_t columns(int64_t panel) const {
    const int64_t left = n() - panel * kTileColumns;
    return left < kTileColumns ? left : kTileColumns;
  }
  // Pack now what would be packed on first use. Before several threads compute tiles.
  void pack_all();

  // For each tile of up to kTileRows rows of the unit: epilogue(first row, rows, tile). x has one entry per term.
  template <class Epilogue> void unit(const Rows* x, int64_t rows, int64_t panel, Epilogue&& epilogue) {
    alignas(64) float tile[kTileRows * kTileColumns];
    const char* panels[kMaxTerms];
    const Scratch transient = find_panels(panel, panels);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int64_t count = rows - row < kTileRows ? rows - row : kTileRows;
      multiply(x, row, count, panel, panels, tile);
      epilogue(row, count, tile);
    }
  }

 private:
  static constexpr int kMaxTerms = 16;
  Scratch find_panels(int64_t panel, const char** out);
  void multiply(const Rows* x, int64_t row, int64_t rows, int64_t panel, const char* const* panels,
                float* tile);

  std::vector<WeightView> weights_;
  Dtype compute_;
  bool dot_ = false;  // few rows, plain weights: no panels at all
  bool all_packed_ = false;
  bool keep_ = false;
  Scratch kept_;
  std::vector<int64_t> term_offset_;  // where the panels of a term begin
  std::vector<char> packed_;  // by term and panel
};

}  // namespace interlace
