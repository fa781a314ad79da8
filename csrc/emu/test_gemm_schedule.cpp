// The schedules of the fused GEMMs: every tile once, every row with one owner and one place, every signal within its
// words; ranks send first what is used first. Pure arithmetic, no emulated thread.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "core/gather_schedule.h"
#include "core/reduce_schedule.h"
#include "emu/testing.h"

namespace interlace::emu {
namespace {

struct Problem {
  std::vector<int64_t> rows;  // of every rank
  OutColumns columns;
  int32_t tile_rows;

  int world_size() const { return static_cast<int>(rows.size()); }
  Shards shards() const { return shards_of(rows.data(), world_size()); }
};

Problem random_problem(std::minstd_rand& random) {
  const auto below = [&](uint32_t bound) { return static_cast<int32_t>(random() / 7 % bound); };
  Problem problem;
  problem.tile_rows = 1 << below(4);
  for (int rank = 1 + below(kMaxRanks); rank > 0; --rank)
    problem.rows.push_back(below(4) == 0 ? 0 : below(60));
  problem.columns.outs = 1 + below(kMaxOuts);
  problem.columns.tile_columns = below(2) == 0 ? 8 : 256;
  for (int out = 0; out < problem.columns.outs; ++out)
    problem.columns.columns[out] = 1 + below(4 * problem.columns.tile_columns);
  return problem;
}

// (first row, out, first column) of every tile, whose rows must be those of one rank.
using TileSet = std::set<std::vector<int64_t>>;

void add(TileSet& seen, const Problem& problem, const ScheduledTile& tile) {
  const Shards shards = problem.shards();
  require(seen.insert({tile.row, tile.columns.out, tile.columns.column}).second, "a tile comes twice");
  require(tile.rows >= 1 && tile.rows <= problem.tile_rows, "a tile has no or too many rows");
  require(tile.columns.columns >= 1 && tile.columns.columns <= problem.columns.tile_columns &&
              tile.columns.column + tile.columns.columns <= problem.columns.columns[tile.columns.out],
          "a tile goes beyond its out");
  require(tile.row >= shards.begin(tile.rank) &&
              tile.row + tile.rows <= shards.begin(tile.rank) + shards.rows(tile.rank),
          "a tile crosses the border between two ranks");
}

int64_t area(const TileSet& seen, const Problem& problem, const Shards& shards) {
  int64_t elements = 0;
  for (const std::vector<int64_t>& tile : seen) {
    int rank = 0;
    while (tile[0] >= shards.begin(rank) + shards.rows(rank)) ++rank;
    const int64_t rows =
        std::min<int64_t>(problem.tile_rows, shards.begin(rank) + shards.rows(rank) - tile[0]);
    elements +=
        rows * std::min<int64_t>(problem.columns.tile_columns, problem.columns.columns[tile[1]] - tile[2]);
  }
  return elements;
}

int64_t all_columns(const Problem& problem) {
  int64_t columns = 0;
  for (int out = 0; out < problem.columns.outs; ++out) columns += problem.columns.columns[out];
  return columns;
}

void check_gather(const Problem& problem) {
  const Shards shards = problem.shards();
  for (int rank = 0; rank < problem.world_size(); ++rank) {
    const GatherSchedule asked{shards, problem.columns, rank, problem.tile_rows, 2, {}};
    const GatherSchedule schedule = asked.prepared();
    require(schedule.tiles() == asked.tiles() && schedule.staged_rows() == asked.staged_rows(),
            "the prepared schedule is another");
    TileSet seen;
    std::vector<int> order;
    for (int64_t i = 0; i < schedule.tiles(); ++i) {
      const ScheduledTile tile = schedule.tile(i);
      add(seen, problem, tile);
      if (order.empty() || order.back() != tile.rank) order.push_back(tile.rank);
    }
    require(area(seen, problem, shards) == shards.total() * all_columns(problem), "tiles are missing");
    for (size_t i = 1; i < order.size(); ++i) {
      const auto step = [&](int source) {
        return (source - rank + problem.world_size()) % problem.world_size();
      };
      require(step(order[i]) > step(order[i - 1]), "own rows are not first, or the ranks not in turn");
    }
    std::set<std::vector<int64_t>> sent;
    for (int64_t i = 0; i < schedule.pushes(); ++i) {
      const GatherSchedule::Push push = schedule.push(i);
      require(push.peer != rank && push.chunk < schedule.chunks(rank), "a push that is none");
      sent.insert({push.peer, push.chunk});
    }
    require(static_cast<int64_t>(sent.size()) == schedule.pushes(), "a chunk is sent twice");
    int64_t rows = 0;
    for (int64_t chunk = 0; chunk < schedule.chunks(rank); ++chunk)
      rows += schedule.rows_of_chunk(rank, chunk).size();
    require(rows == shards.rows(rank), "chunks do not carry all rows");
    require(schedule.staged_row(rank) % problem.tile_rows == 0 &&
                schedule.staged_row(rank) + schedule.row_blocks(rank) * problem.tile_rows ==
                    schedule.staged_row(rank + 1),
            "whole tiles of two ranks meet in the staging");
  }
}

// In each step the ranks read from different ranks, and are sent to by whom they read from.
void check_rotation(int world_size) {
  for (int step = 0; step < world_size; ++step) {
    std::set<int> sources;
    for (int rank = 0; rank < world_size; ++rank) {
      const int source = source_at(rank, step, world_size);
      sources.insert(source);
      require(destination_at(source, step, world_size) == rank, "sent to another than the one who reads");
    }
    require(static_cast<int>(sources.size()) == world_size, "two ranks read from one");
  }
}

void check_owners(const ReduceSchedule& schedule) {
  std::set<std::vector<int64_t>> places;
  for (int stretch = 0; stretch < schedule.stretches(); ++stretch) {
    for (int64_t row = 0; row < schedule.shards.rows(stretch); ++row) {
      const int owner = schedule.owner(stretch, row);
      require(places.insert({owner, schedule.owned_row(row)}).second, "two rows have one place");
      require(schedule.owned_row(row) < schedule.slot_rows(owner), "a row lies behind its slot");
    }
  }
  int64_t rows = 0;
  for (int owner = 0; owner < schedule.world_size; ++owner) {
    for (int64_t index = 0; index < schedule.units(owner); ++index) {
      const ReduceSchedule::Unit unit = schedule.unit(owner, index);
      rows += unit.rows;
      require(unit.rows >= 1 && unit.row / schedule.tile_rows == unit.row_block &&
                  (unit.row + unit.rows - 1) / schedule.tile_rows == unit.row_block,
              "a unit is not in one row block");
      for (int64_t row = 0; row < unit.rows; ++row) {
        const int stretch = schedule.scatter ? owner : 0;
        require(schedule.owner(stretch, unit.row + row) == owner &&
                    schedule.owned_row(unit.row + row) == unit.owned_row + row,
                "the unit of one rank has a row of another");
      }
      require(unit.row_block < schedule.block_signals(owner), "a unit waits for a word of another kind");
      require(schedule.scatter || schedule.unit_signal(index) < schedule.signals(owner, 0),
              "a unit has no word");
    }
  }
  require(rows == schedule.rows(), "units do not cover all rows");
}

void check_reduce(Problem problem) {
  problem.columns.outs = 1;
  const Shards shards = problem.shards();
  const int64_t rows = shards.total();
  for (int rank = 0; rank < problem.world_size(); ++rank) {
    ReduceSchedule scatter = scatter_schedule(shards, problem.columns, rank, problem.tile_rows);
    ReduceSchedule all =
        all_reduce_schedule(rows, problem.columns, problem.world_size(), rank, problem.tile_rows);
    for (ReduceSchedule* schedule : {&scatter, &all}) {
      TileSet seen;
      const Problem seen_problem{{schedule->scatter ? problem.rows : std::vector<int64_t>{rows}},
                                 problem.columns,
                                 problem.tile_rows};
      for (int64_t i = 0; i < schedule->tiles(); ++i) add(seen, seen_problem, schedule->tile(i));
      require(area(seen, problem, schedule->shards) == rows * all_columns(problem), "tiles are missing");
      const ReduceSchedule prepared = schedule->prepared();
      for (int64_t i = 0; i < schedule->tiles(); ++i)
        require(prepared.tile(i).row == schedule->tile(i).row, "the prepared schedule is another");
      schedule->unit_rows = std::min(problem.tile_rows, 1 << rank % 3);
      check_owners(*schedule);
      check_owners(schedule->prepared());
      require(schedule->fits(), "a small problem does not fit");
    }
    // in each round the right neighbour's rows come before the others', own ones last
    if (scatter.tiles() > 0 && problem.rows[source_at(rank, 1, problem.world_size())] > 0)
      require(scatter.tile(0).rank == source_at(rank, 1, problem.world_size()), "not the neighbour first");
  }
}

void check_large_problems() {
  const int64_t long_shard[] = {1 << 24, 5};
  const Shards shards = shards_of(long_shard, 2);
  const GatherSchedule gather{shards, {{8192}, 1, 128}, 0, 128, chunk_row_blocks_for(shards, 128), {}};
  require(gather.chunks(0) <= kMaxTileSignals && gather.chunks(1) == 1, "more chunks than words");
  const OutColumns columns{{8192}, 1, 128};
  require(scatter_schedule(shards, columns, 0, 128).fits() == false, "more row blocks than words");
  require(all_reduce_schedule(1 << 18, columns, 8, 0, 128).fits(), "the words do not suffice");
  const ReduceSchedule wide = all_reduce_schedule(1 << 18, columns, 2, 0, 128);
  require(wide.half_bytes(false, 300'000, 4, 2) > int64_t{1} << 38, "bytes are counted in 32 bits");
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 4);
  for (int world_size = 1; world_size <= interlace::kMaxRanks; ++world_size) check_rotation(world_size);
  check_large_problems();
  for (int seed = 1; seed <= seeds; ++seed) {
    std::minstd_rand random(seed);
    for (int i = 0; i < 30; ++i) {
      const Problem problem = random_problem(random);
      check_gather(problem);
      check_reduce(problem);
    }
  }
  std::printf("gemm_schedule: %d seeds ok\n", seeds);
}
