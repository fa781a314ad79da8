// The emulator itself: primitives do what the device does, and a hang ends with a dump of who waits for what.
#include <cmath>

#include "cuda/kernels/device.cuh"
#include "emu/testing.h"

namespace interlace::emu {
namespace {

// Sum of one value per thread: shuffles inside the warps, shared memory between them.
INTERLACE_DEVICE float block_sum(float value) {
  INTERLACE_SHARED float partial[8];
  for (uint32_t mask = 16; mask > 0; mask /= 2) value += ptx::shfl_bfly_f32(value, mask);
  if (ptx::tid_x() % 32 == 0) partial[ptx::tid_x() / 32] = value;
  ptx::barrier_sync();
  float total = 0;
  for (uint32_t warp = 0; warp < ptx::ntid_x() / 32; ++warp) total += partial[warp];
  ptx::barrier_sync();  // the next call overwrites `partial`
  return total;
}

void test_shuffles_and_shared_memory(uint64_t seed) {
  World world(seed);
  constexpr uint32_t kThreads = 96;
  std::vector<float> sums(kThreads);
  Device(world, 0, {1, kThreads}).launch([&sums] {
    for (int round = 1; round <= 3; ++round) {
      const float sum = block_sum(static_cast<float>(ptx::tid_x() * round));
      if (round == 3) sums[ptx::tid_x()] = sum;
    }
  });
  require_finished(world);
  for (float sum : sums) require(sum == 3 * 96 * 95 / 2, "block_sum gave " + std::to_string(sum));
}

// One producer warp fills a slot, one consumer warp empties it; two named barriers say "full" and "empty".
void test_named_barriers_pass_a_slot(uint64_t seed) {
  World world(seed);
  constexpr int kItems = 5;
  std::vector<int> slot(32), taken;
  Device(world, 0, {1, 64}).launch([&] {
    const uint32_t lane = ptx::tid_x() % 32;
    const bool producer = ptx::tid_x() < 32;
    for (int item = 0; item < kItems; ++item) {
      if (producer) {
        if (item > 0) ptx::bar_sync(2, 64);  // the slot is empty
        slot[lane] = item * 32 + static_cast<int>(lane);
        ptx::bar_arrive(1, 64);
      } else {
        ptx::bar_sync(1, 64);  // the slot is full
        if (lane == 0) taken.insert(taken.end(), slot.begin(), slot.end());
        ptx::warp_sync();
        if (item + 1 < kItems) ptx::bar_arrive(2, 64);
      }
    }
  });
  require_finished(world);
  require(taken.size() == 32 * kItems, "items taken: " + std::to_string(taken.size()));
  for (size_t i = 0; i < taken.size(); ++i) require(taken[i] == static_cast<int>(i), "item out of order");
}

void test_barrier_conjunction(uint64_t seed) {
  World world(seed);
  std::vector<int> results(64 * 4);
  Device(world, 0, {1, 64}).launch([&results] {
    for (uint32_t round = 0; round < 4; ++round) {
      const bool mine = round % 2 == 0 || ptx::tid_x() != 13 * round;
      results[ptx::tid_x() * 4 + round] = ptx::barrier_red_and(mine);
    }
  });
  require_finished(world);
  for (size_t i = 0; i < results.size(); ++i) {
    require(results[i] == (i % 2 == 0), "conjunction " + std::to_string(i) + " is wrong");
  }
}

void test_a_hang_is_dumped(uint64_t seed) {
  World world(seed, {}, /*idle_rounds=*/200);
  uint32_t never = 7;
  Device(world, 3, {1, 32}).launch([&never] {
    if (ptx::tid_x() == 5) {
      while (ptx::ld_acquire_sys_u32(&never) != 8) ptx::nanosleep_u32(20);
    }
    ptx::barrier_sync();
  });
  require(world.stuck(), "a block that waits for ever was not noticed");
  const std::string dump = world.dump();
  require(dump.find("rank 3 block 0 thread 5: polls a signal") != std::string::npos,
          "dump lacks the poller:\n" + dump);
  require(dump.find("last saw 7") != std::string::npos, "dump lacks the value:\n" + dump);
  require(dump.find("threads 6..31: waits for its block") != std::string::npos,
          "dump lacks the others:\n" + dump);
}

void test_float16_conversions() {
  require(float16_from_float(1.0f) == 0x3c00 && float16_from_float(-2.0f) == 0xc000, "exact values");
  require(float16_from_float(65519.0f) == 0x7bff && float16_from_float(65520.0f) == 0x7c00,
          "overflow to infinity");
  require(float16_from_float(std::ldexp(1.0f, -25)) == 0 && float16_from_float(std::ldexp(1.5f, -25)) == 1,
          "subnormals round to nearest even");
  require(bfloat16_from_float(1.00390625f) == 0x3f80 && bfloat16_from_float(1.01171875f) == 0x3f82,
          "bfloat16 ties go to even");
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    require(float16_from_float(float_from_float16(half)) == half, "round trip of " + std::to_string(bits));
  }
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  test_float16_conversions();
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_shuffles_and_shared_memory(seed);
    test_named_barriers_pass_a_slot(seed);
    test_barrier_conjunction(seed);
    test_a_hang_is_dumped(seed);
  }
  std::printf("primitives: %d seeds ok\n", seeds);
}
