// barrier: orders what the ranks' streams do before and after it, through the wrap of the epochs, and never hangs.
#include "cuda/kernels/barrier.cuh"
#include "emu/testing.h"

namespace interlace::emu {
namespace {

constexpr Shape kShape{1, kBarrierThreads};
constexpr uint64_t kPatientRounds =
    300'000;  // longer than the deadlines below, whatever else the machine does

// Each rank writes a number before the barrier and reads all numbers after it. Two sets of numbers by parity: a rank
// may already write for the next round while a slow one still reads.
void test_barrier_orders_memory(int world_size, uint64_t seed, uint32_t first_epoch, Delay delay) {
  constexpr int kRounds = 5;
  World world(seed, delay);
  EmulatedGroup group(world_size, 0, first_epoch);
  std::vector<int> numbers[2] = {std::vector<int>(world_size), std::vector<int>(world_size)};
  run_ranks(world, world_size, kShape, [&](Device& device, int rank) {
    for (int round = 0; round < kRounds; ++round) {
      numbers[round & 1][rank] = 100 * round + rank;
      if (!device.launch([&] { barrier_kernel(group.as_seen_by(rank)); })) return;
      for (int peer = 0; peer < world_size; ++peer) {
        const int seen = numbers[round & 1][peer];
        require(seen == 100 * round + peer, "rank " + std::to_string(rank) + " reads " +
                                                std::to_string(seen) + " of rank " + std::to_string(peer) +
                                                " in round " + std::to_string(round));
      }
    }
  });
  require_finished(world);
  for (int rank = 0; rank < world_size; ++rank) {
    require(group.control(rank).epoch == first_epoch + kRounds, "epoch of rank " + std::to_string(rank));
    require(group.page(rank).failure.state == 0, "failure recorded without a failure");
  }
}

// Barriers of both kinds in turn: the epoch after one before a push has parity 0, wherever counting began.
void test_push_barrier_takes_an_odd_epoch(int world_size, uint64_t seed, uint32_t first_epoch) {
  World world(seed);
  EmulatedGroup group(world_size, 0, first_epoch);
  run_ranks(world, world_size, kShape, [&](Device& device, int rank) {
    uint32_t epoch = first_epoch;
    for (int round = 0; round < 4; ++round) {
      if (!device.launch([&] { push_barrier_kernel(group.as_seen_by(rank)); })) return;
      epoch += parity(epoch + 1) == 1 ? 1 : 2;
      require(group.control(rank).epoch == epoch && group.control(rank).push_epoch == epoch + 1 &&
                  parity(epoch + 1) == 0,
              "epoch " + std::to_string(group.control(rank).epoch) + " after a barrier before a push");
      for (int plain = 0; plain < 1 + round % 2; ++plain, ++epoch) {
        if (!device.launch([&] { barrier_kernel(group.as_seen_by(rank)); })) return;
      }
    }
  });
  require_finished(world);
}

// The last rank never comes. Everybody else leaves with a record; so does the last rank when it comes too late, and
// every later launch at once.
void test_deadline_frees_all_ranks(int world_size, uint64_t seed) {
  World world(seed, {}, kPatientRounds);
  EmulatedGroup group(world_size, 0, 0, /*timeout_seconds=*/0.02);
  const auto barrier = [&](Device& device, int rank) {
    device.launch([&] { barrier_kernel(group.as_seen_by(rank)); });
  };
  run_ranks(world, world_size - 1, kShape, barrier);
  const uint32_t absent = static_cast<uint32_t>(world_size - 1);
  int timed_out = 0;
  for (int rank = 0; rank < world_size - 1; ++rank) {
    const DeviceFailure& failure = group.page(rank).failure;
    require(failure.state != 0, "rank " + std::to_string(rank) + " left without a record");
    require(failure.op == static_cast<uint32_t>(Op::kBarrier) &&
                failure.rank == static_cast<uint32_t>(rank) && failure.want == 1,
            "record of rank " + std::to_string(rank) + " names the wrong wait");
    if (failure.state == static_cast<uint32_t>(FailureState::kTimedOut)) {
      ++timed_out;
      // with several ranks present, one of them may have been late too
      require(failure.seen == 0 && (world_size > 2 || failure.peer == absent),
              "rank " + std::to_string(rank) + " blames rank " + std::to_string(failure.peer));
    }
  }
  require(timed_out > 0, "nobody recorded the deadline");
  Device late(world, world_size - 1, kShape);
  barrier(late, world_size - 1);
  require(group.page(world_size - 1).failure.state == static_cast<uint32_t>(FailureState::kAborted),
          "the late rank was not told");
  run_ranks(world, world_size, kShape, barrier);
  require_finished(world);
}

// The host of rank 0 asks its waiting kernel to leave.
void test_host_can_stop_a_wait(uint64_t seed) {
  World world(seed, {}, kPatientRounds);
  EmulatedGroup group(2, 0);
  std::thread host([&] { __atomic_store_n(&group.page(0).abort_request, 1u, __ATOMIC_RELAXED); });
  Device(world, 0, kShape).launch([&] { barrier_kernel(group.as_seen_by(0)); });
  host.join();
  require_finished(world);
  require(group.page(0).failure.state == static_cast<uint32_t>(FailureState::kAborted),
          "no record of the stop");
  require(group.control(1).abort == 1, "the peer was not told");
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 4);
  for (int seed = 1; seed <= seeds; ++seed) {
    for (int world_size : {1, 2, 3, 4, 8}) {
      test_barrier_orders_memory(world_size, seed, 0, {});
      const Delay delay{seed % world_size, static_cast<uint64_t>(40 * seed)};
      test_barrier_orders_memory(world_size, seed, 0xfffffffdu, delay);
      test_push_barrier_takes_an_odd_epoch(world_size, seed, seed % 2 == 0 ? 0xfffffffbu : 0xfffffffau);
    }
    test_deadline_frees_all_ranks(2, seed);
    test_deadline_frees_all_ranks(4, seed);
    test_host_can_stop_a_wait(seed);
  }
  std::printf("barrier: %d seeds ok\n", seeds);
}
