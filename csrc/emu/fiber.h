// One CUDA thread: a stack of its own, switched to and from by the OS thread that plays the block.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "emu/sanitizer.h"

namespace interlace::emu {

constexpr size_t kStackBytes =
    64 * 1024;  // kernels keep little on the stack; ThreadSanitizer's frames fit too

// What a thread waits for, for the dump of a stuck world.
enum class Waiting : uint8_t { kNothing, kBlock, kWarp, kNamedBarrier, kSignal };

struct Fiber {
  ucontext_t context{};
  std::unique_ptr<char[]> stack;
  void* id = nullptr;  // ThreadSanitizer's name for it
  bool done = false;
  Waiting waiting = Waiting::kNothing;
  uint64_t detail = 0;                  // named barrier's number
  const uint32_t* polled = nullptr;     // last signal word it loaded, and what it saw there
  uint32_t seen = 0;
};

}  // namespace interlace::emu
