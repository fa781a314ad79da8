// Hooks of a GEMM whose rows are summed over the ranks: every tile is pushed into the half of whoever sums its rows.
#pragma once

#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/gemm_hooks.h"
#include "cuda/kernels/plain_gemm.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

// Partial sums in a half: of the type of out, or fp32.
template <class Out> struct WireFormat {
  bool float32;
  int64_t row_bytes;

  INTERLACE_DEVICE WireFormat(const ReduceArguments& reduce, int64_t columns)
      : float32(reduce.float32_wire),
        row_bytes(ReduceSchedule::row_bytes(columns, reduce.float32_wire ? sizeof(float) : sizeof(Out))) {}

  INTERLACE_DEVICE int64_t column_bytes(int64_t column) const {
    return column * (float32 ? sizeof(float) : sizeof(Out));
  }
  // `to`: aligned to a pack of columns, as all places of a slot are
  INTERLACE_DEVICE void store(char* to, int valid, const float (&values)[kStoreColumns]) const {
    if (!float32) return store_columns(reinterpret_cast<Out*>(to), valid, values);
    INTERLACE_UNROLL
    for (int half = 0; half < 2; ++half) {
      Pack<float> pack;
      INTERLACE_UNROLL
      for (int i = 0; i < Pack<float>::kElements; ++i)
        pack.elements[i] = values[half * Pack<float>::kElements + i];
      store_pack(reinterpret_cast<float*>(to), half, valid, true, pack);
    }
  }
};

template <class Mainloop> struct ScatterHooks {
  static constexpr bool kWaits = false;
  static constexpr bool kPublishes = true;
  using Out = typename Mainloop::Out;

  const SymmetricGroup& group;
  const GemmArguments& arguments;
  const ReduceArguments& reduce;
  const uint32_t& epoch;  // in shared memory

  INTERLACE_DEVICE int64_t tiles() const { return reduce.schedule.tiles(); }

  INTERLACE_DEVICE TileWork tile(int64_t index) const {
    const ScheduledTile tile = reduce.schedule.tile(index);
    TileWork work;
    work.row = static_cast<int32_t>(tile.row);
    work.rows = tile.rows;
    work.column = tile.columns.column;
    work.columns = tile.columns.columns;
    work.owner = tile.rank;  // the stretch; the owner of all its rows when they are scattered
    work.index = static_cast<int32_t>(tile.row_block);
    return work;
  }

  INTERLACE_DEVICE bool ready(const TileWork&) const { return true; }

  INTERLACE_DEVICE void store(const TileWork& work, int row, int column, float (&values)[kStoreColumns],
                              int valid) const {
    const ReduceSchedule& schedule = reduce.schedule;
    const WireFormat<Out> wire(reduce, arguments.products[0].columns);
    const int64_t at_column = work.column + column;
    if constexpr (sizeof(typename Mainloop::Element) == 1) {
      scale_columns(arguments, arguments.products[0], scale_of_row(arguments, work.row + row), at_column,
                    valid, values);
    }
    int owner = schedule.rank;
    int64_t place = int64_t{work.row + row} * wire.row_bytes;  // multicast: one slot of all rows
    if (!reduce.multicast) {
      const int64_t in_stretch = int64_t{work.index} * schedule.tile_rows + row;
      owner = schedule.owner(work.owner, in_stretch);
      place = schedule.slot_offset(owner, schedule.rank, wire.row_bytes) +
              schedule.owned_row(in_stretch) * wire.row_bytes;
    }
    wire.store(half_of(group, owner, epoch) + place + wire.column_bytes(at_column), valid, values);
  }

  // One thread, after the stores of all threads of the block: whoever stores the last tile of a row block tells its
  // owners. acq_rel: the stores of the blocks that came before are ordered before the signal.
  INTERLACE_DEVICE void stored(const TileWork& work) const {
    const ReduceSchedule& schedule = reduce.schedule;
    SegmentControl& own = control_of(group, schedule.rank);
    uint32_t& counter = own.tiles_stored[schedule.row_blocks_before(work.owner) + work.index];
    const auto across = static_cast<uint32_t>(schedule.across());
    if (ptx::atom_add_acq_rel_gpu_u32(&counter, 1) != across - 1) return;
    counter = 0;  // nobody else comes in this launch
    if (schedule.scatter) return signal_tile(group, work.owner, work.index, epoch);
    for (int owner = 0; owner < group.world_size; ++owner) signal_tile(group, owner, work.index, epoch);
  }
};

}  // namespace interlace
