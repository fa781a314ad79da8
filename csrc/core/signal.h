// The arithmetic of signals: epochs, parity, progress words. One text for CPU, CUDA and emulator.
//
// Every call of an op on a group consumes one epoch e on every rank, in the same order. What a rank writes for its
// peers goes into the half of its segment that parity(e) selects; progress inside the call is a 32-bit word
// (epoch, chunk) that only grows and is never reset. Words are compared by their signed difference, so they may wrap.
#pragma once

#include <cstdint>

#include "core/qualifiers.h"

namespace interlace {

constexpr int kMaxRanks = 8;  // pointer tables are arrays of this size
constexpr uint32_t kChunkBits = 12;  // low bits of a progress word
constexpr uint32_t kMaxChunk = (1u << kChunkBits) - 1;  // last chunk number: "all of this epoch is done"

// Has a counter reached `want`? Right across the wrap as long as the two are less than 2^31 apart.
INTERLACE_HD constexpr bool reached(uint32_t seen, uint32_t want) {
  return static_cast<int32_t>(seen - want) >= 0;
}

// The half of the double buffer that epoch e uses.
INTERLACE_HD constexpr uint32_t parity(uint32_t epoch) { return epoch & 1u; }

// "chunks 1..chunk of this epoch are published". Epochs lose their high bits here: 20 remain, far more than the two
// epochs by which ranks can differ.
INTERLACE_HD constexpr uint32_t progress_word(uint32_t epoch, uint32_t chunk) {
  return (epoch << kChunkBits) | chunk;
}

INTERLACE_HD constexpr uint32_t chunk_of(uint32_t word) { return word & kMaxChunk; }

// How many units of work one signal covers, so that a call of `units` units needs at most kMaxChunk - 1 signals.
INTERLACE_HD constexpr int64_t units_per_chunk(int64_t units) { return 1 + (units - 1) / (kMaxChunk - 1); }

static_assert(reached(0u, 0xffffffffu) && !reached(0xffffffffu, 0u), "comparison must survive the wrap");
static_assert(units_per_chunk(1) == 1 && units_per_chunk(4094) == 1 && units_per_chunk(4095) == 2);

}  // namespace interlace
