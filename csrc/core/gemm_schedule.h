// The fused GEMMs of a device: in which order a rank multiplies its tiles, who owns which row, where rows lie in a
// half, which signal says what. Pure arithmetic; host, kernels, emulator and tests all ask here.
//
//   row block   tile rows of x that one tile covers; it never crosses the border between two ranks' rows
//   chunk       what one signal of a gather covers: a few row blocks of one rank
//   unit        what one block of threads reduces at a time: a few complete rows of one row block
#pragma once

#include <cstdint>

#include "core/qualifiers.h"
#include "core/schedule.h"
#include "core/signal.h"
#include "core/tile_order.h"

namespace interlace {

constexpr int64_t kMaxTileSignals =
    4096;  // words per rank pair in SegmentControl; at most so many row blocks a call
constexpr int kMaxOuts = 4;  // weights of one gather
constexpr int64_t kStagingAlignment = 128;  // bytes; what TMA wants of an address, and of a row 16
constexpr int64_t kRowAlignment = 16;
constexpr int64_t kRowElements = 8;  // rows of partial sums are whole packs of so many columns

// Of numbers below 2^31.
INTERLACE_HD constexpr int64_t ceil_div_short(int64_t a, int32_t b) {
  return (static_cast<uint32_t>(a) + static_cast<uint32_t>(b) - 1) / static_cast<uint32_t>(b);
}

INTERLACE_HD constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Rows that each rank brings (gather) or gets (scatter), one rank after the other. Any lengths, also 0.
struct Shards {
  int64_t begins[kMaxRanks + 1] = {};
  int32_t world_size = 1;

  INTERLACE_HD constexpr int64_t begin(int rank) const { return begins[rank]; }
  INTERLACE_HD constexpr int64_t rows(int rank) const { return begins[rank + 1] - begins[rank]; }
  INTERLACE_HD constexpr int64_t total() const { return begins[world_size]; }
};

INTERLACE_HD constexpr Shards shards_of(const int64_t* rows, int world_size) {
  Shards shards;
  shards.world_size = world_size;
  for (int rank = 0; rank < world_size; ++rank) shards.begins[rank + 1] = shards.begins[rank] + rows[rank];
  return shards;
}

// Columns of the outs, cut into tiles; a tile never crosses from one out to the next.
struct OutColumns {
  int64_t columns[kMaxOuts] = {};
  int32_t outs = 1;
  int32_t tile_columns = 128;

  INTERLACE_HD constexpr int64_t tiles() const {
    int64_t count = 0;
    for (int out = 0; out < kMaxOuts; ++out) {
      if (out < outs) count += ceil_div(columns[out], tile_columns);
    }
    return count;
  }
  struct Place {
    int32_t out = 0;
    int32_t column = 0;
    int32_t columns = 0;
  };
  // Indices are known when the loop is unrolled, so that a kernel keeps `columns` in registers.
  INTERLACE_HD constexpr Place place(int64_t tile) const {
    int32_t out = 0;
    int64_t width = columns[0];
    for (int next = 1; next < kMaxOuts; ++next) {
      const int64_t across = ceil_div_short(width, tile_columns);
      if (out + 1 != next || next >= outs || tile < across) continue;
      tile -= across;
      out = next;
      width = columns[next];
    }
    const int64_t column = tile * tile_columns;
    const int64_t left = width - column;
    return {out, static_cast<int32_t>(column),
            static_cast<int32_t>(left < tile_columns ? left : tile_columns)};
  }
};

// One tile, with rows counted in the whole of x (a gather's x is the rows of all ranks).
struct ScheduledTile {
  int64_t row = 0;
  int32_t rows = 0;
  int32_t rank = 0;  // whose rows
  int64_t row_block = 0;  // counted in that rank's rows
  OutColumns::Place columns;
};

// What a kernel asks for at every tile and every pack, computed once before the launch: a multiprocessor divides slowly,
// most of all 64-bit numbers. Where it is not known the schedules compute it.
struct RowBlockTable {
  int32_t before[kMaxRanks + 1] = {};  // row blocks of the ranks before
  int32_t across = 0;  // tiles side by side
  bool known = false;
};

INTERLACE_HD constexpr RowBlockTable row_block_table(const Shards& shards, const OutColumns& columns,
                                                     int32_t tile_rows) {
  RowBlockTable table;
  for (int rank = 0; rank < shards.world_size; ++rank) {
    table.before[rank + 1] =
        table.before[rank] + static_cast<int32_t>(ceil_div(shards.rows(rank), tile_rows));
  }
  table.across = static_cast<int32_t>(columns.tiles());
  table.known = true;
  return table;
}

// The tile of one row block of a rank's rows.
INTERLACE_HD constexpr ScheduledTile tile_at(const Shards& shards, const OutColumns& columns, int rank,
                                             int32_t tile_rows, TilePlace place) {
  const int64_t row = int64_t{place.row_block} * tile_rows, left = shards.rows(rank) - row;
  return {shards.begin(rank) + row, static_cast<int32_t>(left < tile_rows ? left : tile_rows), rank,
          place.row_block, columns.place(place.column_block)};
}

// The ranks in the order in which `rank` uses their rows: itself, then its right neighbours. In every step all ranks
// use different ones, so no rank's link is asked by two.
INTERLACE_HD constexpr int source_at(int rank, int step, int world_size) {
  return (rank + step) % world_size;
}
// And in which it sends its own: to the one that uses them first (itself in step 0).
INTERLACE_HD constexpr int destination_at(int rank, int step, int world_size) {
  return (rank - step + world_size) % world_size;
}

// Checked at compile time on small uneven cases: ranks with 5, 0 and 9 rows, tiles of 4 rows.
namespace detail {

constexpr int64_t kUnevenRows[] = {5, 0, 9};
constexpr Shards kUneven = shards_of(kUnevenRows, 3);
constexpr OutColumns kOneOut{{5}, 1, 4};
constexpr OutColumns kTwoOuts{{5, 3}, 2, 4};
static_assert(kUneven.begin(2) == 5 && kUneven.rows(1) == 0 && kUneven.total() == 14);
static_assert(kTwoOuts.tiles() == 3 && kTwoOuts.place(1).columns == 1 && kTwoOuts.place(2).out == 1);
static_assert(source_at(2, 1, 3) == 0);

}  // namespace detail

}  // namespace interlace
