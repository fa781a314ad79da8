// gemm: the plain product, no peers. Hooks for both mainloops, and what their kernels share with the fused ones.
#pragma once

#include "core/gemm_schedule.h"
#include "cuda/kernels/element.cuh"
#include "cuda/kernels/gemm_arguments.h"
#include "cuda/kernels/gemm_hooks.h"

namespace interlace {

// values[i] += array[i] for i < valid.
template <class T>
INTERLACE_DEVICE void add_columns(const T* array, int valid, float (&values)[kStoreColumns]) {
  static_assert(Pack<T>::kElements == kStoreColumns);
  const Pack<T> pack = load_pack(array, 0, valid, aligned_to_pack(array));
  INTERLACE_UNROLL
  for (int i = 0; i < kStoreColumns; ++i) values[i] += to_float(pack.elements[i]);
}

// array[i] = values[i] for i < valid.
template <class T>
INTERLACE_DEVICE void store_columns(T* array, int valid, const float (&values)[kStoreColumns]) {
  static_assert(Pack<T>::kElements == kStoreColumns);
  Pack<T> pack;
  INTERLACE_UNROLL
  for (int i = 0; i < kStoreColumns; ++i) from_float(values[i], pack.elements[i]);
  store_pack(array, 0, valid, aligned_to_pack(array), pack);
}

// fp8: the scale of one row of x and those of these columns of the weight.
INTERLACE_DEVICE void scale_columns(const GemmArguments& arguments, const GemmProduct& product, float x_scale,
                                    int64_t column, int valid, float (&values)[kStoreColumns]) {
  INTERLACE_UNROLL
  for (int i = 0; i < kStoreColumns; ++i) {
    if (i < valid) values[i] *= x_scale * product.weight_scale[arguments.row_wise ? column + i : 0];
  }
}

INTERLACE_DEVICE float scale_of_row(const GemmArguments& arguments, int64_t row) {
  return arguments.x_scale[arguments.row_wise ? row : 0];
}

template <class Tile> struct PlainHooks {
  static constexpr bool kWaits = false;
  static constexpr bool kPublishes = false;
  using Out = typename Tile::Out;

  const GemmArguments& arguments;

  // The columns of all products lie side by side: they share the rows of x.
  INTERLACE_DEVICE OutColumns columns() const {
    OutColumns columns;
    columns.outs = arguments.outs();
    columns.tile_columns = Tile::kColumns;
    INTERLACE_UNROLL
    for (int p = 0; p < kMaxProducts; ++p) columns.columns[p] = arguments.products[p].columns;
    return columns;
  }
  INTERLACE_DEVICE int32_t row_blocks() const {
    return static_cast<int32_t>(ceil_div(arguments.rows, kGemmBlockRows));
  }
  INTERLACE_DEVICE int64_t tiles() const { return row_blocks() * columns().tiles(); }
  INTERLACE_DEVICE TileWork tile(int64_t index) const {
    const TilePlace place =
        tile_place(static_cast<int32_t>(index), row_blocks(), static_cast<int32_t>(columns().tiles()),
                   row_blocks_together(Tile::kColumns));
    const OutColumns::Place across = columns().place(place.column_block);
    const int64_t row = int64_t{place.row_block} * kGemmBlockRows;
    const int64_t left = arguments.rows - row;
    TileWork work;
    work.row = static_cast<int32_t>(row);
    work.rows = static_cast<int32_t>(left < kGemmBlockRows ? left : kGemmBlockRows);
    work.product = across.out;
    work.column = across.column;
    work.columns = across.columns;
    return work;
  }

  INTERLACE_DEVICE bool ready(const TileWork&) const { return true; }
  INTERLACE_DEVICE void stored(const TileWork&) const {}

  INTERLACE_DEVICE void store(const TileWork& work, int row, int column, float (&values)[kStoreColumns],
                              int valid) const {
    const GemmProduct& product = arguments.products[work.product];
    const int64_t at_row = work.row + row;
    const int64_t at_column = work.column + column;
    if constexpr (Tile::kFloat8) {
      scale_columns(arguments, product, scale_of_row(arguments, at_row), at_column, valid, values);
    }
    if (product.bias != nullptr)
      add_columns(static_cast<const Out*>(product.bias) + at_column, valid, values);
    if (arguments.residual != nullptr && work.product == 0) {
      const auto* const residual = static_cast<const Out*>(arguments.residual);
      add_columns(residual + at_row * arguments.residual_stride + at_column, valid, values);
    }
    store_columns(static_cast<Out*>(product.out) + at_row * product.out_stride + at_column, valid, values);
  }
};

}  // namespace interlace
