// One rank's shared memory: an anonymous file that only its descriptor names. Nothing to collide with, nothing left
// behind after SIGKILL, no limit of /dev/shm.
#pragma once

#include <cstdint>

namespace interlace {

class Segment {
 public:
  // Own segment: reserves `reserve_bytes` of address space, backed by nothing but the control page.
  static Segment create(int64_t reserve_bytes);
  // A peer's segment, from the descriptor it sent. Does not keep the descriptor.
  static Segment attach(int descriptor);

  Segment() = default;
  Segment(Segment&& other) noexcept { *this = static_cast<Segment&&>(other); }
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  char* base() const { return base_; }
  int64_t reserved() const { return reserved_; }
  int descriptor() const { return descriptor_; }

  // Back bytes [0, bytes) with memory now, on this thread's NUMA node. An empty text on success, else the reason:
  // a page that cannot be had must be an error here and not SIGBUS in a kernel. `sharers` ranks ask at once.
  const char* back(int64_t bytes, int sharers);
  // Give back what lies beyond `bytes` (another rank could not follow a growth).
  void trim(int64_t bytes);
  int64_t backed() const { return backed_; }
  // Enter the pages [0, bytes) into this process's page table, so that kernels take no faults.
  void populate(int64_t bytes);

 private:
  Segment(char* base, int64_t reserved, int descriptor)
      : base_(base), reserved_(reserved), descriptor_(descriptor) {}
  void reset();

  char* base_ = nullptr;
  int64_t reserved_ = 0;
  int64_t backed_ = 0;
  int descriptor_ = -1;
};

// Bytes this process may still use: the least of free memory and what the control group (v1 or v2) has left.
int64_t available_memory();

}  // namespace interlace
