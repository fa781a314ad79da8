// Who computes which tile when. Every rank can compute every rank's order, so one progress counter per rank says all:
// chunk c of rank r is a known set of tiles at known offsets. Nothing below may depend on timing or on local state.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/qualifiers.h"
#include "core/signal.h"

namespace interlace {

constexpr int64_t kSuperblockRows =
    256;  // rows of x that are multiplied with one weight panel before the next

INTERLACE_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  INTERLACE_HD constexpr int64_t size() const { return end - begin; }
};

// Shard of rank r of `size` rows, as torch.chunk cuts: ceil(size / world) each, the last ones shorter or empty.
INTERLACE_HD constexpr Range chunk_range(int64_t size, int world_size, int rank) {
  const int64_t step = ceil_div(size, world_size);
  const int64_t begin = rank * step < size ? rank * step : size;
  const int64_t end = begin + step < size ? begin + step : size;
  return {begin, end};
}

// One unit of work: rows [row, row + rows) of x times weight panel `panel`, for `owner`.
struct Unit {
  int64_t row = 0;
  int64_t rows = 0;
  int64_t panel = 0;
  int owner = 0;
};

// gemm_all_reduce, owner-computes: panels are split among the ranks. A rank first computes the panels of its peers,
// starting with its right neighbour (so that no two ranks start on the same owner), then its own.
struct ColumnSchedule {
  int64_t rows = 0;
  int64_t panels = 0;
  int world_size = 1;

  constexpr int64_t superblocks() const { return ceil_div(rows, kSuperblockRows); }
  constexpr Range owned(int rank) const {
    return {panels * rank / world_size, panels * (rank + 1) / world_size};
  }
  constexpr int64_t units(int owner) const { return owned(owner).size() * superblocks(); }
  // Units that `rank` computes for its peers before those for `owner`.
  constexpr int64_t units_before(int rank, int owner) const {
    int64_t before = 0;
    for (int r = (rank + 1) % world_size; r != owner; r = (r + 1) % world_size) before += units(r);
    return before;
  }
  constexpr int64_t partial_units(int rank) const { return panels * superblocks() - units(rank); }
  constexpr Unit unit(int owner, int64_t index) const {
    const Range mine = owned(owner);
    const int64_t row = index / mine.size() * kSuperblockRows;
    return {row, std::min(kSuperblockRows, rows - row), mine.begin + index % mine.size(), owner};
  }
  // First element of a unit's tiles in a buffer of rows x panels x tile columns: units are dense.
  constexpr int64_t offset(const Unit& unit, int64_t tile_columns) const {
    return (unit.row * panels + unit.panel * unit.rows) * tile_columns;
  }
};

// gemm_reduce_scatter, owner-computes: rows are split among the ranks, owners follow each other. For each weight
// panel a rank computes the rows of its peers, right neighbour first, then its own: the panel is read once.
struct RowSchedule {
  const Range* owners = nullptr;  // by rank
  int64_t panels = 0;
  int world_size = 1;

  constexpr Range owned(int rank) const { return owners[rank]; }
  constexpr int64_t superblocks(int owner) const { return ceil_div(owned(owner).size(), kSuperblockRows); }
  constexpr int64_t rounds() const {
    int64_t most = 0;
    for (int r = 0; r < world_size; ++r) most = std::max(most, superblocks(r));
    return most;
  }
  // Peers of `rank` that have rows in this round, and how many of them come before `owner`.
  constexpr int64_t active(int rank, int64_t round, int owner) const {
    int64_t count = 0;
    for (int r = (rank + 1) % world_size; r != owner; r = (r + 1) % world_size)
      count += superblocks(r) > round;
    return count;
  }
  constexpr int64_t partial_units(int rank) const {
    int64_t blocks = 0;
    for (int r = 0; r < world_size; ++r) blocks += r == rank ? 0 : superblocks(r);
    return blocks * panels;
  }
  // Place of (round, panel, owner) among the units that `rank` computes for its peers.
  constexpr int64_t partial_index(int rank, int64_t round, int64_t panel, int owner) const {
    int64_t before = 0;
    for (int64_t earlier = 0; earlier < round; ++earlier) before += active(rank, earlier, rank) * panels;
    return before + panel * active(rank, round, rank) + active(rank, round, owner);
  }
  constexpr Unit unit(int owner, int64_t round, int64_t panel) const {
    const Range mine = owned(owner);
    const int64_t row = mine.begin + round * kSuperblockRows;
    return {row, std::min(kSuperblockRows, mine.end - row), panel, owner};
  }
  // Within the owner's rows units are dense, like ColumnSchedule's; owners follow each other.
  constexpr int64_t offset(const Unit& unit, int64_t tile_columns) const {
    return (unit.row * panels + unit.panel * unit.rows) * tile_columns;
  }
};

// Signals for a sequence of `units`: which chunk carries unit `index`.
INTERLACE_HD constexpr uint32_t chunk_with(int64_t index, int64_t units) {
  return static_cast<uint32_t>(index / units_per_chunk(units)) + 1;
}

static_assert(chunk_range(5, 4, 0).size() == 2 && chunk_range(5, 4, 2).size() == 1 &&
              chunk_range(5, 4, 3).size() == 0);

}  // namespace interlace
