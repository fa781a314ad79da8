// How a rank waits: spin, yield, sleep on a futex; and how it learns that waiting is pointless.
#pragma once

#include <atomic>
#include <cstdint>

namespace interlace {

int open_pidfd(int pid);            // -1 when the kernel has none (Linux < 5.3)
bool process_ended(int pidfd);      // seen at once, even while the dead process is a zombie
void wake_all(std::atomic<uint32_t>& word);

// Store with release order, then wake peers that sleep on the word.
void store_and_wake(std::atomic<uint32_t>& word, std::atomic<uint32_t>& waiters, uint32_t value);

}  // namespace interlace
