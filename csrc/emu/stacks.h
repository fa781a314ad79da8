// Stacks of emulated threads, used again by later blocks: fresh memory is dear under ThreadSanitizer.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "emu/zeroed.h"

namespace interlace::emu {

class Stacks {
 public:
  using Memory = std::unique_ptr<char[], Free>;

  static Memory take(size_t bytes) {
    const std::lock_guard lock(mutex());
    for (Entry& entry : free()) {
      if (entry.bytes != bytes) continue;
      Memory memory = std::move(entry.memory);
      std::swap(entry, free().back());
      free().pop_back();
      return memory;
    }
    return zeroed<char>(bytes);
  }
  static void give_back(Memory memory, size_t bytes) {
    const std::lock_guard lock(mutex());
    free().push_back({bytes, std::move(memory)});
  }

 private:
  struct Entry {
    size_t bytes;
    Memory memory;
  };
  static std::mutex& mutex() {
    static std::mutex the_mutex;
    return the_mutex;
  }
  static std::vector<Entry>& free() {
    static std::vector<Entry> entries;
    return entries;
  }
};

}  // namespace interlace::emu
