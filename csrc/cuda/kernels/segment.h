// Device memory that the ranks of a group share, and what a kernel is told about it. Host and device read this file.
//
//   segment of a rank = SegmentControl, half 0, half 1
//
// A new segment is all zero on every rank before the first launch. A launch consumes one epoch on every rank, in the
// same order; its staging lies in the half that parity(epoch) selects. Epochs are counted in the segment, by the
// kernels, so that a captured graph can be replayed. A two-shot launch consumes two: it reduces in one and gathers in
// the next, as two launches would.
//
// Why no barrier at the end: a rank that finishes epoch e has heard from every peer in e, so every peer has left e-1
// (one stream: its next launch began), and the half of e-1 is free for e+1. So every launch waits for at least one
// signal of every peer, also of a peer that has nothing to send.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "core/gemm_schedule.h"
#include "core/signal.h"

namespace interlace {

constexpr uint32_t kMaxBlocks = 64;  // blocks per rank and launch that exchange signals

struct alignas(128) SegmentControl {
  uint32_t arrivals[kMaxBlocks]
                   [kMaxRanks];  // [block][peer]: last epoch that the peer's block reached; the peer writes
  alignas(128) uint32_t abort;  // 1 + the rank that gave up; any rank writes, never cleared by a kernel
  alignas(128) uint32_t epoch;  // last epoch this rank finished; this and the rest are its own
  uint32_t blocks_finished;  // of the running launch
  uint32_t failure_claimed;  // the failure of this rank is being, or has been, written
  uint32_t push_epoch;  // the epoch for which a copy engine pushes this rank's rows
  uint32_t claims[2];  // next unit of this rank to be reduced, to be copied; 0 between launches
  // [index][peer]: last epoch in which the peer sent what has this index (core/gemm_schedule.h); the peer writes
  alignas(128) uint32_t tile_arrivals[kMaxTileSignals][kMaxRanks];
  uint32_t tiles_stored[kMaxTileSignals];  // of each row block in the running launch; 0 between launches
};
static_assert(sizeof(SegmentControl) == 2304 + kMaxTileSignals * (kMaxRanks + 1) * sizeof(uint32_t));

enum class FailureState : uint32_t { kNone = 0, kTimedOut = 1, kAborted = 2 };

// Why a launch left early, for the host to raise. Lies in pinned host memory, one per rank; written at most once.
struct DeviceFailure {
  uint32_t state;  // FailureState; stored last, with release
  uint32_t op;  // Op
  uint32_t rank;
  uint32_t peer;  // whom it waited for; when aborted, who gave up first
  uint32_t block;
  uint32_t want;  // epochs
  uint32_t seen;
  uint32_t tile;  // 1 + index of the word in tile_arrivals; 0: it waited for the peer's block
};

struct alignas(64) HostPage {
  uint32_t abort_request;  // the host sets it to make waiting kernels leave
  DeviceFailure failure;
};

// The group, as one launch sees it. A launch plays `first_rank` + ctaid.y: one rank on its own device, or several
// virtual ranks on one.
struct SymmetricGroup {
  char* segments[kMaxRanks];  // by rank, at this device's addresses
  char* multicast;  // all segments at once, through the switch (NVLS); null when there is no such address
  HostPage* pages[kMaxRanks];  // of the ranks this launch plays
  int64_t half_bytes;
  uint64_t timeout_nanoseconds;  // of one wait
  int32_t world_size;
  int32_t first_rank;
};

// Bytes of a segment whose halves hold `half_bytes` each.
constexpr int64_t segment_bytes(int64_t half_bytes) {
  return static_cast<int64_t>(sizeof(SegmentControl)) + 2 * half_bytes;
}

}  // namespace interlace
