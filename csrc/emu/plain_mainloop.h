// A mainloop of ordinary loads, for tests of the hooks alone: any tile shape, few threads, no tensor cores.
#pragma once

#include <type_traits>

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/gemm_arguments.h"
#include "cuda/kernels/gemm_hooks.h"
#include "emu/operand_value.h"

namespace interlace::emu {

template <class T, int kRows, int kColumns> struct PlainMainloop {
  using Element = T;
  using Out = std::conditional_t<sizeof(T) == 1, BFloat16, T>;
  using Maps = GatheredRows;
  static constexpr int kThreads = 32;
  static constexpr uint32_t kSharedBytes = 0;
  static constexpr int kTileRows = kRows;
  static constexpr int kTileColumns = kColumns;
  static constexpr bool kSwitch = true;

  static Maps maps(const GemmArguments&, const GatheredRows& gathered) { return gathered; }

  template <class Hooks>
  static void run(const Maps& gathered, const GemmArguments& arguments, Hooks& hooks, uint32_t block,
                  uint32_t blocks, char*) {
    static thread_local bool open;
    for (int64_t i = block; i < hooks.tiles(); i += blocks) {
      const TileWork work = hooks.tile(i);
      if (ptx::tid_x() == 0) open = !Hooks::kWaits || hooks.ready(work);
      ptx::barrier_sync();
      const int packs = (work.columns + kStoreColumns - 1) / kStoreColumns;
      for (int item = static_cast<int>(ptx::tid_x()); item < work.rows * packs; item += kThreads) {
        const int row = item / packs, column = item % packs * kStoreColumns;
        const int left = work.columns - column;
        float values[kStoreColumns] = {};
        for (int32_t segment = 0; segment < arguments.segments(); ++segment) {
          multiply(gathered, arguments, work, segment, row, column, values);
        }
        hooks.store(work, row, column, values, left < kStoreColumns ? left : kStoreColumns);
      }
      const bool publishes = Hooks::kPublishes && open;
      ptx::barrier_sync();
      if (publishes && ptx::tid_x() == 0) hooks.stored(work);
    }
    ptx::barrier_sync();
  }

 private:
  static void multiply(const GatheredRows& gathered, const GemmArguments& arguments, const TileWork& work,
                       int32_t segment, int row, int column, float (&values)[kStoreColumns]) {
    const GemmProduct& product = arguments.products[arguments.summed ? segment : work.product];
    const T* x = static_cast<const T*>(arguments.x[segment]) + (work.row + row) * arguments.x_stride[segment];
    if (work.source != 0) {
      x = static_cast<const T*>(gathered.halves[work.source - 1]) + (work.row + row) * gathered.stride;
    }
    for (int i = 0; i < kStoreColumns && column + i < work.columns; ++i) {
      const T* const weight =
          static_cast<const T*>(product.weight) + (work.column + column + i) * product.stride;
      for (int64_t k = 0; k < product.depth; ++k) {
        const T element = x[k], factor = weight[k];  // see emu/sanitizer.h: loads of their own
        values[i] += value_of(element) * value_of(factor);
      }
    }
  }
};

}  // namespace interlace::emu
