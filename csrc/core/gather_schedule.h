// all_gather_gemm: order of tiles, chunks, staging. Pure, see gemm_schedule.h.
#pragma once

#include <cstdint>

#include "core/gemm_schedule.h"

namespace interlace {

struct GatherSchedule {
  Shards shards;
  OutColumns columns;
  int32_t rank = 0;
  int32_t tile_rows = 128;
  int32_t chunk_row_blocks = 1;
  RowBlockTable table;

  // The same schedule, quicker to ask.
  INTERLACE_HD constexpr GatherSchedule prepared() const {
    GatherSchedule schedule = *this;
    schedule.table = row_block_table(shards, columns, tile_rows);
    return schedule;
  }

  INTERLACE_HD constexpr int64_t row_blocks(int source) const {
    if (table.known) return table.before[source + 1] - table.before[source];
    return ceil_div(shards.rows(source), tile_rows);
  }
  INTERLACE_HD constexpr int64_t across() const { return table.known ? table.across : columns.tiles(); }
  INTERLACE_HD constexpr int64_t chunk_rows() const {
    return static_cast<int64_t>(chunk_row_blocks) * tile_rows;
  }
  // At least one, also of a rank without rows: every call must hear from every peer.
  INTERLACE_HD constexpr int64_t chunks(int source) const {
    const int64_t count = ceil_div(shards.rows(source), chunk_rows());
    return count > 0 ? count : 1;
  }
  INTERLACE_HD constexpr int64_t chunk_with(int64_t row_block) const {
    return static_cast<uint32_t>(row_block) / static_cast<uint32_t>(chunk_row_blocks);
  }
  // Rows of `source`, counted from its first, that the chunk carries.
  INTERLACE_HD constexpr Range rows_of_chunk(int source, int64_t chunk) const {
    const int64_t begin = chunk * chunk_rows(), rows = shards.rows(source);
    return {begin < rows ? begin : rows, begin + chunk_rows() < rows ? begin + chunk_rows() : rows};
  }

  // Own rows first: they need no signal, so the first wave hides the latency of the slowest peer.
  INTERLACE_HD constexpr int64_t tiles() const {
    return staged_row(shards.world_size) / tile_rows * across();
  }
  INTERLACE_HD constexpr ScheduledTile tile(int64_t index) const {
    int source = rank;
    for (int step = 0; step < shards.world_size; ++step) {
      source = source_at(rank, step, shards.world_size);
      if (index < row_blocks(source) * across()) break;
      index -= row_blocks(source) * across();
    }
    const TilePlace place =
        tile_place(static_cast<int32_t>(index), static_cast<int32_t>(row_blocks(source)),
                   static_cast<int32_t>(across()), row_blocks_together(columns.tile_columns));
    return tile_at(shards, columns, source, tile_rows, place);
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
    if (table.known) return int64_t{table.before[source]} * tile_rows;
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

namespace detail {

constexpr GatherSchedule kGather{kUneven, kTwoOuts, 2, 4, 2, {}};
static_assert(kGather.tiles() == 15 && kGather.tile(0).rank == 2 && kGather.tile(9).rank == 0);
static_assert(kGather.chunks(1) == 1 && kGather.rows_of_chunk(1, 0).size() == 0 && kGather.chunks(2) == 2);
static_assert(kGather.pushes() == 4 && kGather.staged_row(2) == 8);
static_assert(chunk_row_blocks_for(kUneven, 4) == 1);

}  // namespace detail

}  // namespace interlace
