// How a block runs: turns, rounds, launches. Included by block.h.
#pragma once

#include <sched.h>
#include <time.h>

#include "emu/block.h"

namespace interlace::emu {

inline Block::Block(World& world, Shape capacity, int rank, uint32_t index, uint64_t seed)
    : world_(world),
      capacity_(capacity),
      rank_(rank),
      index_(index),
      random_(seed),
      shape_(capacity),
      stacks_(Stacks::take(capacity.threads * kStackBytes)),
      fibers_(zeroed<Fiber>(capacity.threads)),
      fiber_(fibers_.get()),
      warps_(zeroed<Warp>((capacity.threads + kWarpThreads - 1) / kWarpThreads)),
      warp_(warps_.get()),
      order_(zeroed<uint32_t>(capacity.threads)),
      shared_(capacity.shared_bytes),
      barriers_(shared_),
      copies_(shared_, barriers_),
      tensor_cores_(shared_, capacity.threads),
      async_copies_(shared_, capacity.threads) {
  current_block = this;
  current_place = {rank, index, kScheduler};
  scheduler_identity_ = identity_ = current_identity();
  const uint32_t lanes = capacity.threads <= kThreadsApart ? 1 : kWarpThreads;
  for (uint32_t thread = 0; thread < capacity.threads; ++thread) {
    Fiber& fiber = fiber_[thread];
    fiber.stack = stacks_.get() + thread * kStackBytes;
    fiber.stack_mark() = kStackMark;
    fiber.context.prepare(fiber.stack, kStackBytes, &Block::enter_fiber);
    fiber.identity = thread % lanes == 0 ? Identities::take() : fiber_[thread - 1].identity;
    order_[thread] = thread;
  }
}

// The identities go back with everything they did known to this OS thread.
inline Block::~Block() {
  void* previous = nullptr;
  for (uint32_t thread = 0; thread < capacity_.threads; ++thread) {
    if (fiber_[thread].identity == previous) continue;
    previous = fiber_[thread].identity;
    become(previous);
    release_tag(&end_tag_);
    become(scheduler_identity_);
    acquire_tag(&end_tag_);
    Identities::give_back(previous);
  }
  copies_.give_back_identities(scheduler_identity_);
  Stacks::give_back(std::move(stacks_), capacity_.threads * kStackBytes);
  current_block = nullptr;
}

// The launch is ordered before everything that the thread does.
INTERLACE_EMU_HIDDEN inline Block& Block::start_fiber() {
  acquire_tag(&current_block->launch_tag_);
  return *current_block;
}

inline void Block::enter_fiber() {
  for (;;) {
    Block& block = start_fiber();
    (*block.kernel_)();
    block.finish_fiber();
  }
}

inline void Block::begin(const std::function<void()>& kernel, Shape shape) {
  if (shape.threads > capacity_.threads || shape.shared_bytes > capacity_.shared_bytes) {
    misuse("launch of %u threads with %u bytes of shared memory; the device was made for %u and %u",
           shape.threads, shape.shared_bytes, capacity_.threads, capacity_.shared_bytes);
  }
  kernel_ = &kernel;
  shape_ = shape;
  running_ = shape.threads;
  shared_.begin(shape.shared_bytes);
  barriers_.begin();
  registers_.begin();
  if (shape.shared_bytes > 0) copies_.take_identities();
  release_tag(&launch_tag_);
  copies_.begin(&launch_tag_, scheduler_identity_);
  for (uint32_t thread = 0; thread < capacity_.threads; ++thread) {
    fiber_[thread].done = thread >= shape.threads;
    fiber_[thread].registers = {launch_registers(shape.threads), false};
  }
}

inline void Block::run(const std::function<void()>& kernel, Shape shape) {
  begin(kernel, shape);
  play();
  if (running_ > 0) world_.report_stuck(dump());
  acquire_tag(&end_tag_);
}

INTERLACE_EMU_HIDDEN inline uint64_t nanoseconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

INTERLACE_EMU_HIDDEN inline void Block::play() {
  uint64_t idle_rounds = 0, quiet_since = 0, progress = world_.progress();
  while (running_ > 0 && !world_.stuck()) {
    idle_ = !play_round();
    if (idle_) sched_yield();
    idle_rounds = world_.progress() == progress ? idle_rounds + 1 : 0;
    progress = world_.progress();
    if (idle_rounds <= world_.idle_rounds()) {
      quiet_since = 0;
      continue;
    }
    assume(scheduler_identity_);  // ThreadSanitizer sees the clock write to this stack
    const uint64_t now = nanoseconds_now();
    if (quiet_since == 0) quiet_since = now;
    if (now - quiet_since >= world_.patience_nanoseconds()) break;
  }
  if (running_ == 0) {
    if (copies_.pending() > 0) misuse("end of the kernel: %u copies are still on the way", copies_.pending());
    barriers_.end();
  }
  assume(scheduler_identity_);
}

// Every thread that can go on has one turn. True when one of them did more than poll, or a copy came.
INTERLACE_EMU_HIDDEN inline bool Block::play_round() {
  constexpr uint32_t kTurnsPerCopy = 16;
  bool moved = false;
  shuffle_order();
  for (uint32_t i = 0; i < shape_.threads; ++i) {
    Fiber& fiber = fiber_[order_[i]];
    if (!ready(fiber)) continue;
    straggle_if_due();
    moved = moved || fiber.waiting != Waiting::kSignal;
    switch_to(static_cast<int>(order_[i]));
    ++steps_;
    if (copies_.pending() > 0 && random_.below(kTurnsPerCopy) == 0) moved = bring_a_copy() || moved;
  }
  if (copies_.pending() > 0 && (!moved || random_.below(2) == 0)) moved = bring_a_copy() || moved;
  return moved;
}

INTERLACE_EMU_HIDDEN inline bool Block::bring_a_copy() {
  copies_.step(identity_, random_);
  world_.note_progress();
  return true;
}

INTERLACE_EMU_HIDDEN inline void Block::shuffle_order() {
  if (capacity_.threads != shape_.threads) {
    for (uint32_t i = 0; i < shape_.threads; ++i) order_[i] = i;
  }
  for (uint32_t i = shape_.threads; i > 1; --i) {
    const uint32_t other = random_.below(i);
    const uint32_t last = order_[i - 1];
    order_[i - 1] = order_[other];
    order_[other] = last;
  }
}

INTERLACE_EMU_HIDDEN inline void Block::straggle_if_due() {
  if (rank_ == world_.delay().rank && steps_ == world_.delay().after_steps) world_.wait_until_nobody_moves();
}

// Who waits for what; neighbours that wait for the same share a line.
inline std::string Block::dump() const {
  std::string text;
  uint32_t first = 0;
  for (uint32_t thread = 0; thread < shape_.threads; ++thread) {
    const Fiber& fiber = fiber_[thread];
    const bool last = thread + 1 == shape_.threads || fiber_[thread + 1].done != fiber.done ||
                      describe(fiber_[thread + 1]) != describe(fiber);
    if (!last) continue;
    if (!fiber.done) {
      text += "rank " + std::to_string(rank_) + " block " + std::to_string(index_) + " thread" +
              (first == thread ? " " + std::to_string(thread)
                               : "s " + std::to_string(first) + ".." + std::to_string(thread)) +
              ": " + describe(fiber) + "\n";
    }
    first = thread + 1;
  }
  if (copies_.pending() > 0) text += "  copies on the way: " + std::to_string(copies_.pending()) + "\n";
  return text;
}

}  // namespace interlace::emu
