// Devices and streams: who runs what, on how many OS threads.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "emu/block.h"

namespace interlace::emu {

// The device of one rank, with one stream: launches run one after the other, all blocks of a launch at once. Blocks
// and their threads are made once, because ThreadSanitizer's fibers are dear.
class Device {
 public:
  Device(World& world, int rank, Shape shape) : world_(world), rank_(rank), shape_(shape) {
    for (uint32_t index = 0; index < shape.blocks; ++index) {
      blocks_.emplace_back([this, index] { play(index); });
    }
  }
  ~Device() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& block : blocks_) block.join();
  }
  Device(const Device&) = delete;

  // Returns when the kernel has ended on all blocks, or false when the world is stuck.
  bool launch(const std::function<void()>& kernel) { return launch(shape_, kernel); }
  // A smaller launch than the device was made for.
  bool launch(Shape shape, const std::function<void()>& kernel) {
    if (world_.stuck()) return false;
    if (shape.blocks > shape_.blocks) {
      misuse("launch of %u blocks; the device was made for %u", shape.blocks, shape_.blocks);
    }
    std::unique_lock lock(mutex_);
    kernel_ = &kernel;
    launched_ = shape;
    unfinished_ = shape_.blocks;
    ++launches_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return unfinished_ == 0; });
    return !world_.stuck();
  }

 private:
  // The OS thread of one block.
  void play(uint32_t index) {
    Block block(world_, shape_, rank_, index,
                world_.seed() * 1000003 + static_cast<uint64_t>(rank_) * 131 + index);
    for (uint64_t played = 0;; ++played) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || launches_ > played; });
      if (closing_) return;
      lock.unlock();
      if (index < launched_.blocks) block.run(*kernel_, launched_);
      lock.lock();
      --unfinished_;
      changed_.notify_all();
    }
  }

  World& world_;
  const int rank_;
  const Shape shape_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* kernel_ = nullptr;
  Shape launched_;
  uint64_t launches_ = 0;
  uint32_t unfinished_ = 0;
  bool closing_ = false;
  std::vector<std::thread> blocks_;
};

// One device per rank, side by side: `stream(device, rank)` makes that rank's launches one after the other.
inline void run_ranks(World& world, int ranks, Shape shape, const std::function<void(Device&, int)>& stream) {
  std::vector<std::thread> streams;
  for (int rank = 0; rank < ranks; ++rank) {
    streams.emplace_back([&world, &stream, shape, rank] {
      Device device(world, rank, shape);
      stream(device, rank);
    });
  }
  for (std::thread& thread : streams) thread.join();
}

}  // namespace interlace::emu
