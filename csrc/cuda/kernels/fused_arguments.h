// What the fused GEMM kernels are given besides group and operands. Host and device read this file.
#pragma once

#include <cstdint>

#include "core/gather_schedule.h"
#include "core/reduce_schedule.h"
#include "cuda/kernels/gemm_arguments.h"
#include "cuda/kernels/segment.h"

namespace interlace {

static_assert(kMaxProducts == kMaxOuts);

INTERLACE_HD constexpr OutColumns out_columns(const GemmArguments& arguments, int32_t tile_columns) {
  OutColumns columns;
  columns.outs = arguments.outs();
  columns.tile_columns = tile_columns;
  for (int out = 0; out < columns.outs; ++out) columns.columns[out] = arguments.products[out].columns;
  return columns;
}

// all_gather_gemm. GemmArguments: x and rows are this rank's own, the outs have the rows of all ranks. fp8 scales of x:
// this rank's own; they travel with the rows.
struct GatherArguments {
  GatherSchedule schedule;  // gather_schedule()
  void* gathered;  // [rows of all ranks, depth], or null: not wanted
  int64_t gathered_stride;  // elements
  // The first blocks of the grid send own rows. 0: copies on another stream do, with publish_chunk after each chunk.
  int32_t comm_blocks;
};

INTERLACE_HD constexpr GatherSchedule gather_schedule(const GemmArguments& arguments, const Shards& shards,
                                                      int rank, int32_t tile_columns,
                                                      int32_t tile_rows = kGemmBlockRows) {
  return {shards,    out_columns(arguments, tile_columns),    rank,
          tile_rows, chunk_row_blocks_for(shards, tile_rows), {}};
}

// The rows that peers bring, in the staging of `rank`: the second source of x, for tensor maps and for cp.async.
inline GatheredRows gathered_rows(const SymmetricGroup& group, int rank, const GatherSchedule& schedule,
                                  int64_t depth, Dtype dtype) {
  GatheredRows gathered;
  for (int half = 0; half < kGatheredMaps; ++half) {
    gathered.halves[half] = group.segments[rank] + sizeof(SegmentControl) + half * group.half_bytes;
  }
  gathered.rows = schedule.staged_rows();
  gathered.stride = GatherSchedule::staged_row_bytes(depth, dtype_size(dtype)) / dtype_size(dtype);
  return gathered;
}

// gemm_reduce_scatter and gemm_all_reduce. GemmArguments: all rows of x; bias [columns], equal on all ranks, is added
// once. With h = round(sum over ranks, in rank order and fp32, of the products + bias + residual):
//   products[0].out = h (may be null when normalised is not), normalised = round(h / rms(h) * norm_weight).
// out, residual and normalised have this rank's rows (scatter), or all rows; then residual is equal on all ranks.
struct ReduceArguments {
  ReduceSchedule schedule;  // reduce_scatter_schedule() or all_reduce_schedule()
  void* normalised;  // null: no norm
  int64_t normalised_stride;  // elements
  const void* norm_weight;  // [columns] in the type of out; null: ones
  float eps;
  int32_t comm_blocks;  // the first blocks of the grid only reduce; 0: all reduce after their tiles
  bool float32_wire;  // partial sums travel in fp32, otherwise in the type of out
  bool
      multicast;  // the switch sums (group.multicast is set): no slots, and the order of the sum is the switch's
};

INTERLACE_HD constexpr ReduceSchedule reduce_scatter_schedule(const GemmArguments& arguments,
                                                              const Shards& shards, int rank,
                                                              int32_t tile_columns,
                                                              int32_t tile_rows = kGemmBlockRows) {
  return scatter_schedule(shards, out_columns(arguments, tile_columns), rank, tile_rows);
}

INTERLACE_HD constexpr ReduceSchedule all_reduce_schedule(const GemmArguments& arguments, int world_size,
                                                          int rank, int32_t tile_columns,
                                                          int32_t tile_rows = kGemmBlockRows) {
  return all_reduce_schedule(arguments.rows, out_columns(arguments, tile_columns), world_size, rank,
                             tile_rows);
}

// Arguments as the kernels want them: with schedules that are quick to ask.
template <class Arguments> constexpr Arguments prepared(Arguments arguments) {
  arguments.schedule = arguments.schedule.prepared();
  return arguments;
}

}  // namespace interlace
