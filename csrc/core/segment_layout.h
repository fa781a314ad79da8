// The control page at the start of every rank's shared segment. The owner writes it, peers read it; the one exception
// is `waiters`, which peers count up while they sleep.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/call.h"
#include "core/signal.h"

namespace interlace {

constexpr uint64_t kSegmentMagic = 0x656361'6c726574'6eull;
constexpr uint32_t kLayoutVersion = 1;

// Which progress word a wait is about: first results of a rank, or results that themselves needed the peers.
enum class Channel : uint32_t { kPartial = 0, kFinal = 1 };
constexpr int kChannels = 2;

// 128 bytes: the adjacent-line prefetcher pairs 64-byte lines. Entry and progress share the line, so that the first
// wait for a peer brings its fingerprint along and costs no second miss.
struct alignas(128) ProgressLine {
  std::atomic<uint32_t> value;  // progress_word; release store by the owner after the chunk's bytes
  std::atomic<uint32_t> waiters;  // peers asleep on `value`
  std::atomic<uint32_t> entered;  // last epoch the owner began; release store after fingerprint and extent
  std::atomic<uint32_t>
      abandoned[2];  // last epoch of this parity that the owner left with an error; before `value`
  uint64_t fingerprint[2];  // by parity of the epoch
  int64_t extent[2];  // length of the owner's shard along the gathered dim, by parity
};
static_assert(sizeof(ProgressLine) == 128);

// Why the owner left an epoch, for the peers' message.
struct FailureText {
  uint32_t epoch;
  char text[700];
};

struct alignas(4096) ControlPage {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t rank;
  uint32_t world_size;
  int32_t pid;
  std::atomic<uint32_t> left;  // 1 when the owner has left the group for good
  ProgressLine lines[kChannels];
  Call calls[2];  // by parity, read only to explain a mismatch
  int64_t splits[2][kMaxRanks];  // all_to_all: elements for each rank, by parity
  FailureText failures[2];  // by parity
  alignas(128) std::atomic<uint32_t> probe;  // ping-pong of the latency probe, once after rendezvous
};

constexpr int64_t kControlBytes = sizeof(ControlPage);
static_assert(kControlBytes == 4096);

}  // namespace interlace
