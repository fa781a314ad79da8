// The mainloop of every GPU since sm_80: cp.async brings operands into a ring of stages, ldmatrix and mma.sync multiply
// them, hooks take the results.
//
// All 8 warps load and multiply. Step s of a tile: wait for the own copies of stage s; one block barrier, behind which
// everybody's copies are there and nobody reads stage s - 1 any more; start the copies of stage s + 2 into its place;
// multiply. The results go through the memory of the stages, so a tile ends with a drained ring.
#pragma once

#include <type_traits>

#include "cuda/kernels/device_sm80.cuh"
#include "cuda/kernels/element.cuh"
#include "cuda/kernels/gemm_arguments.h"
#include "cuda/kernels/gemm_hooks.h"
#include "cuda/kernels/gemm_store.cuh"

namespace interlace::gemm_sm80 {

constexpr int kThreads = 256;
constexpr int kWarpColumns = 2;  // warps side by side; the other 4 one below the other
constexpr int kWarpRows = kGemmBlockRows / (kThreads / 32 / kWarpColumns);  // 32
constexpr int kTileColumns = kWarpColumns * kChunkColumns;  // 128
constexpr int kStageDepth = 64;
constexpr int kStages = 3;  // 96 KiB: also sm_86 and sm_89 offer a block that much
constexpr int kTransferElements = 8;  // 16 bytes of 2-byte elements
constexpr uint32_t kXBytes = kGemmBlockRows * kStageDepth * 2;
constexpr uint32_t kStageBytes = kXBytes + kTileColumns * kStageDepth * 2;

// Element and layout: what the instance differs in.
template <class T, bool kMnMajorWeight> struct GemmTile {
  using Element = T;
  using Out = T;
  static constexpr int kColumns = kTileColumns;
  static constexpr bool kMnMajor = kMnMajorWeight;
  static constexpr bool kFloat8 = false;
  static_assert(sizeof(T) == 2);
};

struct GemmShared {
  char stages[kStages][kStageBytes];
  uint32_t open;  // 0: the rows of the tile did not come, do not publish it
};
constexpr uint32_t kSharedBytes = sizeof(GemmShared);
static_assert(kSharedBytes <= 99 * 1024, "what sm_86 offers a block");
static_assert(kStages * kStageBytes >= kThreads / 32 * kChunkFloats * sizeof(float));

// Where chunk (16 bytes) `chunk` of row `row` lies in a block of rows of kChunks: the 8 rows of an ldmatrix lie in 8
// different groups of 4 banks, whether it reads along the rows or across.
template <int kChunks> INTERLACE_DEVICE uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * kChunks + (chunk ^ (row & 7))) * kTransferBytes;
}

// A part of a stored matrix: `rows` rows of `elements` from `first` on; what lies beyond is zero in shared memory.
template <class T> struct Part {
  const T* first;
  int64_t stride;
  int64_t rows;
  int64_t elements;

  INTERLACE_DEVICE bool aligned() const {
    return reinterpret_cast<uintptr_t>(first) % kTransferBytes == 0 && stride % kTransferElements == 0;
  }
};

// All threads: kRows rows of kChunks chunks into shared memory, copies of this thread's current group. Rows that do not
// start at multiples of 16 bytes are loaded element by element.
template <int kRows, int kChunks, class T> INTERLACE_DEVICE void load_part(const Part<T>& part, char* stage) {
  const bool aligned = part.aligned();
  const uint32_t start = ptx::shared_address(stage);
  INTERLACE_UNROLL
  for (int item = 0; item < kRows * kChunks / kThreads; ++item) {
    const int index = static_cast<int>(ptx::tid_x()) + item * kThreads;
    const int row = index / kChunks, chunk = index % kChunks;
    const int64_t left = row < part.rows ? part.elements - chunk * kTransferElements : 0;
    const int valid = left < 0 ? 0 : left < kTransferElements ? static_cast<int>(left) : kTransferElements;
    const uint32_t place = swizzled<kChunks>(row, chunk);
    const T* const from =
        valid == 0 ? part.first : part.first + row * part.stride + chunk * kTransferElements;
    if (aligned) {
      ptx::cp_async_16(start + place, from, static_cast<uint32_t>(valid) * sizeof(T));
      continue;
    }
    const Pack<T> pack = load_pack(from, 0, valid, false);
    *reinterpret_cast<Pack<T>*>(stage + place) = pack;
  }
}

INTERLACE_DEVICE int32_t steps_of(int64_t depth) {
  return static_cast<int32_t>((depth + kStageDepth - 1) / kStageDepth);
}

// The steps of a tile, segment by segment of K; every segment has its own tail.
template <class Tile> struct Loader {
  using T = typename Tile::Element;
  const GatheredRows& gathered;
  const GemmArguments& arguments;
  const TileWork& work;
  int32_t segment = 0;
  int32_t step = 0;

  INTERLACE_DEVICE Loader(const GatheredRows& gathered, const GemmArguments& arguments, const TileWork& work)
      : gathered(gathered), arguments(arguments), work(work) {
    skip_empty();
  }
  INTERLACE_DEVICE const GemmProduct& product() const {
    return arguments.products[arguments.summed ? segment : work.product];
  }
  INTERLACE_DEVICE bool done() const { return segment == arguments.segments(); }
  INTERLACE_DEVICE void skip_empty() {
    while (!done() && step == steps_of(product().depth)) {
      ++segment;
      step = 0;
    }
  }
  INTERLACE_DEVICE int32_t steps() const {
    int32_t all = 0;
    for (int32_t s = 0; s < arguments.segments(); ++s) {
      all += steps_of(arguments.products[arguments.summed ? s : work.product].depth);
    }
    return all;
  }

  // All threads: start the copies of the next stage, if there is one, as one group.
  INTERLACE_DEVICE void load(char* stage) {
    if (!done()) {
      const int64_t depth = static_cast<int64_t>(step) * kStageDepth;
      const int64_t left = product().depth - depth;
      const bool own = work.source == 0;
      const T* const x = static_cast<const T*>(own ? arguments.x[segment] : gathered.halves[work.source - 1]);
      const int64_t stride = own ? arguments.x_stride[segment] : gathered.stride;
      load_part<kGemmBlockRows, kStageDepth / kTransferElements>(
          Part<T>{x + work.row * stride + depth, stride, work.rows, left}, stage);
      const T* const weight = static_cast<const T*>(product().weight);
      const int64_t rows = product().stride;
      if constexpr (Tile::kMnMajor) {
        load_part<kStageDepth, kTileColumns / kTransferElements>(
            Part<T>{weight + depth * rows + work.column, rows, left, work.columns}, stage + kXBytes);
      } else {
        load_part<kTileColumns, kStageDepth / kTransferElements>(
            Part<T>{weight + work.column * rows + depth, rows, work.columns, left}, stage + kXBytes);
      }
      ++step;
      skip_empty();
    }
    ptx::cp_async_commit_group();
  }
};

// 32 rows x 64 columns of a warp: [16 rows][8 columns][4 of a thread].
using Accumulators = float[kWarpRows / kChunkRows][kChunkColumns / 8][4];

template <class T>
INTERLACE_DEVICE void multiply(float (&c)[4], const uint32_t (&x)[4], uint32_t weight0, uint32_t weight1) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    ptx::mma_m16n8k16_bf16(c, x, weight0, weight1);
  } else {
    ptx::mma_m16n8k16_f16(c, x, weight0, weight1);
  }
}

// A warp: c += x weight^T over the 64 of K in a stage. ldmatrix takes the address of row l % 8 of matrix l / 8 from lane
// l; the four matrices are the registers of a 16 x 16 fragment of x, or of two 16 x 8 fragments of weight^T.
template <class Tile>
INTERLACE_DEVICE void multiply_stage(uint32_t stage, int first_row, int first_column, Accumulators& c) {
  const int lane = static_cast<int>(ptx::tid_x() % 32);
  INTERLACE_UNROLL
  for (int step = 0; step < kStageDepth / 16; ++step) {
    uint32_t x[kWarpRows / kChunkRows][4];
    INTERLACE_UNROLL
    for (int i = 0; i < kWarpRows / kChunkRows; ++i) {
      const int row = first_row + i * kChunkRows + lane % 16;
      ptx::ldmatrix_x4(stage + swizzled<kStageDepth / kTransferElements>(row, 2 * step + lane / 16), x[i]);
    }
    INTERLACE_UNROLL
    for (int pair = 0; pair < kChunkColumns / 16; ++pair) {
      uint32_t weight[4];
      const int column = first_column + pair * 16;
      if constexpr (Tile::kMnMajor) {
        const int row = step * 16 + lane % 16;
        const uint32_t place = swizzled<kTileColumns / kTransferElements>(row, column / 8 + lane / 16);
        ptx::ldmatrix_x4_trans(stage + kXBytes + place, weight);
      } else {
        const int row = column + lane / 16 * 8 + lane % 8;
        const uint32_t place = swizzled<kStageDepth / kTransferElements>(row, 2 * step + lane / 8 % 2);
        ptx::ldmatrix_x4(stage + kXBytes + place, weight);
      }
      INTERLACE_UNROLL
      for (int i = 0; i < kWarpRows / kChunkRows; ++i) {
        multiply<typename Tile::Element>(c[i][2 * pair], x[i], weight[0], weight[1]);
        multiply<typename Tile::Element>(c[i][2 * pair + 1], x[i], weight[2], weight[3]);
      }
    }
  }
}

// All threads: the accumulators of one tile. Nothing is on its way when it returns: the last groups are empty.
template <class Tile>
INTERLACE_DEVICE void multiply_tile(Loader<Tile>& loader, GemmShared& shared, int first_row, int first_column,
                                    Accumulators& c) {
  const int32_t steps = loader.steps();
  const bool has_rows = first_row < loader.work.rows;
  INTERLACE_UNROLL
  for (int ahead = 0; ahead < kStages - 1; ++ahead) loader.load(shared.stages[ahead]);
  int stage = 0;
  for (int32_t step = 0; step < steps; ++step) {
    ptx::cp_async_wait_group<kStages - 2>();
    // everybody's copies of this stage are there, and everybody has read the stage that is filled next
    ptx::barrier_sync();
    loader.load(shared.stages[stage == 0 ? kStages - 1 : stage - 1]);
    if (has_rows) {
      multiply_stage<Tile>(ptx::shared_address(shared.stages[stage]), first_row, first_column, c);
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// See gemm_hooks.h. `memory` holds GemmShared, aligned to 1024.
template <class Tile, class Hooks>
INTERLACE_DEVICE void gemm_tiles(const GatheredRows& gathered, const GemmArguments& arguments, Hooks& hooks,
                                 uint32_t block, uint32_t blocks, char* memory) {
  GemmShared& shared = *reinterpret_cast<GemmShared*>(memory);
  const int warp = static_cast<int>(ptx::tid_x() / 32);
  const int first_row = warp / kWarpColumns * kWarpRows;
  const int first_column = warp % kWarpColumns * kChunkColumns;
  float* const chunk = reinterpret_cast<float*>(shared.stages[0]) + warp * kChunkFloats;
  const int64_t tiles = hooks.tiles();
  for (int64_t i = block; i < tiles; i += blocks) {
    const TileWork work = hooks.tile(i);
    bool open = true;
    if constexpr (Hooks::kWaits) {
      if (ptx::tid_x() == 0) shared.open = hooks.ready(work);
      // what thread 0 acquired is visible to the copies of all threads
      ptx::barrier_sync();
      open = shared.open != 0;
    }
    Accumulators c = {};
    Loader<Tile> loader(gathered, arguments, work);
    multiply_tile<Tile>(loader, shared, first_row, first_column, c);
    ptx::barrier_sync();  // the last stage is read: its memory may take results
    INTERLACE_UNROLL
    for (int j = 0; j < kWarpRows / kChunkRows; ++j) {
      const int row = first_row + j * kChunkRows;
      if (row < work.rows && first_column < work.columns) {
        store_chunk(&c[j][0][0], work, row, first_column, hooks, chunk);
      }
    }
    // the results have left the stages; release: all stores are ordered before what thread 0 does next
    ptx::barrier_sync();
    if constexpr (Hooks::kPublishes) {
      if (ptx::tid_x() == 0 && open) hooks.stored(work);
    }
  }
}

}  // namespace interlace::gemm_sm80
