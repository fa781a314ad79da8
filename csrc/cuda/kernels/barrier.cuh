// barrier: every rank waits until every rank has come.
#pragma once

#include "cuda/kernels/signals.cuh"

namespace interlace {

constexpr int kBarrierThreads = 32;
static_assert(kBarrierThreads >= kMaxRanks, "one thread waits for each peer");

// One block per rank. What the ranks' streams did before it is visible to what they do after it.
INTERLACE_KERNEL(kBarrierThreads) barrier_kernel(INTERLACE_PARAMETER SymmetricGroup group) {
  const Entry entry = enter_epoch(group, Op::kBarrier);
  if (entry.open) meet_peers(group, Op::kBarrier, entry.epoch);
  leave_epoch(group, entry.epoch);
}

// The barrier before copy engines push into the peers' half 0. A copy's destination is fixed, also in a graph that is
// replayed, so the epoch after this one must use half 0: this one takes the next odd number, on all ranks alike. When it
// ends, every rank has finished all earlier epochs: both halves are free everywhere. The half stays this epoch's until a
// peer reaches the one after next with its parity, and by then it has heard from this rank in the one between.
INTERLACE_KERNEL(kBarrierThreads) push_barrier_kernel(INTERLACE_PARAMETER SymmetricGroup group) {
  Entry entry = enter_epoch(group, Op::kBarrier);
  if (parity(entry.epoch) == 0) ++entry.epoch;
  // the kernels that signal the pushes run beside the one of epoch + 1, which may leave before they read this
  if (ptx::tid_x() == 0) control_of(group, own_rank(group)).push_epoch = entry.epoch + 1;
  if (entry.open) meet_peers(group, Op::kBarrier, entry.epoch);
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
