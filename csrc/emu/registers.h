// setmaxnreg: the registers of a block, given back by some warpgroups and taken by others.
#pragma once

#include <cstdint>

#include "emu/misuse.h"

namespace interlace::emu {

constexpr uint32_t kBlockRegisters = 64 * 1024;

// What the compiler gives each thread of the only block of a multiprocessor.
constexpr uint32_t launch_registers(uint32_t threads) {
  const uint32_t registers = kBlockRegisters / threads / 8 * 8;
  return registers < 248 ? registers : 248;
}

class RegisterPool {
 public:
  void begin() { free_ = 0; }

  INTERLACE_EMU_HIDDEN void give(uint32_t& own, uint32_t registers) {
    check("setmaxnreg_dec", registers);
    if (registers > own) misuse("setmaxnreg_dec: from %u to %u registers", own, registers);
    free_ += own - registers;
    own = registers;
  }
  INTERLACE_EMU_HIDDEN bool enough(uint32_t more) const { return free_ >= more; }
  INTERLACE_EMU_HIDDEN uint32_t missing(uint32_t own, uint32_t registers) const {
    check("setmaxnreg_inc", registers);
    if (registers < own) misuse("setmaxnreg_inc: from %u to %u registers", own, registers);
    return registers - own;
  }
  INTERLACE_EMU_HIDDEN void take(uint32_t& own, uint32_t more) {
    free_ -= more;
    own += more;
  }

 private:
  INTERLACE_EMU_HIDDEN static void check(const char* what, uint32_t registers) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) {
      misuse("%s: %u registers; needs a multiple of 8 in 24..256", what, registers);
    }
  }
  uint32_t free_ = 0;
};

}  // namespace interlace::emu
