// What all emulated ranks of one test share: whether anybody still moves, who is to be delayed, what went wrong.
#pragma once

#include <sched.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "emu/misuse.h"

namespace interlace::emu {

// A straggler: before its step `after_steps` (a step is one turn of one fiber), every block of `rank` stands still
// until nobody else can move.
struct Delay {
  int rank = -1;
  uint64_t after_steps = 0;
};

// One emulated machine. `progress` counts everything that can let another thread go on; a block that has seen it
// stand still for `idle_rounds` rounds declares the world stuck, and every block adds to `dump` who waits for what.
class World {
 public:
  static constexpr uint64_t kIdleRounds = 30'000;
  // A block whose OS thread got no core does not move either: whoever does not expect to be stuck waits that long too.
  static constexpr uint64_t kPatienceNanoseconds = 3'000'000'000;

  explicit World(uint64_t seed, Delay delay = {}, uint64_t idle_rounds = kIdleRounds)
      : seed_(seed), delay_(delay), idle_rounds_(idle_rounds) {}

  uint64_t seed() const { return seed_; }
  INTERLACE_EMU_HIDDEN const Delay& delay() const { return delay_; }
  INTERLACE_EMU_HIDDEN uint64_t idle_rounds() const { return idle_rounds_; }
  INTERLACE_EMU_HIDDEN uint64_t patience_nanoseconds() const {
    return idle_rounds_ < kIdleRounds ? 0 : kPatienceNanoseconds;
  }

  // Relaxed: only the fact that something happened counts, it must not order the kernels' own accesses. Builtins,
  // because GCC makes std::atomic's orders sequentially consistent when it does not inline them.
  INTERLACE_EMU_HIDDEN void note_progress() { __atomic_fetch_add(&progress_, 1, __ATOMIC_RELAXED); }
  INTERLACE_EMU_HIDDEN uint64_t progress() const { return __atomic_load_n(&progress_, __ATOMIC_RELAXED); }

  INTERLACE_EMU_HIDDEN bool stuck() const { return __atomic_load_n(&stuck_, __ATOMIC_RELAXED); }
  void report_stuck(const std::string& who) {
    __atomic_store_n(&stuck_, true, __ATOMIC_RELAXED);
    const std::lock_guard lock(mutex_);
    dump_ += who;
  }
  std::string dump() {
    const std::lock_guard lock(mutex_);
    return dump_;
  }

  // Returns when `progress` has not changed for a while: everybody else has finished or waits for the caller.
  INTERLACE_EMU_HIDDEN void wait_until_nobody_moves() const {
    constexpr int kQuietYields = 300;
    uint64_t seen = progress();
    for (int quiet = 0; quiet < kQuietYields; ++quiet) {
      sched_yield();
      if (progress() != seen) {
        seen = progress();
        quiet = 0;
      }
    }
  }

  // What lies behind a multicast address: the same offset in every peer's memory.
  void bind_multicast(char* multicast, size_t bytes, std::vector<char*> peers) {
    multicasts_.push_back({multicast, bytes, std::move(peers)});
  }
  struct Multicast {
    char* start;
    size_t bytes;
    std::vector<char*> peers;
  };
  const Multicast& multicast_of(const void* address, size_t bytes) const {
    const auto* byte = static_cast<const char*>(address);
    for (const Multicast& multicast : multicasts_) {
      if (byte >= multicast.start && byte + bytes <= multicast.start + multicast.bytes) return multicast;
    }
    misuse("multimem: %p is no multicast address", address);
  }

 private:
  const uint64_t seed_;
  const Delay delay_;
  const uint64_t idle_rounds_;
  uint64_t progress_ = 0;
  bool stuck_ = false;
  std::mutex mutex_;
  std::string dump_;
  std::vector<Multicast> multicasts_;  // bound before the ranks start
};

}  // namespace interlace::emu
