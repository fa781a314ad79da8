// What ends a program at once: a kernel that breaks a rule of the device. The other emulated threads may be in any state,
// so nothing is unwound.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "emu/sanitizer.h"

namespace interlace::emu {

// Which emulated thread the OS thread plays at the moment.
struct Place {
  int rank = -1;
  uint32_t block = 0;
  int thread = -1;
};
inline thread_local Place current_place;

[[noreturn]] INTERLACE_EMU_HIDDEN inline void misuse(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  const Place& place = current_place;
  std::fprintf(stderr, "FAILED: rank %d block %u thread %d: %s\n", place.rank, place.block, place.thread,
               text);
  std::_Exit(1);
}

}  // namespace interlace::emu
