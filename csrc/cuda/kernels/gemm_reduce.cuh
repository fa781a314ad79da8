// gemm_reduce_scatter and gemm_all_reduce: out = sum over ranks of x weight^T, summed while later tiles are multiplied.
//
//   blocks [0, comm_blocks)   reduce from the start
//   the other blocks          multiply, push every tile into the half of whoever sums its rows, then reduce as well
//
// Nobody who waits holds up a product: all ranks' tiles are stored in the end, so every unit that is claimed is finished.
#pragma once

#include "cuda/kernels/reducer.cuh"
#include "cuda/kernels/scatter_hooks.cuh"

namespace interlace {

template <class Mainloop>
INTERLACE_KERNEL(Mainloop::kThreads)
gemm_reduce_kernel(INTERLACE_PARAMETER SymmetricGroup group, INTERLACE_PARAMETER GemmArguments arguments,
                   INTERLACE_PARAMETER ReduceArguments reduce,
                   INTERLACE_PARAMETER typename Mainloop::Maps maps) {
  using Out = typename Mainloop::Out;
  INTERLACE_DYNAMIC_SHARED(shared);
  const ReduceSchedule& schedule = reduce.schedule;
  const Op op = schedule.scatter ? Op::kGemmReduceScatter : Op::kGemmAllReduce;
  const uint32_t block = ptx::ctaid_x(), comm_blocks = reduce.comm_blocks;
  const int thread = static_cast<int>(ptx::tid_x());

  const Entry entry = enter_epoch(group, op);
  INTERLACE_SHARED uint32_t epoch;  // consumers of large tiles have no register to keep it in
  if (thread == 0) epoch = entry.epoch;
  ptx::barrier_sync();
  if (entry.open) {
    if (block == 0) {
      refresh_all(group, epoch, [&](int owner) { return schedule.signals(schedule.rank, owner); });
      // an owner without rows gets no tile, but it must hear from everybody
      if (thread < group.world_size && schedule.row_blocks_of(schedule.scatter ? thread : 0) == 0)
        signal_tile(group, thread, 0, epoch);
    }
    if (block >= comm_blocks) {
      ScatterHooks<Mainloop> hooks{group, arguments, reduce, epoch};
      Mainloop::run(maps, arguments, hooks, block - comm_blocks, ptx::nctaid_x() - comm_blocks, shared);
    }
    const Reducer<Out, Mainloop::kSwitch> reducer(group, arguments, reduce, op, epoch);
    if (reducer.reduce_units() && !schedule.scatter) reducer.copy_units();
    if (block == 0) hear_from_peers(group, op, epoch);
  }
  leave_epoch(group, epoch);
}

}  // namespace interlace
