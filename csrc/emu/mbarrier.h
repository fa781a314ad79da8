// mbarriers: they count arriving threads and arriving bytes, phase after phase.
#pragma once

#include <cstdint>
#include <string>

#include "emu/shared_memory.h"

namespace interlace::emu {

constexpr uint32_t kMaxBarriers = 96;  // per block
constexpr int64_t kMaxPendingBytes = (1 << 20) - 1;  // what the device's count of bytes holds

struct Barrier {
  uint32_t address;
  uint32_t threads;  // that must arrive in each phase
  uint32_t pending;  // of them, in this phase
  int64_t bytes;  // still to come in this phase; negative: came before they were expected
  uint64_t phase;  // phases completed
  int initializer;  // thread
  bool shown;  // to the copy engine, by fence_mbarrier_init
  char tag[2];  // by parity of the phase: what ThreadSanitizer hangs the order on

  // As the instruction asks: a waiter knows the parity only.
  INTERLACE_EMU_HIDDEN_INLINE bool passed(uint32_t parity) const { return (phase & 1) != (parity & 1); }
};

class Barriers {
 public:
  explicit Barriers(const SharedMemory& shared)
      : shared_(shared), barriers_(zeroed<Barrier>(kMaxBarriers)), barrier_(barriers_.get()) {}

  void begin() { count_ = 0; }

  INTERLACE_EMU_HIDDEN void init(uint32_t address, uint32_t threads, int thread) {
    char* word = shared_.at(address, 8, 8, "mbarrier_init");
    if (threads == 0 || threads >= 1u << 20) misuse("mbarrier_init: %u threads", threads);
    for (uint32_t i = 0; i < count_; ++i) {
      if (barrier_[i].address == address) misuse("mbarrier_init: the barrier at %u exists already", address);
    }
    if (count_ == kMaxBarriers) misuse("mbarrier_init: more than %u barriers in a block", kMaxBarriers);
    Barrier& barrier = barrier_[count_++];
    barrier.address = address;
    barrier.threads = barrier.pending = threads;
    barrier.bytes = 0;
    barrier.phase = 0;
    barrier.initializer = thread;
    barrier.shown = false;
    note_write(word, 8);
  }
  INTERLACE_EMU_HIDDEN void show_to_engines(int thread) {
    for (uint32_t i = 0; i < count_; ++i) {
      if (barrier_[i].initializer == thread) barrier_[i].shown = true;
    }
  }
  // Noted as a read: it races with the initialization unless a barrier stands between.
  INTERLACE_EMU_HIDDEN Barrier& find(uint32_t address, const char* what) {
    for (uint32_t i = 0; i < count_; ++i) {
      if (barrier_[i].address == address) {
        note_read(shared_.at(address, 8, 8, what), 8);
        return barrier_[i];
      }
    }
    misuse("%s: no mbarrier was initialized at shared address %u", what, address);
  }
  // One thread arrives and expects `bytes` more in this phase. True when that completes the phase.
  INTERLACE_EMU_HIDDEN bool arrive(Barrier& barrier, uint32_t bytes) {
    if (barrier.pending == 0) {
      misuse("mbarrier_arrive: at %u all %u threads have arrived and %lld bytes are still to come",
             barrier.address, barrier.threads, static_cast<long long>(barrier.bytes));
    }
    release_tag(&barrier.tag[barrier.phase & 1]);
    barrier.bytes += bytes;
    if (barrier.bytes > kMaxPendingBytes) misuse("mbarrier at %u: more than 2^20-1 bytes", barrier.address);
    --barrier.pending;
    return complete_if_due(barrier);
  }
  // A copy has come, by the identity of the copy engine.
  INTERLACE_EMU_HIDDEN bool receive(Barrier& barrier, uint32_t bytes) {
    release_tag(&barrier.tag[barrier.phase & 1]);
    barrier.bytes -= bytes;
    return complete_if_due(barrier);
  }
  INTERLACE_EMU_HIDDEN void acquire(Barrier& barrier, uint32_t parity) {
    acquire_tag(&barrier.tag[parity & 1]);
  }

  // Every barrier must have got all the bytes it expects, or the next user of this memory would be written to.
  INTERLACE_EMU_HIDDEN void end() const {
    for (uint32_t i = 0; i < count_; ++i) {
      if (barrier_[i].bytes != 0) {
        misuse("end of the kernel: the mbarrier at %u expects %lld bytes more", barrier_[i].address,
               static_cast<long long>(barrier_[i].bytes));
      }
    }
  }

 private:
  INTERLACE_EMU_HIDDEN bool complete_if_due(Barrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return false;
    ++barrier.phase;
    barrier.pending = barrier.threads;
    return true;
  }

  const SharedMemory& shared_;
  std::unique_ptr<Barrier[], Free> barriers_;
  Barrier* const barrier_;
  uint32_t count_ = 0;
};

inline std::string describe(const Barrier& barrier, uint32_t parity) {
  return "waits for parity " + std::to_string(parity & 1) + " of the mbarrier at " +
         std::to_string(barrier.address) + ": " + std::to_string(barrier.phase) + " phases complete, " +
         std::to_string(barrier.pending) + " of " + std::to_string(barrier.threads) + " threads and " +
         std::to_string(barrier.bytes) + " bytes still to come";
}

}  // namespace interlace::emu
