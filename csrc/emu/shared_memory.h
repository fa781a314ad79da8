// The dynamic shared memory of a block, and its own 32-bit addresses.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "emu/misuse.h"
#include "emu/zeroed.h"

namespace interlace::emu {

constexpr uint32_t kSharedLimit = 227 * 1024;  // what sm_90 offers a block
constexpr uint32_t kSharedAlignment = 1024;  // of a 128-byte swizzled tile
constexpr uint32_t kFirstAddress = 1024;  // the device keeps the first KiB; zero is no valid address
constexpr uint32_t kSectorBytes =
    32;  // ThreadSanitizer is shown eight bytes of each sector of an engine's tile
constexpr unsigned char kPoison = 0xff;  // NaN in every format

class SharedMemory {
 public:
  explicit SharedMemory(uint32_t capacity)
      : capacity_((capacity + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment),
        memory_(static_cast<char*>(std::aligned_alloc(kSharedAlignment, capacity_ + kSharedAlignment))),
        start_(memory_.get()) {
    if (capacity > kSharedLimit) misuse("%u bytes of shared memory; a block has %u", capacity, kSharedLimit);
  }

  // A launch finds rubbish in it.
  void begin(uint32_t bytes) {
    bytes_ = bytes;
    std::memset(start_, kPoison, bytes);
  }

  INTERLACE_EMU_HIDDEN_INLINE char* start() const { return start_; }
  INTERLACE_EMU_HIDDEN uint32_t address_of(const void* pointer) const {
    const auto* byte = static_cast<const char*>(pointer);
    if (byte < start_ || byte >= start_ + bytes_) {
      misuse("%p has no shared address: it is not in INTERLACE_DYNAMIC_SHARED (%u bytes)", pointer, bytes_);
    }
    return kFirstAddress + static_cast<uint32_t>(byte - start_);
  }
  INTERLACE_EMU_HIDDEN_INLINE char* at(uint32_t address, uint32_t bytes, uint32_t alignment,
                                       const char* what) const {
    if (address < kFirstAddress || address - kFirstAddress > bytes_ ||
        bytes_ - (address - kFirstAddress) < bytes) {
      misuse("%s: %u bytes at shared address %u; the block has addresses %u..%u", what, bytes, address,
             kFirstAddress, kFirstAddress + bytes_);
    }
    if (address % alignment != 0)
      misuse("%s: shared address %u is not aligned to %u", what, address, alignment);
    return start_ + (address - kFirstAddress);
  }

 private:
  const uint32_t capacity_;
  std::unique_ptr<char, Free> memory_;
  char* const start_;
  uint32_t bytes_ = 0;  // of the running launch
};

}  // namespace interlace::emu
