// What the emulator's test programs share: a group of emulated ranks, checks that say what they saw, options.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kernels/segment.h"
#include "emu/launch.h"

namespace interlace::emu {

// A failed check ends the program at once: the emulated threads of other ranks may be in any state.
inline void require(bool condition, const std::string& text) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", text.c_str());
  std::_Exit(1);
}

inline void require_finished(World& world) {
  if (world.stuck()) require(false, "nobody moves any more:\n" + world.dump());
}

struct Unmap {
  size_t bytes;
  void operator()(char* memory) const { munmap(memory, bytes); }
};

// Segments and host pages of a whole group, as a provider would set them up. `first_epoch` is the epoch before the
// first launch: near 2^32 it makes the counters wrap.
class EmulatedGroup {
 public:
  EmulatedGroup(int world_size, int64_t half_bytes, uint32_t first_epoch = 0, double timeout_seconds = 600)
      : pages_(world_size) {
    group_.world_size = world_size;
    group_.half_bytes = (half_bytes + 15) / 16 * 16;
    group_.timeout_nanoseconds = static_cast<uint64_t>(timeout_seconds * 1e9);
    const size_t bytes = (segment_bytes(group_.half_bytes) + 127) / 128 * 128;
    for (int rank = 0; rank < world_size; ++rank) {
      segments_.emplace_back(static_cast<char*>(std::aligned_alloc(128, bytes)));
      std::memset(segments_[rank].get(), 0xff, bytes);  // NaN in every format
      group_.segments[rank] = segments_[rank].get();
      group_.pages[rank] = &pages_[rank];
      SegmentControl& control = *new (segments_[rank].get()) SegmentControl();
      control.epoch = first_epoch;
      for (auto& block : control.arrivals) {
        for (uint32_t& word : block) word = first_epoch;
      }
      for (auto& tile : control.tile_arrivals) {
        for (uint32_t& word : tile) word = first_epoch;
      }
    }
  }

  // Give the group a multicast address, before its ranks start. Nothing lies there: only multimem instructions may use it.
  void bind_multicast(World& world) {
    const size_t bytes = segment_bytes(group_.half_bytes);
    void* const address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    require(address != MAP_FAILED, "no address space for multicast");
    multicast_ = {static_cast<char*>(address), Unmap{bytes}};
    group_.multicast = multicast_.get();
    world.bind_multicast(group_.multicast, bytes, {group_.segments, group_.segments + group_.world_size});
  }

  SymmetricGroup as_seen_by(int rank) const {
    SymmetricGroup group = group_;
    group.first_rank = rank;
    return group;
  }
  SegmentControl& control(int rank) { return *reinterpret_cast<SegmentControl*>(segments_[rank].get()); }
  HostPage& page(int rank) { return pages_[rank]; }
  int world_size() const { return group_.world_size; }

 private:
  SymmetricGroup group_{};
  std::vector<HostPage> pages_;
  std::vector<std::unique_ptr<char, Free>> segments_;
  std::unique_ptr<char, Unmap> multicast_{nullptr, Unmap{0}};
};

// `program [seeds]`: how many seeds each case runs with.
inline int seeds_from(int argc, char** argv, int otherwise) {
  if (argc < 2) return otherwise;
  return std::atoi(argv[1]);
}

}  // namespace interlace::emu
