// gemm_reduce_scatter and gemm_all_reduce: order of tiles, owners, units, staging, signals. Pure, see gemm_schedule.h.
#pragma once

#include <cstdint>

#include "core/gemm_schedule.h"

namespace interlace {

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
  RowBlockTable table;
  int32_t known_rounds = 0;  // with the table
  int64_t known_slot_rows = 0;  // all-reduce, with the table

  // The same schedule, quicker to ask.
  INTERLACE_HD constexpr ReduceSchedule prepared() const {
    ReduceSchedule schedule = *this;
    schedule.known_rounds = static_cast<int32_t>(rounds());
    schedule.known_slot_rows = slot_rows(0);
    schedule.table = row_block_table(shards, columns, tile_rows);
    return schedule;
  }

  INTERLACE_HD constexpr int64_t rows() const { return shards.total(); }
  INTERLACE_HD constexpr int stretches() const { return scatter ? world_size : 1; }

  // Row blocks are numbered stretch after stretch.
  INTERLACE_HD constexpr int64_t row_blocks_of(int stretch) const {
    if (table.known) return table.before[stretch + 1] - table.before[stretch];
    return ceil_div(shards.rows(stretch), tile_rows);
  }
  INTERLACE_HD constexpr int64_t row_blocks_before(int stretch) const {
    if (table.known) return table.before[stretch];
    int64_t blocks = 0;
    for (int before = 0; before < stretch; ++before) blocks += row_blocks_of(before);
    return blocks;
  }
  INTERLACE_HD constexpr int64_t across() const { return table.known ? table.across : columns.tiles(); }
  INTERLACE_HD constexpr int64_t row_blocks() const { return row_blocks_before(stretches()); }
  INTERLACE_HD constexpr int64_t tiles() const { return row_blocks() * across(); }
  // All-reduce: the same order on all ranks, so that row blocks are complete one after the other. Scatter: in rounds; in
  // each a few row blocks of every owner, so that owners sum the first while the next are multiplied, and all links are
  // used all the time. The right neighbour's come first, so that no two ranks start on the same owner; own ones last,
  // they need not travel.
  INTERLACE_HD constexpr ScheduledTile tile(int64_t index) const {
    const auto wide = static_cast<int32_t>(across());
    if (!scatter) {
      const TilePlace place = tile_place(static_cast<int32_t>(index), static_cast<int32_t>(row_blocks_of(0)),
                                         wide, row_blocks_together(columns.tile_columns));
      return tile_at(shards, columns, 0, tile_rows, place);
    }
    int64_t round = 0, behind = rounds();  // the last round that begins at or before `index`
    while (behind - round > 1) {
      const int64_t middle = (round + behind) / 2;
      (row_blocks_before_round(middle) * wide <= index ? round : behind) = middle;
    }
    const int64_t first = row_blocks_before_round(round);
    const auto height = static_cast<uint32_t>(row_blocks_before_round(round + 1) - first);
    const auto within = static_cast<uint32_t>(index - first * wide);
    int64_t left = within % height;
    int owner = rank;
    for (int step = 1; step < world_size; ++step) {
      const int candidate = source_at(rank, step, world_size);
      if (left < row_blocks_in_round(candidate, round)) {
        owner = candidate;
        break;
      }
      left -= row_blocks_in_round(candidate, round);
    }
    const int64_t row_block = round * round_row_blocks() + left;
    return tile_at(shards, columns, owner, tile_rows,
                   {static_cast<int32_t>(row_block), static_cast<int32_t>(within / height)});
  }
  // Row blocks of one owner in a round.
  INTERLACE_HD constexpr int64_t round_row_blocks() const {
    return ceil_div_short(row_blocks_together(columns.tile_columns), world_size);
  }
  INTERLACE_HD constexpr int64_t row_blocks_in_round(int owner, int64_t round) const {
    const int64_t left = row_blocks_of(owner) - round * round_row_blocks();
    return left < 0 ? 0 : left < round_row_blocks() ? left : round_row_blocks();
  }
  INTERLACE_HD constexpr int64_t row_blocks_before_round(int64_t round) const {
    int64_t before = 0;
    for (int owner = 0; owner < world_size; ++owner) {
      const int64_t blocks = row_blocks_of(owner), full = round * round_row_blocks();
      before += blocks < full ? blocks : full;
    }
    return before;
  }
  INTERLACE_HD constexpr int64_t rounds() const {
    if (table.known) return known_rounds;
    int64_t most = 0;
    for (int owner = 0; owner < world_size; ++owner) {
      const int64_t count = ceil_div(row_blocks_of(owner), round_row_blocks());
      most = count > most ? count : most;
    }
    return most;
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
    if (scatter) return shards.rows(owner);
    return table.known ? known_slot_rows : units(0) * unit_rows;
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
  return {shards, columns, shards.world_size, rank, tile_rows, unit_rows_for(mean, tile_rows), true, {},
          0,      0};
}

INTERLACE_HD constexpr ReduceSchedule all_reduce_schedule(int64_t rows, const OutColumns& columns,
                                                          int world_size, int rank, int32_t tile_rows) {
  const int32_t unit = unit_rows_for(ceil_div(rows, world_size), tile_rows);
  return {shards_of(&rows, 1), columns, world_size, rank, tile_rows, unit, false, {}, 0, 0};
}

namespace detail {

constexpr ReduceSchedule kScatter = scatter_schedule(kUneven, kOneOut, 0, 4);
constexpr ReduceSchedule kAllReduce = all_reduce_schedule(14, kOneOut, 3, 1, 4);
static_assert(kScatter.tiles() == 10 && kScatter.tile(0).rank == 2 && kScatter.tile(9).rank == 0);
static_assert(kScatter.block_signals(1) == 1 && kScatter.units(1) == 0 && kScatter.units(2) == 9);
static_assert(kAllReduce.owner(0, 13) == 1 && kAllReduce.owned_row(13) == 4 && kAllReduce.units(1) == 5);
static_assert(kAllReduce.unit(1, 4).row == 13 && kAllReduce.unit(1, 4).row_block == 3);
static_assert(unit_rows_for(8192, 128) == 64 && unit_rows_for(1024, 128) == 8 && unit_rows_for(0, 128) == 1);
static_assert(ReduceSchedule::row_bytes(5, 2) == 16);

}  // namespace detail

}  // namespace interlace
