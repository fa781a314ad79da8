// all_gather_gemm: out = (rows of all ranks) weight^T for n weights, multiplied while the rows travel.
//
//   blocks [0, comm_blocks)   push own rows, chunk by chunk, into every peer's half; then copy what arrives to `gathered`
//   the other blocks          multiply: own rows first, from x itself, then the peers', as their chunks arrive
#pragma once

#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/fused_group.cuh"
#include "cuda/kernels/gemm_hooks.h"
#include "cuda/kernels/plain_gemm.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

// Where a rank's half keeps what peers push.
template <class Element> struct GatherStaging {
  char* half;
  int64_t row_bytes;
  int64_t scales_offset;

  INTERLACE_DEVICE GatherStaging(const SymmetricGroup& group, int rank, uint32_t epoch,
                                 const GatherSchedule& schedule, int64_t depth)
      : half(half_of(group, rank, epoch)),
        row_bytes(GatherSchedule::staged_row_bytes(depth, sizeof(Element))),
        scales_offset(schedule.scales_offset(depth, sizeof(Element))) {}

  INTERLACE_DEVICE Element* row(int64_t staged_row) const {
    return reinterpret_cast<Element*>(half + staged_row * row_bytes);
  }
  INTERLACE_DEVICE float* scales() const { return reinterpret_cast<float*>(half + scales_offset); }
  INTERLACE_DEVICE int64_t stride() const { return row_bytes / static_cast<int64_t>(sizeof(Element)); }
};

template <class Mainloop> struct GatherHooks {
  static constexpr bool kWaits = true;
  static constexpr bool kPublishes = false;
  using Element = typename Mainloop::Element;
  using Out = typename Mainloop::Out;

  const SymmetricGroup& group;
  const GemmArguments& arguments;
  const GatherSchedule& schedule;
  const uint32_t& epoch;  // in shared memory
  const float* staged_scales;  // fp8; of all ranks' rows, in the order of the staging
  int32_t arrived_from = -1;  // the chunk that this thread has seen last
  int32_t arrived_chunk = -1;
  bool cut_short = false;

  INTERLACE_DEVICE int64_t tiles() const { return schedule.tiles(); }

  INTERLACE_DEVICE TileWork tile(int64_t index) const {
    const ScheduledTile tile = schedule.tile(index);
    const bool own = tile.rank == schedule.rank;
    const int64_t in_shard = tile.row_block * schedule.tile_rows;
    TileWork work;
    work.row = static_cast<int32_t>(own ? in_shard : schedule.staged_row(tile.rank) + in_shard);
    work.rows = tile.rows;
    work.product = tile.columns.out;
    work.column = tile.columns.column;
    work.columns = tile.columns.columns;
    work.source = own ? 0 : 1 + static_cast<int32_t>(parity(epoch));
    work.owner = tile.rank;
    work.index = static_cast<int32_t>(schedule.chunk_with(tile.row_block));
    return work;
  }

  // Acquire: the chunk's rows and scales are visible to this thread. Only when the chunk changes.
  INTERLACE_DEVICE bool ready(const TileWork& work) {
    if (work.source == 0) return true;
    if (cut_short) return false;
    if (work.owner == arrived_from && work.index == arrived_chunk) return true;
    cut_short = !wait_for_tile(group, Op::kAllGatherGemm, work.owner, work.index, epoch);
    arrived_from = work.owner;
    arrived_chunk = work.index;
    return !cut_short;
  }

  INTERLACE_DEVICE void store(const TileWork& work, int row, int column, float (&values)[kStoreColumns],
                              int valid) const {
    const GemmProduct& product = arguments.products[work.product];
    const int64_t at_column = work.column + column;
    if constexpr (sizeof(Element) == 1) {
      const int64_t scale_row = work.source != 0 || arguments.row_wise ? work.row + row : 0;
      const float x_scale = (work.source == 0 ? arguments.x_scale : staged_scales)[scale_row];
      scale_columns(arguments, product, x_scale, at_column, valid, values);
    }
    if (product.bias != nullptr)
      add_columns(static_cast<const Out*>(product.bias) + at_column, valid, values);
    const int64_t in_shard = work.source == 0 ? work.row : work.row - schedule.staged_row(work.owner);
    const int64_t at_row = schedule.shards.begin(work.owner) + in_shard + row;
    store_columns(static_cast<Out*>(product.out) + at_row * product.out_stride + at_column, valid, values);
  }

  INTERLACE_DEVICE void stored(const TileWork&) const {}
};

// All threads of comm block `block` of `blocks`.
template <class Element>
INTERLACE_DEVICE void push_own_rows(const SymmetricGroup& group, const GemmArguments& arguments,
                                    const GatherSchedule& schedule, uint32_t epoch, uint32_t block,
                                    uint32_t blocks) {
  const int rank = schedule.rank;
  const int64_t depth = arguments.products[0].depth;
  const auto* const x = static_cast<const Element*>(arguments.x[0]);
  for (int64_t i = block; i < schedule.pushes(); i += blocks) {
    const GatherSchedule::Push push = schedule.push(i);
    const Range rows = schedule.rows_of_chunk(rank, push.chunk);
    const GatherStaging<Element> theirs(group, push.peer, epoch, schedule, depth);
    const int64_t staged = schedule.staged_row(rank) + rows.begin;
    copy_rows(theirs.row(staged), theirs.stride(), x + rows.begin * arguments.x_stride[0],
              arguments.x_stride[0], rows.size(), depth);
    if constexpr (sizeof(Element) == 1) {
      for (int64_t row = ptx::tid_x(); row < rows.size(); row += ptx::ntid_x()) {
        theirs.scales()[staged + row] = arguments.x_scale[arguments.row_wise ? rows.begin + row : 0];
      }
    }
    ptx::barrier_sync();  // the stores of all threads are ordered before the signal
    if (ptx::tid_x() == 0) signal_tile(group, push.peer, push.chunk, epoch);
  }
}

// All threads of comm block `block` of `blocks`: rows of all ranks, as they arrive, to `gathered`. False when a wait was
// cut short.
template <class Element>
INTERLACE_DEVICE bool copy_gathered(const SymmetricGroup& group, const GemmArguments& arguments,
                                    const GatherArguments& gather, uint32_t epoch, uint32_t block,
                                    uint32_t blocks) {
  const GatherSchedule& schedule = gather.schedule;
  const int64_t depth = arguments.products[0].depth;
  const GatherStaging<Element> own(group, schedule.rank, epoch, schedule, depth);
  int64_t number = 0;  // of the chunk among all
  for (int step = 0; step < schedule.shards.world_size; ++step) {
    const int source = source_at(schedule.rank, step, schedule.shards.world_size);
    for (int64_t chunk = 0; chunk < schedule.chunks(source); ++chunk, ++number) {
      if (number % blocks != block) continue;
      const Range rows = schedule.rows_of_chunk(source, chunk);
      const Element* from = static_cast<const Element*>(arguments.x[0]) + rows.begin * arguments.x_stride[0];
      int64_t stride = arguments.x_stride[0];
      if (step != 0) {
        bool arrived = true;
        if (ptx::tid_x() == 0) arrived = wait_for_tile(group, Op::kAllGatherGemm, source, chunk, epoch);
        if (!ptx::barrier_red_and(arrived)) return false;
        from = own.row(schedule.staged_row(source) + rows.begin);
        stride = own.stride();
      }
      Element* const to = static_cast<Element*>(gather.gathered) +
                          (schedule.shards.begin(source) + rows.begin) * gather.gathered_stride;
      copy_rows(to, gather.gathered_stride, from, stride, rows.size(), depth);
    }
  }
  return true;
}

template <class Mainloop>
INTERLACE_KERNEL(Mainloop::kThreads)
all_gather_gemm_kernel(INTERLACE_PARAMETER SymmetricGroup group, INTERLACE_PARAMETER GemmArguments arguments,
                       INTERLACE_PARAMETER GatherArguments gather,
                       INTERLACE_PARAMETER typename Mainloop::Maps maps) {
  using Element = typename Mainloop::Element;
  INTERLACE_DYNAMIC_SHARED(shared);
  const GatherSchedule& schedule = gather.schedule;
  const uint32_t block = ptx::ctaid_x(), comm_blocks = gather.comm_blocks;

  const Entry entry = enter_epoch(group, Op::kAllGatherGemm);
  INTERLACE_SHARED uint32_t epoch;  // neither consumers nor producer have a register to keep it in
  if (ptx::tid_x() == 0) epoch = entry.epoch;
  ptx::barrier_sync();
  if (entry.open) {
    if (block == 0) refresh_all(group, epoch, [&](int) { return schedule.chunks(schedule.rank); });
    if (block < comm_blocks) {
      push_own_rows<Element>(group, arguments, schedule, epoch, block, comm_blocks);
      if (gather.gathered != nullptr)
        copy_gathered<Element>(group, arguments, gather, epoch, block, comm_blocks);
    } else {
      const GatherStaging<Element> own(group, schedule.rank, epoch, schedule, arguments.products[0].depth);
      GatherHooks<Mainloop> hooks{group, arguments, schedule, epoch, own.scales()};
      Mainloop::run(maps, arguments, hooks, block - comm_blocks, ptx::nctaid_x() - comm_blocks, shared);
    }
    if (block == 0) hear_from_peers(group, Op::kAllGatherGemm, epoch);
  }
  leave_epoch(group, epoch);
}

}  // namespace interlace
