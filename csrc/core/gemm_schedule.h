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
      const int64_t across = ceil_div(width, tile_columns);
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

// Tile `index` of the rows of one rank.
INTERLACE_HD constexpr ScheduledTile tile_of_rows(const Shards& shards, const OutColumns& columns, int rank,
                                                  int32_t tile_rows, int64_t index) {
  const int64_t blocks = ceil_div(shards.rows(rank), tile_rows);
  const TilePlace place =
      tile_place(static_cast<int32_t>(index), static_cast<int32_t>(blocks),
                 static_cast<int32_t>(columns.tiles()), row_blocks_together(columns.tile_columns));
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

// ---- all_gather_gemm ----
struct GatherSchedule {
  Shards shards;
  OutColumns columns;
  int32_t rank = 0;
  int32_t tile_rows = 128;
  int32_t chunk_row_blocks = 1;

  INTERLACE_HD constexpr int64_t row_blocks(int source) const {
    return ceil_div(shards.rows(source), tile_rows);
  }
  INTERLACE_HD constexpr int64_t chunk_rows() const {
    return static_cast<int64_t>(chunk_row_blocks) * tile_rows;
  }
  // At least one, also of a rank without rows: every call must hear from every peer.
  INTERLACE_HD constexpr int64_t chunks(int source) const {
    const int64_t count = ceil_div(shards.rows(source), chunk_rows());
    return count > 0 ? count : 1;
  }
  INTERLACE_HD constexpr int64_t chunk_with(int64_t row_block) const { return row_block / chunk_row_blocks; }
  // Rows of `source`, counted from its first, that the chunk carries.
  INTERLACE_HD constexpr Range rows_of_chunk(int source, int64_t chunk) const {
    const int64_t begin = chunk * chunk_rows(), rows = shards.rows(source);
    return {begin < rows ? begin : rows, begin + chunk_rows() < rows ? begin + chunk_rows() : rows};
  }

  // Own rows first: they need no signal, so the first wave hides the latency of the slowest peer.
  INTERLACE_HD constexpr int64_t tiles() const {
    int64_t blocks = 0;
    for (int source = 0; source < shards.world_size; ++source) blocks += row_blocks(source);
    return blocks * columns.tiles();
  }
  INTERLACE_HD constexpr ScheduledTile tile(int64_t index) const {
    const int64_t across = columns.tiles();
    int source = rank;
    for (int step = 0; step < shards.world_size; ++step) {
      source = source_at(rank, step, shards.world_size);
      if (index < row_blocks(source) * across) break;
      index -= row_blocks(source) * across;
    }
    return tile_of_rows(shards, columns, source, tile_rows, index);
  }

  // What this rank sends: item i is a chunk for a peer; the peer that needs own rows first comes first.
  struct Push {
    int32_t peer = 0;
    int64_t chunk = 0;
  };
  INTERLACE_HD constexpr int64_t pushes() const { return (shards.world_size - 1) * chunks(rank); }
  INTERLACE_HD constexpr Push push(int64_t index) const {
    const int step = 1 + static_cast<int>(index / chunks(rank));
    return {destination_at(rank, step, shards.world_size), index % chunks(rank)};
  }

  // Staging in a half: the rows of all ranks, each rank's from a multiple of the tile rows on, so that a tile loaded
  // whole never touches rows of another rank; then a float of scale for each of these rows.
  INTERLACE_HD constexpr int64_t staged_row(int source) const {
    int64_t row = 0;
    for (int before = 0; before < source; ++before) row += row_blocks(before) * tile_rows;
    return row;
  }
  INTERLACE_HD constexpr int64_t staged_rows() const { return staged_row(shards.world_size); }
  INTERLACE_HD static constexpr int64_t staged_row_bytes(int64_t depth, int64_t element_bytes) {
    return round_up(depth * element_bytes, kRowAlignment);
  }
  INTERLACE_HD constexpr int64_t scales_offset(int64_t depth, int64_t element_bytes) const {
    return round_up(staged_rows() * staged_row_bytes(depth, element_bytes), kStagingAlignment);
  }
  INTERLACE_HD constexpr int64_t half_bytes(int64_t depth, int64_t element_bytes) const {
    return scales_offset(depth, element_bytes) +
           round_up(staged_rows() * static_cast<int64_t>(sizeof(float)), kStagingAlignment);
  }
};

// Row blocks that one signal covers, so that the words suffice for the longest shard.
INTERLACE_HD constexpr int32_t chunk_row_blocks_for(const Shards& shards, int32_t tile_rows) {
  int64_t most = 1;
  for (int rank = 0; rank < shards.world_size; ++rank) {
    const int64_t blocks = ceil_div(shards.rows(rank), tile_rows);
    most = blocks > most ? blocks : most;
  }
  return static_cast<int32_t>(ceil_div(most, kMaxTileSignals));
}

// ---- gemm_reduce_scatter and gemm_all_reduce ----

// Rows of a unit: enough units for all multiprocessors (about 128) where there are enough rows. A power of two, so that
// a unit lies in one row block.
INTERLACE_HD constexpr int32_t unit_rows_for(int64_t rows_per_owner, int32_t tile_rows) {
  int32_t rows = 1;
  while (2 * rows <= tile_rows && rows_per_owner / (2 * rows) >= 128) rows *= 2;
  return rows;
}

// Who sums a row. Scatter: whoever gets it; `shards` says who. All-reduce: the ranks take turns, unit by unit, so that
// all of them reduce at any time and for any number of rows; `shards` is one stretch of rows, that of "rank 0".
struct ReduceSchedule {
  Shards shards;
  OutColumns columns;
  int32_t world_size = 1;
  int32_t rank = 0;
  int32_t tile_rows = 128;  // a power of two
  int32_t unit_rows = 1;  // a power of two, at most tile_rows
  bool scatter = false;

  INTERLACE_HD constexpr int64_t rows() const { return shards.total(); }
  INTERLACE_HD constexpr int stretches() const { return scatter ? world_size : 1; }

  // Row blocks are numbered stretch after stretch.
  INTERLACE_HD constexpr int64_t row_blocks_of(int stretch) const {
    return ceil_div(shards.rows(stretch), tile_rows);
  }
  INTERLACE_HD constexpr int64_t row_blocks_before(int stretch) const {
    int64_t blocks = 0;
    for (int before = 0; before < stretch; ++before) blocks += row_blocks_of(before);
    return blocks;
  }
  INTERLACE_HD constexpr int64_t row_blocks() const { return row_blocks_before(stretches()); }
  INTERLACE_HD constexpr int64_t tiles() const { return row_blocks() * columns.tiles(); }
  // Scatter: the right neighbour's rows first, so that no two ranks start on the same owner; own rows last, they need
  // not travel. All-reduce: the same order on all ranks, so that row blocks are complete one after the other.
  INTERLACE_HD constexpr ScheduledTile tile(int64_t index) const {
    const int64_t across = columns.tiles();
    int stretch = 0;
    for (int step = 1; scatter && step <= world_size; ++step) {
      stretch = source_at(rank, step, world_size);
      if (index < row_blocks_of(stretch) * across) break;
      index -= row_blocks_of(stretch) * across;
    }
    return tile_of_rows(shards, columns, stretch, tile_rows, index);
  }

  // Owner of a row of `stretch`, and which of the rows it owns it is. `row` is counted in the stretch. 32-bit divisions:
  // the epilogue asks for each pack.
  INTERLACE_HD constexpr int owner(int stretch, int64_t row) const {
    return scatter ? stretch : static_cast<int>(unit_of(row) % static_cast<uint32_t>(world_size));
  }
  INTERLACE_HD constexpr int64_t owned_row(int64_t row) const {
    if (scatter) return row;
    return int64_t{unit_of(row) / static_cast<uint32_t>(world_size)} * unit_rows +
           static_cast<uint32_t>(row) % static_cast<uint32_t>(unit_rows);
  }
  INTERLACE_HD constexpr uint32_t unit_of(int64_t row) const {
    return static_cast<uint32_t>(row) / static_cast<uint32_t>(unit_rows);
  }

  INTERLACE_HD constexpr int64_t units(int owner) const {
    if (scatter) return ceil_div(shards.rows(owner), unit_rows);
    const int64_t all = ceil_div(rows(), unit_rows);
    return all > owner ? ceil_div(all - owner, world_size) : 0;
  }
  struct Unit {
    int64_t row = 0;  // counted in the stretch
    int64_t rows = 0;
    int64_t owned_row = 0;  // counted in the rows of the owner
    int64_t row_block = 0;  // its signal
  };
  INTERLACE_HD constexpr Unit unit(int owner, int64_t index) const {
    const int64_t row = (scatter ? index : index * world_size + owner) * unit_rows;
    const int64_t left = shards.rows(scatter ? owner : 0) - row;
    return {row, left < unit_rows ? left : unit_rows, index * unit_rows, row / tile_rows};
  }

  // Signals that every rank sends to `owner`: its row blocks, in its numbering; at least one, since every call must
  // hear from every peer. All-reduce: after them the units that the sender has reduced.
  INTERLACE_HD constexpr int64_t block_signals(int owner) const {
    const int64_t blocks = row_blocks_of(scatter ? owner : 0);
    return blocks > 0 ? blocks : 1;
  }
  INTERLACE_HD constexpr int64_t unit_signal(int64_t index) const { return block_signals(0) + index; }
  INTERLACE_HD constexpr int64_t signals(int sender, int owner) const {
    return block_signals(owner) + (scatter ? 0 : units(sender));
  }
  // Whether the words suffice. Pure: the same answer on all ranks.
  INTERLACE_HD constexpr bool fits() const {
    return row_blocks() <= kMaxTileSignals && (scatter || unit_signal(units(0)) <= kMaxTileSignals);
  }

  // Staging in a half of owner: a slot of partial sums from every rank, its owned rows each; all-reduce: then the
  // reduced rows of everybody. With a switch that sums (NVLS) there is one slot of all rows, at every rank.
  INTERLACE_HD constexpr int64_t slot_rows(int owner) const {
    return scatter ? shards.rows(owner) : units(0) * unit_rows;
  }
  INTERLACE_HD static constexpr int64_t row_bytes(int64_t columns, int64_t element_bytes) {
    return round_up(columns, kRowElements) * element_bytes;
  }
  INTERLACE_HD constexpr int64_t slot_offset(int owner, int sender, int64_t wire_row_bytes) const {
    return sender * slot_rows(owner) * wire_row_bytes;
  }
  INTERLACE_HD constexpr int64_t reduced_offset(bool multicast, int64_t wire_row_bytes) const {
    const int64_t slots = multicast ? rows() : world_size * slot_rows(0);
    return round_up(slots * wire_row_bytes, kStagingAlignment);
  }
  // Of the neediest owner: all halves are of one size.
  INTERLACE_HD constexpr int64_t half_bytes(bool multicast, int64_t columns, int64_t wire_bytes,
                                            int64_t out_bytes) const {
    const int64_t wire = row_bytes(columns, wire_bytes);
    if (!scatter)
      return reduced_offset(multicast, wire) +
             round_up(rows() * row_bytes(columns, out_bytes), kStagingAlignment);
    int64_t most = multicast ? rows() : 0;
    for (int owner = 0; !multicast && owner < world_size; ++owner) {
      const int64_t slots = world_size * slot_rows(owner);
      most = slots > most ? slots : most;
    }
    return round_up(most * wire, kStagingAlignment);
  }
};

INTERLACE_HD constexpr ReduceSchedule scatter_schedule(const Shards& shards, const OutColumns& columns,
                                                       int rank, int32_t tile_rows) {
  const int64_t mean = ceil_div(shards.total(), shards.world_size);
  return {shards, columns, shards.world_size, rank, tile_rows, unit_rows_for(mean, tile_rows), true};
}

INTERLACE_HD constexpr ReduceSchedule all_reduce_schedule(int64_t rows, const OutColumns& columns,
                                                          int world_size, int rank, int32_t tile_rows) {
  const int32_t unit = unit_rows_for(ceil_div(rows, world_size), tile_rows);
  return {shards_of(&rows, 1), columns, world_size, rank, tile_rows, unit, false};
}

// Checked at compile time on a small uneven case: 3 ranks with 5, 0 and 9 rows, tiles of 4 rows.
namespace detail {

constexpr int64_t kUnevenRows[] = {5, 0, 9};
constexpr Shards kUneven = shards_of(kUnevenRows, 3);
constexpr OutColumns kTwoOuts{{5, 3}, 2, 4};
constexpr GatherSchedule kGather{kUneven, kTwoOuts, 2, 4, 2};
constexpr ReduceSchedule kScatter = scatter_schedule(kUneven, kTwoOuts, 0, 4);
constexpr ReduceSchedule kAllReduce = all_reduce_schedule(14, kTwoOuts, 3, 1, 4);

static_assert(kTwoOuts.tiles() == 3 && kTwoOuts.place(1).columns == 1 && kTwoOuts.place(2).out == 1);
static_assert(kGather.tiles() == 15 && kGather.tile(0).rank == 2 && kGather.tile(9).rank == 0);
static_assert(kGather.chunks(1) == 1 && kGather.rows_of_chunk(1, 0).size() == 0 && kGather.chunks(2) == 2);
static_assert(kGather.push(0).peer == 1 && kGather.push(2).peer == 0 && kGather.staged_row(2) == 8);
static_assert(kScatter.tiles() == 15 && kScatter.tile(0).rank == 2 && kScatter.tile(14).rank == 0);
static_assert(kScatter.block_signals(1) == 1 && kScatter.units(1) == 0 && kScatter.units(2) == 9);
static_assert(kAllReduce.owner(0, 13) == 1 && kAllReduce.owned_row(13) == 4 && kAllReduce.units(1) == 5);
static_assert(kAllReduce.unit(1, 4).row == 13 && kAllReduce.unit(1, 4).row_block == 3);
static_assert(unit_rows_for(8192, 128) == 64 && unit_rows_for(1024, 128) == 8 && unit_rows_for(0, 128) == 1);
static_assert(ReduceSchedule::row_bytes(5, 2) == 16 && chunk_row_blocks_for(kUneven, 4) == 1);

}  // namespace detail

}  // namespace interlace
