// A meeting of threads of one block: the base of __syncthreads, warp shuffles and named barriers.
#pragma once

#include <cstdint>

#include "emu/sanitizer.h"

namespace interlace::emu {

// Plain state, touched only by functions marked hidden. Everything done by any thread before it arrived is visible
// to every thread after it left. Two of each field: a fast thread may arrive for the next meeting while a slow one has
// not left the last.
struct Rendezvous {
  uint32_t arrived = 0;
  uint64_t generation = 0;      // meetings completed
  bool all[2] = {true, true};   // conjunction of the values brought along
  char tag[2] = {};             // what ThreadSanitizer hangs the order on

  // One thread arrives. Returns the meeting it takes part in; sets `completed` when it is the last of `expected`.
  INTERLACE_EMU_HIDDEN uint64_t arrive(uint32_t expected, bool value, bool* completed) {
    const uint64_t meeting = generation;
    bool& all_now = all[meeting & 1];
    if (arrived == 0) all_now = true;
    all_now = all_now && value;
    release_tag(&tag[meeting & 1]);
    *completed = ++arrived == expected;
    if (*completed) {
      arrived = 0;
      ++generation;
    }
    return meeting;
  }

  INTERLACE_EMU_HIDDEN bool over(uint64_t meeting) const { return generation != meeting; }

  // After `over`: returns the conjunction of all values.
  INTERLACE_EMU_HIDDEN bool leave(uint64_t meeting) {
    acquire_tag(&tag[meeting & 1]);
    return all[meeting & 1];
  }
};

}  // namespace interlace::emu
