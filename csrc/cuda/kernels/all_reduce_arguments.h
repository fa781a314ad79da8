// What an all-reduce kernel is given besides its group. Host and device read this file.
#pragma once

#include <cstdint>

#include "core/signal.h"

namespace interlace {

// input [count], out [count], per rank; out may be input. Any count and any alignment of the elements.
struct AllReduceArguments {
  const void* inputs[kMaxRanks];  // of the ranks this launch plays, counted from first_rank
  void* outs[kMaxRanks];
  int64_t count;
};

}  // namespace interlace
