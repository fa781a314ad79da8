// The signal protocol on the device: epochs, arrivals, bounded waits.
#pragma once

#include "core/signal.h"
#include "cuda/kernels/device.cuh"
#include "cuda/kernels/segment.h"

namespace interlace {

constexpr uint32_t kPollsPerCheck = 64;        // polls between two looks at the clock and the abort words
constexpr uint32_t kPollPauseNanoseconds = 20;  // leaves the memory port to the warps that copy

INTERLACE_DEVICE SegmentControl& control_of(const SymmetricGroup& group, int rank) {
  return *reinterpret_cast<SegmentControl*>(group.segments[rank]);
}

// The staging of `rank` for `epoch`.
INTERLACE_DEVICE char* half_of(const SymmetricGroup& group, int rank, uint32_t epoch) {
  return group.segments[rank] + sizeof(SegmentControl) + parity(epoch) * group.half_bytes;
}

INTERLACE_DEVICE int own_rank(const SymmetricGroup& group) {
  return group.first_rank + static_cast<int>(ptx::ctaid_y());
}

// Write the failure of `rank`, once. Release: the host that sees `state` sees the fields.
INTERLACE_DEVICE void record_failure(const SymmetricGroup& group, FailureState state,
                                     const DeviceFailure& failure) {
  if (ptx::atom_exch_relaxed_gpu_u32(&control_of(group, failure.rank).failure_claimed, 1) != 0) return;
  DeviceFailure& record = group.pages[failure.rank]->failure;
  record.op = failure.op;
  record.rank = failure.rank;
  record.peer = failure.peer;
  record.block = failure.block;
  record.want = failure.want;
  record.seen = failure.seen;
  record.tile = failure.tile;
  ptx::st_release_sys_u32(&record.state, static_cast<uint32_t>(state));
}

// Relaxed: the word carries no data, it only ends waits.
INTERLACE_DEVICE void abort_all(const SymmetricGroup& group, int culprit) {
  for (int rank = 0; rank < group.world_size; ++rank) {
    ptx::st_relaxed_sys_u32(&control_of(group, rank).abort, 1 + static_cast<uint32_t>(culprit));
  }
}

// A word of this rank's control that `peer` writes, and the epoch that it must reach.
struct Awaited {
  const uint32_t* word;
  int peer;
  uint32_t tile;  // 1 + index in tile_arrivals, or 0
  uint32_t want;
};

// One thread waits. Acquire: what the peer stored before its signal is visible to this thread. False when the wait was
// cut short; then the failure is recorded and every rank is told to leave.
INTERLACE_DEVICE bool wait_for_word(const SymmetricGroup& group, Op op, const Awaited& awaited) {
  const int rank = own_rank(group);
  const SegmentControl& own = control_of(group, rank);
  const uint64_t start = ptx::globaltimer();
  for (uint32_t polls = 1;; ++polls) {
    const uint32_t seen = ptx::ld_acquire_sys_u32(awaited.word);
    if (reached(seen, awaited.want)) return true;
    if (polls % kPollsPerCheck == 0) {
      DeviceFailure failure{};
      failure.op = static_cast<uint32_t>(op);
      failure.rank = static_cast<uint32_t>(rank);
      failure.peer = static_cast<uint32_t>(awaited.peer);
      failure.block = ptx::ctaid_x();
      failure.want = awaited.want;
      failure.seen = seen;
      failure.tile = awaited.tile;
      if (const uint32_t abort = ptx::ld_relaxed_sys_u32(&own.abort); abort != 0) {
        failure.peer = abort - 1;
        record_failure(group, FailureState::kAborted, failure);
        return false;
      }
      const bool stopped = ptx::ld_relaxed_sys_u32(&group.pages[rank]->abort_request) != 0;
      if (stopped || ptx::globaltimer() - start > group.timeout_nanoseconds) {
        record_failure(group, stopped ? FailureState::kAborted : FailureState::kTimedOut, failure);
        abort_all(group, rank);
        return false;
      }
    }
    ptx::nanosleep_u32(kPollPauseNanoseconds);
  }
}

// The namesake of this block at `peer` has reached `want`.
INTERLACE_DEVICE bool wait_for_peer(const SymmetricGroup& group, Op op, int peer, uint32_t want) {
  const uint32_t* const word = &control_of(group, own_rank(group)).arrivals[ptx::ctaid_x()][peer];
  return wait_for_word(group, op, {word, peer, 0, want});
}

// What `peer` sends under this index has arrived.
INTERLACE_DEVICE bool wait_for_tile(const SymmetricGroup& group, Op op, int peer, int64_t index,
                                    uint32_t want) {
  const uint32_t* const word = &control_of(group, own_rank(group)).tile_arrivals[index][peer];
  return wait_for_word(group, op, {word, peer, 1 + static_cast<uint32_t>(index), want});
}

// One thread. Release: what it stored before, and what was ordered before that, is visible to the one who waits.
INTERLACE_DEVICE void signal_tile(const SymmetricGroup& group, int peer, int64_t index, uint32_t epoch) {
  ptx::st_release_sys_u32(&control_of(group, peer).tile_arrivals[index][own_rank(group)], epoch);
}

// Words that a launch does not use must not fall 2^31 epochs behind, or they would look as if they were ahead: each
// launch brings one block's and one tile's word at every peer up to date, unless it is among the first that the launch
// uses. A slow peer may still wait for that word in the epoch before; release gives it what it waits for.
INTERLACE_DEVICE void refresh_words(const SymmetricGroup& group, int peer, uint32_t epoch,
                                    uint32_t blocks_used, int64_t tiles_used) {
  SegmentControl& theirs = control_of(group, peer);
  const int rank = own_rank(group);
  const uint32_t block = epoch % kMaxBlocks, tile = epoch % kMaxTileSignals;
  if (block >= blocks_used) ptx::st_release_sys_u32(&theirs.arrivals[block][rank], epoch);
  if (tile >= tiles_used) ptx::st_release_sys_u32(&theirs.tile_arrivals[tile][rank], epoch);
}

// All threads of the block call it. The epoch of this launch; `open` is false, for the whole block, when the group was
// aborted earlier: the launch must then neither store nor signal, because a peer may still read what is there.
struct Entry {
  uint32_t epoch;
  bool open;
};

INTERLACE_DEVICE Entry enter_epoch(const SymmetricGroup& group, Op op) {
  const int rank = own_rank(group);
  SegmentControl& own = control_of(group, rank);
  const uint32_t epoch = own.epoch + 1;
  const uint32_t abort = ptx::ld_relaxed_sys_u32(&own.abort);
  const bool open = ptx::barrier_red_and(abort == 0);
  if (!open && abort != 0 && ptx::tid_x() == 0) {
    DeviceFailure failure{};
    failure.op = static_cast<uint32_t>(op);
    failure.rank = static_cast<uint32_t>(rank);
    failure.peer = abort - 1;
    failure.block = ptx::ctaid_x();
    failure.want = epoch;
    failure.seen = epoch;
    record_failure(group, FailureState::kAborted, failure);
  }
  return {epoch, open};
}

// All threads of the block call it, at least world_size of them: meet the same block of every peer. What any thread of
// those blocks stored before is visible to every thread of this one after. False for the whole block when a wait was
// cut short.
INTERLACE_DEVICE bool meet_peers(const SymmetricGroup& group, Op op, uint32_t epoch) {
  const int rank = own_rank(group);
  const uint32_t block = ptx::ctaid_x();
  // the stores of all threads of this block are ordered before the release below
  ptx::barrier_sync();
  bool met = true;
  const int peer = static_cast<int>(ptx::tid_x());
  if (peer < group.world_size && peer != rank) {
    SegmentControl& theirs = control_of(group, peer);
    ptx::st_release_sys_u32(&theirs.arrivals[block][rank], epoch);
    if (block == 0) refresh_words(group, peer, epoch, ptx::nctaid_x(), 0);
    met = wait_for_peer(group, op, peer, epoch);
  }
  // what the waiting threads acquired is visible to the whole block
  return ptx::barrier_red_and(met);
}

// All threads of the block call it last. The last block of the rank to come closes the epoch.
INTERLACE_DEVICE void leave_epoch(const SymmetricGroup& group, uint32_t epoch) {
  if (ptx::tid_x() != 0) return;
  SegmentControl& own = control_of(group, own_rank(group));
  // acq_rel: every block has read `epoch` before the last one overwrites it. Inside a block, enter_epoch's barrier
  // stands between the other threads' reads and this.
  if (ptx::atom_add_acq_rel_gpu_u32(&own.blocks_finished, 1) == ptx::nctaid_x() - 1) {
    own.blocks_finished = 0;
    own.claims[0] = own.claims[1] = 0;
    own.epoch = epoch;
  }
}

}  // namespace interlace
