#include "cpu/product.h"

#include <algorithm>
#include <cstring>

#include "core/heuristics.h"
#include "core/schedule.h"
#include "cpu/brgemm.h"
#include "cpu/scratch.h"

namespace interlace {
namespace {

// Depth of one brgemm call: the panel slice and 64 rows of x stay in L2. fp32 is cut shorter than that needs, because
// one chain of additions over the whole depth rounds worse than torch's own product (1.6x at K = 1030, 1.1x so).
constexpr int64_t kDepthFloat32 = 256;
constexpr int64_t kDepthBFloat16 = 1024;
constexpr int64_t kPanelTileRows = 2;  // from three rows on brgemm is as exact as torch, and faster

const char* element(const WeightView& w, int64_t n, int64_t k) {
  return static_cast<const char*>(w.data) + (n * w.stride_n + k * w.stride_k) * dtype_size(w.dtype);
}

bool pairs_are_words(const WeightView& w) {
  return w.k % 2 == 0 && w.stride_n % 2 == 0 && reinterpret_cast<uintptr_t>(w.data) % 4 == 0;
}

void pack_pairs(const WeightView& w, int64_t first, int64_t columns, uint32_t* out) {
  if (w.stride_k == 1 && pairs_are_words(w)) {
    isa().transpose_words(out, reinterpret_cast<const uint32_t*>(element(w, first, 0)), w.stride_n / 2,
                          columns, w.k / 2);
    return;
  }
  if (w.stride_n == 1) {
    isa().interleave_pairs(out, reinterpret_cast<const uint16_t*>(element(w, first, 0)), w.stride_k, columns,
                           w.k);
    return;
  }
  auto* halves = reinterpret_cast<uint16_t*>(out);
  std::memset(out, 0, panel_bytes(Dtype::kBFloat16, w.k));
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t k = 0; k < w.k; ++k) {
      std::memcpy(halves + (k / 2 * kTileColumns + j) * 2 + k % 2, element(w, first + j, k), 2);
    }
  }
}

void pack_floats(const WeightView& w, int64_t first, int64_t columns, float* out) {
  if (w.stride_n == 1) {
    for (int64_t k = 0; k < w.k; ++k) {
      isa().widen(w.dtype, out + k * kTileColumns, element(w, first, k), columns);
      std::fill(out + k * kTileColumns + columns, out + (k + 1) * kTileColumns, 0.0f);
    }
    return;
  }
  if (w.stride_k == 1 && w.dtype == Dtype::kFloat32) {
    isa().transpose_words(reinterpret_cast<uint32_t*>(out),
                          reinterpret_cast<const uint32_t*>(element(w, first, 0)), w.stride_n, columns, w.k);
    return;
  }
  const Scratch lease(kTileColumns * w.k * 4);
  auto* wide = reinterpret_cast<float*>(lease.data());
  for (int64_t j = 0; j < columns; ++j) {
    if (w.stride_k == 1) {
      isa().widen(w.dtype, wide + j * w.k, element(w, first + j, 0), w.k);
    } else {
      for (int64_t k = 0; k < w.k; ++k) isa().widen(w.dtype, wide + j * w.k + k, element(w, first + j, k), 1);
    }
  }
  isa().transpose_words(reinterpret_cast<uint32_t*>(out), reinterpret_cast<const uint32_t*>(wide), w.k,
                        columns, w.k);
}

}  // namespace

Dtype compute_dtype(Dtype dtype) {
  return dtype == Dtype::kBFloat16 && engine().bfloat16_tiles ? Dtype::kBFloat16 : Dtype::kFloat32;
}

int64_t padded_depth(Dtype compute, int64_t depth) {
  return compute == Dtype::kBFloat16 ? (depth + 1) / 2 * 2 : depth;
}

int64_t panel_words(Dtype compute, int64_t depth) {
  return compute == Dtype::kBFloat16 ? (depth + 1) / 2 : depth;
}

void pack_panel(const WeightView& weight, int64_t panel, Dtype compute, uint32_t* out) {
  const int64_t first = panel * kTileColumns;
  const int64_t columns = std::min(kTileColumns, weight.n - first);
  if (compute == Dtype::kBFloat16) {
    pack_pairs(weight, first, columns, out);
  } else {
    pack_floats(weight, first, columns, reinterpret_cast<float*>(out));
  }
}

void unpack_panel(const WeightView& packed, int64_t panel, Dtype compute, void* out, int64_t out_stride) {
  const int64_t columns = std::min(kTileColumns, packed.n - panel * kTileColumns);
  const char* base = static_cast<const char*>(packed.data) + panel * panel_bytes(compute, packed.k);
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t k = 0; k < packed.k; ++k) {
      if (compute == Dtype::kBFloat16) {
        reinterpret_cast<uint16_t*>(out)[j * out_stride + k] =
            reinterpret_cast<const uint16_t*>(base)[(k / 2 * kTileColumns + j) * 2 + k % 2];
      } else {
        reinterpret_cast<float*>(out)[j * out_stride + k] =
            reinterpret_cast<const float*>(base)[k * kTileColumns + j];
      }
    }
  }
}

void stage_rows(Dtype dtype, Dtype compute, const char* x, int64_t row_stride_bytes, int64_t rows,
                int64_t depth, char* out) {
  const int64_t size = dtype_size(compute);
  const int64_t padded = padded_depth(compute, depth);
  for (int64_t row = 0; row < rows; ++row) {
    char* to = out + row * padded * size;
    const char* from = x + row * row_stride_bytes;
    if (dtype == compute) {
      std::memcpy(to, from, depth * size);
    } else {
      isa().widen(dtype, reinterpret_cast<float*>(to), from, depth);
    }
    if (padded != depth) std::memset(to + depth * size, 0, size);
  }
}

Product::Product(std::vector<WeightView> weights, int64_t rows, bool revisits)
    : weights_(std::move(weights)) {
  compute_ = compute_dtype(weights_[0].dtype);
  dot_ = rows <= kDotRows;
  bool packed = true;
  for (const WeightView& w : weights_) {
    dot_ = dot_ && !w.packed && w.stride_k == 1 && w.dtype == compute_;
    packed = packed && w.packed;
  }
  all_packed_ = packed;
  keep_ = revisits && !dot_ && !packed;
  int64_t bytes = 0;
  for (const WeightView& w : weights_) {
    term_offset_.push_back(bytes);
    bytes += (keep_ ? panels() : 1) * panel_bytes(compute_, w.k);
  }
  if (!keep_) return;
  kept_ = Scratch(bytes);
  packed_.assign(weights_.size() * panels(), 0);
}

Product::~Product() {
  if (compute_ == Dtype::kBFloat16) brgemm_release();
}

void Product::pack_all() {
  if (!keep_) return;
  const char* unused[kMaxTerms];
  for (int64_t panel = 0; panel < panels(); ++panel) find_panels(panel, unused);
}

// Pointers to this panel of every term. What is packed for this unit only lives in the scratch that is returned.
Scratch Product::find_panels(int64_t panel, const char** out) {
  if (dot_) return {};
  Scratch transient;
  char* base = kept_.data();
  if (!keep_ && !all_packed_) {
    transient = Scratch(term_offset_.back() + panel_bytes(compute_, weights_.back().k));
    base = transient.data();
  }
  const int64_t terms = static_cast<int64_t>(weights_.size());
  for (int64_t term = 0; term < terms; ++term) {
    const WeightView& w = weights_[term];
    const int64_t bytes = panel_bytes(compute_, w.k);
    if (w.packed) {
      out[term] = static_cast<const char*>(w.data) + panel * bytes;
      continue;
    }
    char* to = base + term_offset_[term] + (keep_ ? panel * bytes : 0);
    out[term] = to;
    if (keep_ && packed_[term * panels() + panel]) continue;
    pack_panel(w, panel, compute_, reinterpret_cast<uint32_t*>(to));
    if (keep_) packed_[term * panels() + panel] = 1;
  }
  return transient;
}

void Product::multiply(const Rows* x, int64_t row, int64_t rows, int64_t panel, const char* const* panels,
                       float* tile) {
  const int64_t size = dtype_size(compute_);
  const int64_t step = compute_ == Dtype::kBFloat16 ? kDepthBFloat16 : kDepthFloat32;
  bool accumulate = false;
  for (size_t term = 0; term < weights_.size(); ++term) {
    const WeightView& w = weights_[term];
    const char* a = x[term].data + row * x[term].stride;
    if (dot_) {
      alignas(64) float part[kDotRows * kTileColumns];
      float* to = accumulate ? part : tile;
      isa().dot_tile(compute_, a, x[term].stride / size, rows, element(w, panel * kTileColumns, 0),
                     w.stride_n, columns(panel), w.k, to);
      for (int64_t i = 0; accumulate && i < rows * kTileColumns; ++i) tile[i] += part[i];
      accumulate = true;
      continue;
    }
    if (rows <= kPanelTileRows && compute_ == Dtype::kFloat32) {
      alignas(64) float part[kPanelTileRows * kTileColumns];
      float* to = accumulate ? part : tile;
      isa().panel_tile(reinterpret_cast<const float*>(a), x[term].stride / size, rows,
                       reinterpret_cast<const float*>(panels[term]), w.k, to);
      for (int64_t i = 0; accumulate && i < rows * kTileColumns; ++i) tile[i] += part[i];
      accumulate = true;
      continue;
    }
    const int64_t depth = padded_depth(compute_, w.k);
    for (int64_t k = 0; k < depth; k += step) {
      brgemm(compute_, rows, std::min(step, depth - k), x[term].stride / size, kTileColumns, accumulate,
             a + k * size, panels[term] + k * kTileColumns * size, tile);
      accumulate = true;
    }
  }
  if (!accumulate)
    std::fill(tile, tile + rows * kTileColumns, 0.0f);  // depth 0: an empty shard of the inner dim
}

}  // namespace interlace
