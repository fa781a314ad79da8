// What a mainloop asks of the kernel around it. Both mainloops (gemm_sm80.cuh, gemm_sm90.cuh) read this file.
//
//   template <class Tile, class Hooks>
//   INTERLACE_DEVICE void gemm_tiles_sm90(const GemmTensorMaps& maps, const GemmArguments& arguments, Hooks& hooks,
//                                         uint32_t block, uint32_t blocks, char* shared);
//
// All threads of the block call it, once per launch. Block `block` of `blocks` multiplies tiles block, block + blocks,
// ... in the order of the hooks. `shared`: kSharedBytes<Tile> bytes, aligned to 1024; free again when it returns, after a
// block barrier. Threads: kGemmThreads. Each thread has its own copy of the hooks.
//
//   struct Hooks {
//     static constexpr bool kWaits, kPublishes;          // whether ready / stored do anything
//     int64_t tiles() const;
//     TileWork tile(int64_t i) const;                    // pure: producer and consumers both ask
//     bool ready(const TileWork&);                       // kWaits. One thread, before the tile's first load; true: the
//                                                        // rows are there, acquired by this thread (the mainloop adds the
//                                                        // proxy fence). false: cut short; the tile is multiplied anyway
//                                                        // and not published
//     void store(const TileWork&, int row, int column, float (&v)[8], int valid);
//                                                        // v[0..valid) = columns column.. of row `row` of out, both
//                                                        // counted from the tile's first; column % 8 == 0. One call per
//                                                        // pack of the tile that has a valid row and column
//     void stored(const TileWork&);                      // kPublishes. One thread, after all stores of the tile by all
//   };                                                   // threads (a barrier orders them before it)
#pragma once

#include <cstdint>

namespace interlace {

constexpr int kStoreColumns = 8;  // columns of one store: 16 bytes of a 2-byte element

struct TileWork {
  int32_t row = 0;  // first row in its source of x
  int32_t rows = 0;  // valid rows, 1..kGemmBlockRows
  int32_t product = 0;  // which weight (0 when products are summed)
  int32_t column = 0;  // first column of the weight
  int32_t columns = 0;  // valid columns, 1..tile columns
  int32_t source = 0;  // 0: x itself; 1 + half: the gathered rows in that half
  int32_t owner = 0;  // who gets it (scatter)
  int32_t index = 0;  // its signal
};

}  // namespace interlace
