// A meeting of threads of one block: the base of __syncthreads, warp shuffles and named barriers.
#pragma once

#include <cstdint>

#include "emu/misuse.h"

namespace interlace::emu {

// Does the meeting order what the threads do? A barrier does; a shuffle only passes registers.
enum class Ordering : uint8_t { kNone, kMemory };

// Plain state, touched only by functions marked hidden. Everything done by any thread before it arrived is visible
// to every thread after it left. Two of each field: a fast thread may arrive for the next meeting while a slow one has
// not left the last.
struct Rendezvous {
  uint32_t arrived = 0;
  uint32_t expected = 0;        // by the first to arrive
  uint64_t generation = 0;      // meetings completed
  bool all[2] = {true, true};   // conjunction of the values brought along
  char tag[2] = {};             // what ThreadSanitizer hangs the order on

  // One thread arrives. True when it is the last of `threads`; then it must call `complete`.
  INTERLACE_EMU_HIDDEN bool arrive(uint32_t threads, bool value, Ordering ordering) {
    bool& all_now = all[generation & 1];
    if (arrived == 0) {
      all_now = true;
      expected = threads;
    }
    if (threads != expected) {
      misuse("barrier: this thread expects %u threads, another %u", threads, expected);
    }
    all_now = all_now && value;
    if (ordering == Ordering::kMemory) release_tag(&tag[generation & 1]);
    return ++arrived == threads;
  }
  INTERLACE_EMU_HIDDEN void complete() {
    arrived = 0;
    ++generation;
  }

  INTERLACE_EMU_HIDDEN_INLINE bool over(uint64_t meeting) const { return generation != meeting; }

  // After `over`: returns the conjunction of all values.
  INTERLACE_EMU_HIDDEN bool leave(uint64_t meeting, Ordering ordering) {
    if (ordering == Ordering::kMemory) acquire_tag(&tag[meeting & 1]);
    return all[meeting & 1];
  }
};

}  // namespace interlace::emu
