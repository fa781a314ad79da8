#include "cpu/all_gather_gemm.h"

#include <algorithm>
#include <cstring>

#include "core/heuristics.h"
#include "cpu/host.h"
#include "cpu/scratch.h"

namespace interlace {
namespace {

struct Piece {
  const GatherProblem& p;
  int64_t first;
  int64_t count;
  int64_t stride;              // bytes between staged rows
  std::vector<int64_t> begin;  // first row of every rank in the output

  Piece(const GatherProblem& problem, int64_t first_row, int64_t rows)
      : p(problem),
        first(first_row),
        count(rows),
        stride(padded_depth(problem.compute, problem.depth) * dtype_size(problem.compute)) {
    begin.push_back(0);
    for (int64_t n : p.rows) begin.push_back(begin.back() + n);
  }
  int64_t rows(int rank) const { return std::clamp<int64_t>(p.rows[rank] - first, 0, count); }
  int64_t out_row(int rank) const { return begin[rank] + first; }
};

void store(const GatherOutput& out, Dtype dtype, int64_t row, int64_t rows, int64_t panel,
           const float* tile) {
  const int64_t n = out.product->n();
  isa().store_tile(dtype, out.out + (row * n + panel * kTileColumns) * dtype_size(dtype), n, tile, rows,
                   out.product->columns(panel),
                   out.bias == nullptr ? nullptr : out.bias + panel * kTileColumns);
}

void multiply_shard(const Piece& piece, int rank, const Rows& shard) {
  const int64_t rows = piece.rows(rank);
  const int64_t blocks = ceil_div(rows, kSuperblockRows);
  for (const GatherOutput& out : piece.p.outs) {
    const int64_t panels = out.product->panels();
    run_units(
        blocks * panels, blocks * panels, [](int64_t) {},
        [&](int64_t i) {
          const Stretch stretch(piece.p.group.trace(), Work::kProduct, rank, i % panels);
          const int64_t row = i / panels * kSuperblockRows;
          const Rows x{shard.data + row * shard.stride, shard.stride};
          out.product->unit(&x, std::min(kSuperblockRows, rows - row), i % panels,
                            [&](int64_t r, int64_t n, const float* tile) {
                              store(out, piece.p.dtype, piece.out_row(rank) + row + r, n, i % panels, tile);
                            });
        },
        [](int64_t) {});
  }
}

// All shards into scratch memory, then one product over them.
void multiply_gathered(const Piece& piece) {
  const int world = piece.p.group.world_size();
  int64_t total = 0;
  for (int r = 0; r < world; ++r) total += piece.rows(r);
  const Scratch lease(total * piece.stride);
  char* all = lease.data();
  int64_t row = 0;
  for (int r = 0; r < world; ++r) {
    if (r != piece.p.group.rank()) piece.p.group.wait(r, Channel::kPartial, 1);
    const Stretch stretch(piece.p.group.trace(), Work::kPull, r);
    std::memcpy(all + row * piece.stride, piece.p.group.half(r), piece.rows(r) * piece.stride);
    row += piece.rows(r);
  }
  const Rows x{all, piece.stride};
  for (const GatherOutput& out : piece.p.outs) {
    run_units(
        out.product->panels(), out.product->panels(), [](int64_t) {},
        [&](int64_t panel) {
          const Stretch stretch(piece.p.group.trace(), Work::kProduct, -1, panel);
          out.product->unit(&x, total, panel, [&](int64_t r, int64_t n, const float* tile) {
            store(out, piece.p.dtype, r, n, panel,
                  tile);  // a single piece: rows of the ranks follow each other
          });
        },
        [](int64_t) {});
  }
}

// The gathered input itself, in the caller's type.
void copy_gathered(const Piece& piece, int rank) {
  const GatherProblem& p = piece.p;
  const Stretch stretch(p.group.trace(), Work::kPull, rank);
  const int64_t width = p.depth * dtype_size(p.dtype);
  char* to = p.gathered + piece.out_row(rank) * width;
  if (rank == p.group.rank()) {
    for (int64_t row = 0; row < piece.rows(rank); ++row) {
      std::memcpy(to + row * width, p.x + (piece.first + row) * p.x_stride, width);
    }
    return;
  }
  const char* from = p.group.half(rank);
  for (int64_t row = 0; row < piece.rows(rank); ++row) {
    if (p.dtype == p.compute) {
      std::memcpy(to + row * width, from + row * piece.stride, width);
    } else {
      // staged as fp32: narrowing gives back the very bits that were widened
      isa().store_tile(p.dtype, to + row * width, p.depth,
                       reinterpret_cast<const float*>(from + row * piece.stride), 1, p.depth, nullptr);
    }
  }
}

}  // namespace

int64_t gather_bytes(const GatherProblem& p, int64_t rows) {
  return rows * padded_depth(p.compute, p.depth) * dtype_size(p.compute);
}

void stage_piece(const GatherProblem& p, int64_t own_rows, int64_t first, int64_t count) {
  const int64_t rows = std::clamp<int64_t>(own_rows - first, 0, count);
  {
    const Stretch stretch(p.group.trace(), Work::kStage);
    stage_rows(p.dtype, p.compute, p.x + first * p.x_stride, p.x_stride, rows, p.depth,
               p.group.half(p.group.rank()));
  }
  p.group.publish(Channel::kPartial, 1);
}

void multiply_piece(const GatherProblem& p, int64_t first, int64_t count) {
  const Piece piece(p, first, count);
  const int me = p.group.rank();
  const int world = p.group.world_size();
  const bool whole = first == 0 && count >= *std::max_element(p.rows.begin(), p.rows.end());
  const bool gather_first = whole && piece.begin.back() <= kGatherFirstRows;
  if (p.gathered != nullptr) copy_gathered(piece, me);
  if (gather_first) {
    multiply_gathered(piece);
  } else {
    // own shard first: it needs no signal, so it hides how late the peers are
    multiply_shard(piece, me, {p.group.half(me), piece.stride});
  }
  for (int step = 1; step < world; ++step) {
    const int peer = (me + step) % world;
    p.group.wait(peer, Channel::kPartial, 1);
    if (p.gathered != nullptr) copy_gathered(piece, peer);
    if (!gather_first) multiply_shard(piece, peer, {p.group.half(peer), piece.stride});
  }
}

}  // namespace interlace
