// What the collectives over shards are given. Host and device read this file.
#pragma once

#include <cstdint>

#include "core/staging.h"

namespace interlace {

// reduce_scatter: inputs are whole, outs the shards; all_gather: inputs are the shards, outs whole. Dense, any alignment.
// Tables are of the ranks this launch plays, counted from first_rank.
struct ShardArguments {
  const void* inputs[kMaxRanks];
  void* outs[kMaxRanks];
  Shards elements;
};

// all_to_all: piece p of the input goes to rank p; piece p of out comes from it.
struct AllToAllArguments {
  const void* inputs[kMaxRanks];
  void* outs[kMaxRanks];
  Shards sent[kMaxRanks];  // by played rank, in elements
  Shards received[kMaxRanks];
  int64_t largest;  // at least the largest piece of all ranks, equal on all
};

}  // namespace interlace
