// One CUDA thread: a stack of its own, switched to and from by the OS thread that plays the block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "emu/context.h"
#include "emu/mbarrier.h"
#include "emu/registers.h"
#include "emu/rendezvous.h"

namespace interlace::emu {

constexpr size_t kStackBytes = 64 * 1024;  // kernels keep little there; ThreadSanitizer's frames fit too
// A word that a thread overwrites when it uses too much of its stack; below it there is room to say so.
constexpr uint64_t kStackMark = 0x5ac3'1f07'e4d2'9b68u;
constexpr size_t kStackMarkPlace = 8 * 1024;

// What a thread waits for. The scheduler asks, and switches to those that can go on.
enum class Waiting : uint8_t {
  kNothing,
  kBlock,
  kWarp,
  kNamedBarrier,
  kMbarrier,
  kMbarrierTry,
  kRegisters,
  kSignal
};

struct Fiber {
  Context context;
  char* stack;
  void* identity;  // ThreadSanitizer's name for it, its own or that of its warp
  bool done;
  Waiting waiting;
  uint32_t detail;              // named barrier's number, mbarrier's parity, registers
  const Rendezvous* rendezvous;
  uint64_t meeting;
  const Barrier* barrier;
  const uint32_t* polled;     // last signal word it loaded, and what it saw there
  uint32_t seen;
  Registers registers;
  char fenced_tag;  // what it had done and seen at its last proxy fence

  INTERLACE_EMU_HIDDEN_INLINE uint64_t& stack_mark() const {
    return *reinterpret_cast<uint64_t*>(stack + kStackMarkPlace);
  }
};

inline std::string describe(const Fiber& fiber) {
  switch (fiber.waiting) {
    case Waiting::kNothing: return "runs";
    case Waiting::kBlock: return "waits for its block";
    case Waiting::kWarp: return "waits for its warp";
    case Waiting::kNamedBarrier:
      return "waits at named barrier " + std::to_string(fiber.detail) + ": " +
             std::to_string(fiber.rendezvous->arrived) + " of " + std::to_string(fiber.rendezvous->expected) +
             " threads are there";
    case Waiting::kMbarrier:
    case Waiting::kMbarrierTry: return describe(*fiber.barrier, fiber.detail);
    case Waiting::kRegisters: return "waits for " + std::to_string(fiber.detail) + " registers";
    case Waiting::kSignal: break;
  }
  if (fiber.polled == nullptr) return "sleeps";
  char text[64];
  std::snprintf(text, sizeof(text), "polls a signal at %p, last saw %u",
                static_cast<const void*>(fiber.polled), fiber.seen);
  return text;
}

}  // namespace interlace::emu
