// publish_chunk: one thread tells a peer that a chunk has arrived there which the copy engine brought before this in
// stream order.
#pragma once

#include "cuda/kernels/signals.cuh"

namespace interlace {

// Belongs to the epoch that push_barrier opened and the gather's launch uses, but takes none itself. Release: the copies
// that this stream finished before are visible to the peer that acquires the word. An aborted group is not signalled.
INTERLACE_KERNEL(1)
publish_chunk_kernel(INTERLACE_PARAMETER SymmetricGroup group, INTERLACE_PARAMETER int32_t peer,
                     INTERLACE_PARAMETER int64_t chunk) {
  const SegmentControl& own = control_of(group, own_rank(group));
  if (ptx::ld_relaxed_sys_u32(&own.abort) == 0) signal_tile(group, peer, chunk, own.push_epoch);
}

}  // namespace interlace
