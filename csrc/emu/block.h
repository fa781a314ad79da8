// One thread block, played by one OS thread: its fibers take turns in an order drawn from a seed.
//
// Fibers give up their turn only inside primitives (barriers, polls), so a race between two of them is found by
// ThreadSanitizer's happens-before, not by luck. Asynchronous engines (bulk copies, tensor cores) belong in
// Block::run, stepped between turns like one more fiber.
#pragma once

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "emu/fiber.h"
#include "emu/rendezvous.h"
#include "emu/world.h"

namespace interlace::emu {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kNamedBarriers = 16;

struct Shape {
  uint32_t blocks = 1;  // per rank
  uint32_t threads = 32;
};

// Values that the lanes of one warp show each other.
struct Warp {
  Rendezvous rendezvous;
  uint32_t lanes[2][kWarpThreads] = {};  // by parity of the meeting
};

class Block {
 public:
  Block(World& world, Shape shape, int rank, uint32_t index, uint64_t seed)
      : world_(world),
        shape_(shape),
        rank_(rank),
        index_(index),
        random_(seed),
        fibers_(shape.threads),
        warps_((shape.threads + kWarpThreads - 1) / kWarpThreads),
        fiber_(fibers_.data()),
        warp_(warps_.data()) {
    create_fibers();
  }
  ~Block() { destroy_fibers(); }
  Block(const Block&) = delete;

  // Run one kernel to its end, or until the world is stuck. On the OS thread that made the block.
  void run(const std::function<void()>& kernel);

  INTERLACE_EMU_HIDDEN uint32_t thread() const { return static_cast<uint32_t>(current_); }
  INTERLACE_EMU_HIDDEN uint32_t index() const { return index_; }
  INTERLACE_EMU_HIDDEN int rank() const { return rank_; }
  INTERLACE_EMU_HIDDEN Shape shape() const { return shape_; }
  World& world() { return world_; }

  INTERLACE_EMU_HIDDEN bool sync(bool value) {
    return meet(block_rendezvous_, shape_.threads, value, Waiting::kBlock, 0);
  }
  INTERLACE_EMU_HIDDEN void sync_named(uint32_t number, uint32_t threads) {
    meet(named_[number], threads, true, Waiting::kNamedBarrier, number);
  }
  INTERLACE_EMU_HIDDEN void arrive_named(uint32_t number, uint32_t threads) {
    bool completed = false;
    named_[number].arrive(threads, true, &completed);
    world_.note_progress();
  }
  INTERLACE_EMU_HIDDEN void sync_warp() {
    meet(warp_[thread() / kWarpThreads].rendezvous, lanes_of_warp(), true, Waiting::kWarp, 0);
  }
  // Every lane shows `value` and gets what lane ^ mask showed.
  INTERLACE_EMU_HIDDEN uint32_t shuffle_xor(uint32_t value, uint32_t mask) {
    Warp& warp = warp_[thread() / kWarpThreads];
    uint32_t (&shown)[kWarpThreads] = warp.lanes[warp.rendezvous.generation & 1];
    const uint32_t lane = thread() % kWarpThreads;
    shown[lane] = value;
    meet(warp.rendezvous, lanes_of_warp(), true, Waiting::kWarp, 0);
    return shown[lane ^ mask];
  }

  INTERLACE_EMU_HIDDEN void note_poll(const uint32_t* word, uint32_t seen) {
    fiber_[current_].polled = word;
    fiber_[current_].seen = seen;
  }
  // Give up the turn; the scheduler comes back in some later round.
  INTERLACE_EMU_HIDDEN void pause(Waiting waiting) {
    fiber_[current_].waiting = waiting;
    switch_to(kScheduler);
    fiber_[current_].waiting = Waiting::kNothing;
  }

 private:
  static constexpr int kScheduler = -1;

  INTERLACE_EMU_HIDDEN bool meet(Rendezvous& rendezvous, uint32_t expected, bool value, Waiting waiting,
                                 uint64_t detail) {
    bool completed = false;
    const uint64_t meeting = rendezvous.arrive(expected, value, &completed);
    if (completed) world_.note_progress();
    fiber_[current_].detail = detail;
    while (!rendezvous.over(meeting)) pause(waiting);
    return rendezvous.leave(meeting);
  }
  INTERLACE_EMU_HIDDEN uint32_t lanes_of_warp() const {
    const uint32_t first = thread() / kWarpThreads * kWarpThreads;
    return shape_.threads - first < kWarpThreads ? shape_.threads - first : kWarpThreads;
  }
  INTERLACE_EMU_HIDDEN void switch_to(int target) {
    const int previous = current_;
    current_ = target;
    announce_switch(target == kScheduler ? scheduler_id_ : fiber_[target].id);
    swapcontext(previous == kScheduler ? &scheduler_ : &fiber_[previous].context,
                target == kScheduler ? &scheduler_ : &fiber_[target].context);
  }
  INTERLACE_EMU_HIDDEN void finish_fiber() {
    fiber_[current_].done = true;
    --running_;
    world_.note_progress();
    release_tag(&end_tag_);
    switch_to(kScheduler);
  }
  INTERLACE_EMU_HIDDEN void start_fibers() {
    release_tag(&launch_tag_);
    running_ = shape_.threads;
    for (uint32_t thread = 0; thread < shape_.threads; ++thread) fiber_[thread].done = false;
  }
  INTERLACE_EMU_HIDDEN bool turn(uint32_t thread) {
    if (fiber_[thread].done) return false;
    switch_to(static_cast<int>(thread));
    return true;
  }
  INTERLACE_EMU_HIDDEN uint32_t running() const { return running_; }
  std::string dump() const;

  void create_fibers();
  void destroy_fibers();
  void straggle_if_due();
  static void enter_fiber();

  World& world_;
  const Shape shape_;
  const int rank_;
  const uint32_t index_;
  std::minstd_rand random_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  Fiber* const fiber_;  // the same as plain arrays, see INTERLACE_EMU_HIDDEN
  Warp* const warp_;
  Rendezvous block_rendezvous_;
  Rendezvous named_[kNamedBarriers];
  ucontext_t scheduler_{};
  void* scheduler_id_ = nullptr;
  int current_ = kScheduler;
  uint32_t running_ = 0;
  uint64_t steps_ = 0;  // over all launches
  const std::function<void()>* kernel_ = nullptr;
  char launch_tag_ = 0;  // the launch is ordered before every thread's first step, as by the stream
  char end_tag_ = 0;  // every thread's last step is ordered before the end of the launch
};

inline thread_local Block* current_block = nullptr;

inline void Block::enter_fiber() {
  Block& block = *current_block;
  for (;;) {
    acquire_tag(&block.launch_tag_);
    (*block.kernel_)();
    block.finish_fiber();
  }
}

inline void Block::create_fibers() {
  current_block = this;
  scheduler_id_ = current_fiber_id();
  for (Fiber& fiber : fibers_) {
    fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &Block::enter_fiber, 0);
    fiber.id = create_fiber_id();
  }
}

inline void Block::destroy_fibers() {
  for (Fiber& fiber : fibers_) join_fiber(fiber.id, scheduler_id_);
  current_block = nullptr;
}

inline void Block::straggle_if_due() {
  if (rank_ == world_.delay().rank && steps_ == world_.delay().after_steps) world_.wait_until_nobody_moves();
}

inline void Block::run(const std::function<void()>& kernel) {
  kernel_ = &kernel;
  start_fibers();
  std::vector<uint32_t> order(shape_.threads);
  for (uint32_t thread = 0; thread < shape_.threads; ++thread) order[thread] = thread;

  uint64_t idle = 0, progress = world_.progress();
  while (running() > 0 && !world_.stuck()) {
    std::shuffle(order.begin(), order.end(), random_);
    for (uint32_t thread : order) {
      straggle_if_due();
      if (turn(thread)) ++steps_;
    }
    sched_yield();
    idle = world_.progress() == progress ? idle + 1 : 0;
    progress = world_.progress();
    if (idle > world_.idle_rounds()) break;
  }
  if (running() > 0) world_.report_stuck(dump());
  acquire_tag(&end_tag_);
}

inline std::string Block::dump() const {
  std::string text;
  for (uint32_t thread = 0; thread < shape_.threads; ++thread) {
    const Fiber& fiber = fiber_[thread];
    char line[160];
    const char* where = "runs";
    switch (fiber.waiting) {
      case Waiting::kBlock: where = "waits for its block"; break;
      case Waiting::kWarp: where = "waits for its warp"; break;
      case Waiting::kNamedBarrier: where = "waits at named barrier"; break;
      case Waiting::kSignal: where = "polls a signal"; break;
      case Waiting::kNothing: break;
    }
    if (fiber.done) continue;
    std::snprintf(line, sizeof(line), "rank %d block %u thread %u %s", rank_, index_, thread, where);
    text += line;
    if (fiber.waiting == Waiting::kNamedBarrier) text += " " + std::to_string(fiber.detail);
    if (fiber.waiting == Waiting::kSignal) {
      std::snprintf(line, sizeof(line), " at %p, last saw %u", static_cast<const void*>(fiber.polled),
                    fiber.seen);
      text += line;
    }
    text += "\n";
  }
  return text;
}

}  // namespace interlace::emu
