// One thread block, played by one OS thread: its fibers take turns in an order drawn from a seed, and between turns its
// copy engine brings a copy in.
//
// Fibers give up their turn only inside primitives (barriers, polls), so a race between two of them is found by
// ThreadSanitizer's happens-before, not by luck.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "emu/async_copies.h"
#include "emu/copy_engine.h"
#include "emu/fiber.h"
#include "emu/registers.h"
#include "emu/stacks.h"
#include "emu/tensor_core.h"
#include "emu/warp.h"
#include "emu/world.h"

namespace interlace::emu {

constexpr uint32_t kNamedBarriers = 16;
// Blocks up to this size show ThreadSanitizer every thread; larger ones every warp, whose lanes it takes for one.
constexpr uint32_t kThreadsApart = 64;

struct Shape {
  uint32_t blocks = 1;  // per rank
  uint32_t threads = 32;
  uint32_t shared_bytes = 0;  // dynamic shared memory
};

class Block {
 public:
  // Room for launches up to `capacity`.
  Block(World& world, Shape capacity, int rank, uint32_t index, uint64_t seed);
  ~Block();
  Block(const Block&) = delete;

  // Run one kernel to its end, or until the world is stuck. On the OS thread that made the block.
  void run(const std::function<void()>& kernel, Shape shape);

  INTERLACE_EMU_HIDDEN uint32_t thread() const { return static_cast<uint32_t>(current_); }
  INTERLACE_EMU_HIDDEN uint32_t index() const { return index_; }
  INTERLACE_EMU_HIDDEN uint32_t threads() const { return shape_.threads; }
  INTERLACE_EMU_HIDDEN uint32_t blocks() const { return shape_.blocks; }
  World& world() { return world_; }
  SharedMemory& shared() { return shared_; }

  INTERLACE_EMU_HIDDEN bool sync(bool value) {
    fiber_[current_].registers.moved = false;
    return meet(named_[0], shape_.threads, value, Ordering::kMemory, Waiting::kBlock, 0);
  }
  INTERLACE_EMU_HIDDEN void sync_named(uint32_t number, uint32_t threads) {
    check_named(number, threads);
    fiber_[current_].registers.moved = false;
    meet(named_[number], threads, true, Ordering::kMemory, Waiting::kNamedBarrier, number);
  }
  INTERLACE_EMU_HIDDEN void arrive_named(uint32_t number, uint32_t threads) {
    check_named(number, threads);
    if (named_[number].arrive(threads, true, Ordering::kMemory)) complete(named_[number]);
  }
  INTERLACE_EMU_HIDDEN void sync_warp(Ordering ordering) {
    meet(warp().rendezvous, lanes_of_warp(), true, ordering, Waiting::kWarp, 0);
  }
  // Every lane shows a value and gets what lane `from` showed.
  INTERLACE_EMU_HIDDEN uint32_t shuffle(uint32_t value, uint32_t from) {
    Warp& own = warp();
    uint32_t (&shown)[kWarpThreads] = own.shown();
    shown[lane()] = value;
    sync_warp(Ordering::kNone);
    return shown[from];
  }
  INTERLACE_EMU_HIDDEN uint32_t lane() const { return thread() % kWarpThreads; }

  INTERLACE_EMU_HIDDEN void load_matrix(uint32_t address, uint32_t* fragment, bool transposed) {
    Warp& own = warp();
    note_read(shared_.at(address, 16, 16, "ldmatrix_x4"), 16);
    uint32_t (&shown)[kWarpThreads] = own.shown();
    shown[lane()] = address;
    own.matrices[lane()] = fragment;
    if (!last_of_warp()) return;
    load_matrices(shared_, own, shown, transposed);
    complete(own.rendezvous);
  }
  INTERLACE_EMU_HIDDEN void multiply(float* d, const uint32_t* a, uint32_t b0, uint32_t b1, Element element) {
    Warp& own = warp();
    own.fragments[lane()] = {d, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    if (!last_of_warp()) return;
    multiply_fragments(own, element, float16_);
    complete(own.rendezvous);
  }
  INTERLACE_EMU_HIDDEN void finish_products(uint32_t keep) {
    if (!last_of_warp()) return;
    tensor_cores_.finish(thread(), keep);
    complete(warp().rendezvous);
  }
  INTERLACE_EMU_HIDDEN TensorCores& tensor_cores() { return tensor_cores_; }
  INTERLACE_EMU_HIDDEN AsyncCopies& async_copies() { return async_copies_; }

  INTERLACE_EMU_HIDDEN void init_barrier(uint32_t address, uint32_t threads) {
    barriers_.init(address, threads, current_);
  }
  INTERLACE_EMU_HIDDEN void show_barriers() { barriers_.show_to_engines(current_); }
  INTERLACE_EMU_HIDDEN void arrive_at_barrier(uint32_t address, uint32_t bytes) {
    if (barriers_.arrive(barriers_.find(address, "mbarrier_arrive"), bytes)) world_.note_progress();
  }
  // kMbarrier: until the phase is complete; kMbarrierTry: or until nobody in the block moves.
  INTERLACE_EMU_HIDDEN bool wait_for_barrier(uint32_t address, uint32_t parity, Waiting waiting) {
    Barrier& barrier = barriers_.find(address, "mbarrier_try_wait_parity");
    if (!barrier.passed(parity)) {
      fiber_[current_].barrier = &barrier;
      fiber_[current_].detail = parity;
      pause(waiting);
    }
    if (!barrier.passed(parity)) return false;
    barriers_.acquire(barrier, parity);
    return true;
  }
  INTERLACE_EMU_HIDDEN void fence_proxy() { release_tag(&fiber_[current_].fenced_tag); }
  INTERLACE_EMU_HIDDEN void copy_box(uint32_t address, const TensorMap& map, int32_t column, int32_t row,
                                     uint32_t barrier) {
    copies_.issue(address, map, column, row, barriers_.find(barrier, "cp_async_bulk_tensor_2d"),
                  &fiber_[current_].fenced_tag, identity_, random_);
  }
  INTERLACE_EMU_HIDDEN void give_registers(uint32_t registers) {
    registers_.give(fiber_[current_].registers, registers);
    world_.note_progress();
  }
  INTERLACE_EMU_HIDDEN void take_registers(uint32_t registers) {
    Fiber& fiber = fiber_[current_];
    fiber.detail = registers_.missing(fiber.registers, registers);
    if (!registers_.enough(fiber.detail)) pause(Waiting::kRegisters);
    registers_.take(fiber.registers, fiber.detail);
  }

  INTERLACE_EMU_HIDDEN void note_poll(const uint32_t* word, uint32_t seen) {
    fiber_[current_].polled = word;
    fiber_[current_].seen = seen;
  }
  // Give up the turn; the scheduler comes back in some later round.
  INTERLACE_EMU_HIDDEN void pause(Waiting waiting) {
    Fiber& fiber = fiber_[current_];
    check_stack(fiber);
    fiber.waiting = waiting;
    switch_to(kScheduler);
    fiber.waiting = Waiting::kNothing;
  }

 private:
  static constexpr int kScheduler = -1;

  INTERLACE_EMU_HIDDEN static void check_stack(const Fiber& fiber) {
    if (fiber.stack_mark() == kStackMark) return;
    misuse("stack overflow: a thread of the kernel needs more than %zu bytes", kStackBytes - kStackMarkPlace);
  }
  INTERLACE_EMU_HIDDEN Warp& warp() { return warp_[thread() / kWarpThreads]; }
  INTERLACE_EMU_HIDDEN uint32_t lanes_of_warp() const {
    const uint32_t first = thread() / kWarpThreads * kWarpThreads;
    return shape_.threads - first < kWarpThreads ? shape_.threads - first : kWarpThreads;
  }
  INTERLACE_EMU_HIDDEN void check_named(uint32_t number, uint32_t threads) const {
    if (number >= kNamedBarriers) misuse("bar: number %u; a block has %u", number, kNamedBarriers);
    if (threads % kWarpThreads != 0 || threads == 0 || threads > shape_.threads) {
      misuse("bar: %u threads; needs a multiple of 32, at most the block's %u", threads, shape_.threads);
    }
  }
  INTERLACE_EMU_HIDDEN void complete(Rendezvous& rendezvous) {
    rendezvous.complete();
    world_.note_progress();
  }
  INTERLACE_EMU_HIDDEN void wait_for(const Rendezvous& rendezvous, uint64_t meeting, Waiting waiting) {
    fiber_[current_].rendezvous = &rendezvous;
    fiber_[current_].meeting = meeting;
    pause(waiting);
  }
  INTERLACE_EMU_HIDDEN bool meet(Rendezvous& rendezvous, uint32_t threads, bool value, Ordering ordering,
                                 Waiting waiting, uint32_t detail) {
    const uint64_t meeting = rendezvous.generation;
    fiber_[current_].detail = detail;
    if (rendezvous.arrive(threads, value, ordering)) {
      complete(rendezvous);
    } else {
      wait_for(rendezvous, meeting, waiting);
    }
    return rendezvous.leave(meeting, ordering);
  }
  // Every lane of the warp comes here once. True for the last, which does the work for all and completes the meeting;
  // the others return when that is done.
  INTERLACE_EMU_HIDDEN bool last_of_warp() {
    Warp& own = warp();
    if (lanes_of_warp() != kWarpThreads) misuse("a warp of %u threads cannot multiply", lanes_of_warp());
    const uint64_t meeting = own.rendezvous.generation;
    if (own.rendezvous.arrive(kWarpThreads, true, Ordering::kNone)) return true;
    wait_for(own.rendezvous, meeting, Waiting::kWarp);
    return false;
  }
  // The scheduler keeps the identity of whoever ran last: it is all hidden.
  INTERLACE_EMU_HIDDEN void assume(void* identity) {
    if (identity == identity_) return;
    identity_ = identity;
    become(identity);
  }
  INTERLACE_EMU_HIDDEN void switch_to(int target) {
    const int previous = current_;
    current_ = target;
    current_place.thread = target;
    if (target != kScheduler) assume(fiber_[target].identity);
    Context& from = previous == kScheduler ? scheduler_ : fiber_[previous].context;
    from.switch_to(target == kScheduler ? scheduler_ : fiber_[target].context);
  }
  INTERLACE_EMU_HIDDEN_INLINE bool ready(const Fiber& fiber) const {
    switch (fiber.waiting) {
      case Waiting::kNothing:
      case Waiting::kSignal: return !fiber.done;
      case Waiting::kBlock:
      case Waiting::kWarp:
      case Waiting::kNamedBarrier: return fiber.rendezvous->over(fiber.meeting);
      case Waiting::kMbarrier: return fiber.barrier->passed(fiber.detail);
      case Waiting::kMbarrierTry: return idle_ || fiber.barrier->passed(fiber.detail);
      case Waiting::kRegisters: return registers_.enough(fiber.detail);
    }
    return true;
  }
  INTERLACE_EMU_HIDDEN void finish_fiber() {
    check_stack(fiber_[current_]);
    async_copies_.end(thread());
    tensor_cores_.end(thread());
    fiber_[current_].done = true;
    --running_;
    world_.note_progress();
    release_tag(&end_tag_);
    switch_to(kScheduler);
  }
  void begin(const std::function<void()>& kernel, Shape shape);
  void play();
  void shuffle_order();
  bool play_round();
  bool bring_a_copy();
  void straggle_if_due();
  std::string dump() const;
  static Block& start_fiber();
  static void enter_fiber();

  World& world_;
  const Shape capacity_;
  const int rank_;
  const uint32_t index_;
  Random random_;
  Shape shape_;  // of the running launch
  Stacks::Memory stacks_;
  std::unique_ptr<Fiber[], Free> fibers_;
  Fiber* const fiber_;  // the same as a plain array, see INTERLACE_EMU_HIDDEN
  std::unique_ptr<Warp[], Free> warps_;
  Warp* const warp_;
  std::unique_ptr<uint32_t[], Free> order_;
  Rendezvous named_[kNamedBarriers];  // number 0 is __syncthreads
  SharedMemory shared_;
  Barriers barriers_;
  CopyEngine copies_;
  TensorCores tensor_cores_;
  AsyncCopies async_copies_;
  RegisterPool registers_;
  const float* const float16_ = float16_table();
  Context scheduler_{};
  void* scheduler_identity_ = nullptr;
  void* identity_ = nullptr;  // what ThreadSanitizer takes the OS thread for
  int current_ = kScheduler;
  uint32_t running_ = 0;
  bool idle_ = false;  // nobody moved in the last round
  uint64_t steps_ = 0;  // over all launches
  const std::function<void()>* kernel_ = nullptr;
  char launch_tag_ = 0;  // the launch is ordered before every thread's first step, as by the stream
  char end_tag_ = 0;  // every thread's last step is ordered before the end of the launch
};

inline thread_local Block* current_block = nullptr;

}  // namespace interlace::emu

#include "emu/block_run.h"
