// Random numbers of one block, usable from hidden code.
#pragma once

#include <cstdint>

#include "emu/sanitizer.h"

namespace interlace::emu {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du) {}

  INTERLACE_EMU_HIDDEN_INLINE uint64_t next() {  // xorshift64* (Vigna 2016)
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1du;
  }
  // 0..count-1
  INTERLACE_EMU_HIDDEN_INLINE uint32_t below(uint32_t count) {
    return static_cast<uint32_t>(((next() >> 32) * count) >> 32);
  }

 private:
  uint64_t state_;
};

}  // namespace interlace::emu
