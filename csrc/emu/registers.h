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

// A thread's registers.
struct Registers {
  uint32_t count;
  bool moved;  // since the thread was last in a barrier
};

class RegisterPool {
 public:
  void begin() { free_ = 0; }

  INTERLACE_EMU_HIDDEN void give(Registers& own, uint32_t registers) {
    check("setmaxnreg_dec", own, registers);
    if (registers > own.count) misuse("setmaxnreg_dec: from %u to %u registers", own.count, registers);
    free_ += own.count - registers;
    own = {registers, true};
  }
  INTERLACE_EMU_HIDDEN bool enough(uint32_t more) const { return free_ >= more; }
  INTERLACE_EMU_HIDDEN uint32_t missing(const Registers& own, uint32_t registers) const {
    check("setmaxnreg_inc", own, registers);
    if (registers < own.count) misuse("setmaxnreg_inc: from %u to %u registers", own.count, registers);
    return registers - own.count;
  }
  INTERLACE_EMU_HIDDEN void take(Registers& own, uint32_t more) {
    free_ -= more;
    own = {own.count + more, true};
  }

 private:
  INTERLACE_EMU_HIDDEN static void check(const char* what, const Registers& own, uint32_t registers) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) {
      misuse("%s: %u registers; needs a multiple of 8 in 24..256", what, registers);
    }
    if (own.moved) misuse("%s: no barrier since this thread's last setmaxnreg", what);
  }
  uint32_t free_ = 0;
};

}  // namespace interlace::emu
