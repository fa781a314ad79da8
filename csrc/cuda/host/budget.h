// How many blocks a launch may have: those that wait for each other must all be resident at once.
#pragma once

#include <cstdint>
#include <string>

namespace interlace {

// One device as a launch finds it. ranks: how many ranks of the group it plays, 1 or all (virtual ranks).
struct DeviceShare {
  int64_t multiprocessors = 0;
  int64_t ranks = 1;

  // Blocks of one launch, one per multiprocessor.
  constexpr int64_t blocks() const { return multiprocessors / ranks; }
};

struct Budget {
  int32_t blocks = 0;  // of the whole launch
  int32_t comm_blocks = 0;  // of them, those that move rows; at least one of the others multiplies
};

// blocks = 0: all that the share allows, at most `useful`. Raises ValueError with the numbers when they do not fit.
Budget choose_budget(const char* op, const DeviceShare& share, int64_t blocks, int64_t comm_blocks,
                     int64_t useful);

int multiprocessors(int device);
int compute_capability(int device);  // 10 * major + minor

}  // namespace interlace
