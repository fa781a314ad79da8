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

}  // namespace interlace
