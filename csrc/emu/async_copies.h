// cp.async: each thread's own copies into shared memory, which arrive when it waits for them.
#pragma once

#include <cstdint>

#include "emu/shared_memory.h"

namespace interlace::emu {

class AsyncCopies {
 public:
  AsyncCopies(const SharedMemory& shared, uint32_t threads)
      : shared_(shared), queues_(zeroed<Queue>(threads)), queue_(queues_.get()) {}

  INTERLACE_EMU_HIDDEN void issue(uint32_t thread, uint32_t address, const void* global, uint32_t valid) {
    char* const to = shared_.at(address, 16, 16, "cp_async_16");
    if (valid > 16) misuse("cp_async_16: %u valid bytes of 16", valid);
    if (valid > 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0) {
      misuse("cp_async_16: global address %p is not aligned to 16", global);
    }
    Queue& queue = queue_[thread];
    if (queue.issued - queue.done == kDepth)
      misuse("cp_async_16: more than %u copies of a thread on the way", kDepth);
    queue.copies[queue.issued++ % kDepth] = {address, valid, static_cast<const char*>(global), queue.groups};
    // it may be written from now on, and must be readable
    note_write(to, 16);
    if (valid > 0) note_read(global, valid);
    for (int i = 0; i < 16; ++i) to[i] = static_cast<char>(kPoison);
  }
  INTERLACE_EMU_HIDDEN void commit(uint32_t thread) { ++queue_[thread].groups; }
  INTERLACE_EMU_HIDDEN void wait(uint32_t thread, uint32_t keep) {
    Queue& queue = queue_[thread];
    while (queue.done < queue.issued) {
      const Copy& copy = queue.copies[queue.done % kDepth];
      if (copy.group + keep >= queue.groups) return;
      arrive(copy);
      ++queue.done;
    }
  }
  INTERLACE_EMU_HIDDEN void end(uint32_t thread) const {
    const Queue& queue = queue_[thread];
    if (queue.done != queue.issued) misuse("end of the kernel: a cp.async is still on the way");
  }

 private:
  static constexpr uint32_t kDepth = 64;
  struct Copy {
    uint32_t address, valid;
    const char* global;
    uint32_t group;  // number of commits before it
  };
  struct Queue {
    uint64_t issued, done;
    uint32_t groups;
    Copy copies[kDepth];
  };

  INTERLACE_EMU_HIDDEN void arrive(const Copy& copy) const {
    char* const to = shared_.start() + (copy.address - kFirstAddress);
    if (copy.valid > 0) note_read(copy.global, copy.valid);
    note_write(to, 16);
    for (uint32_t i = 0; i < 16; ++i) to[i] = i < copy.valid ? copy.global[i] : 0;
  }

  const SharedMemory& shared_;
  std::unique_ptr<Queue[], Free> queues_;
  Queue* const queue_;
};

}  // namespace interlace::emu
