// one_shot_all_reduce: right for any size, alignment and world, launch after launch without a barrier, with a rank that
// lags, with counters that wrap; no race that ThreadSanitizer can see.
#include "cuda/kernels/launching.cuh"
#include "cuda/kernels/one_shot_all_reduce.cuh"
#include "emu/testing.h"

namespace interlace::emu {
namespace {

struct Case {
  int world_size = 2;
  Shape shape{2, 16};
  std::vector<int64_t> counts;  // one launch each
  bool in_place = false;
  bool shifted = false;  // rank r's arrays start r elements into an aligned block
  uint32_t first_epoch = 0;
  Delay delay = {};
};

// Small integers: sums are exact in every format. Different for every rank, launch and element.
float input_value(int rank, int launch_number, int64_t i) {
  return static_cast<float>((i * 7 + rank * 13 + launch_number * 5) % 17) - 8.0f;
}

template <typename T> struct Launch {
  std::vector<Pack<T>> input_storage, out_storage;
  T* input;
  T* out;

  Launch(const Case& test, int rank, int launch_number, int64_t count) {
    const int64_t shift = test.shifted ? rank : 0;
    const size_t packs = static_cast<size_t>((count + shift) / Pack<T>::kElements + 2);
    input_storage.resize(packs);
    out_storage.resize(packs);
    input = reinterpret_cast<T*>(input_storage.data()) + shift;
    out = test.in_place ? input : reinterpret_cast<T*>(out_storage.data()) + shift;
    for (int64_t i = 0; i < count; ++i) from_float(input_value(rank, launch_number, i), input[i]);
    from_float(-777.0f, out[count]);  // a guard: nothing is written behind the end
  }
};

struct OneShot {
  using Kernel = void (*)(SymmetricGroup, AllReduceArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = one_shot_all_reduce_kernel<T, kBound>;
};

template <typename T> void check(const Case& test, const Launch<T>& launched, int rank, int launch_number) {
  const int64_t count = test.counts[launch_number];
  for (int64_t i = 0; i < count; ++i) {
    float want = 0;
    for (int peer = 0; peer < test.world_size; ++peer) want += input_value(peer, launch_number, i);
    const float got = to_float(launched.out[i]);
    require(got == want, "rank " + std::to_string(rank) + " of " + std::to_string(test.world_size) +
                             ", launch " + std::to_string(launch_number) + ", element " + std::to_string(i) +
                             ": " + std::to_string(got) + " instead of " + std::to_string(want));
  }
  require(to_float(launched.out[count]) == to_float(Launch<T>(test, rank, 0, 0).out[0]),
          "written behind the end");
}

template <typename T> void run(const Case& test, uint64_t seed) {
  World world(seed, test.delay);
  int64_t largest = 0;
  for (int64_t count : test.counts) largest = std::max(largest, count);
  EmulatedGroup group(test.world_size, largest * static_cast<int64_t>(sizeof(T)), test.first_epoch);
  run_ranks(world, test.world_size, test.shape, [&](Device& device, int rank) {
    for (int number = 0; number < static_cast<int>(test.counts.size()); ++number) {
      Launch<T> launched(test, rank, number, test.counts[number]);
      const AllReduceArguments arguments{{launched.input}, {launched.out}, test.counts[number]};
      if (!device.launch(
              [&] { instance_for<OneShot, T>(test.world_size)(group.as_seen_by(rank), arguments); }))
        return;
      check(test, launched, rank, number);
    }
  });
  require_finished(world);
}

void test_sizes_and_worlds(uint64_t seed) {
  for (int world_size : {1, 2, 3, 4}) {
    Case test{.world_size = world_size, .counts = {0, 1, 7, 8, 9, 517, 1000}};
    run<BFloat16>(test, seed);
    test.shifted = true;
    run<Float16>(test, seed);
    test.in_place = true;
    test.counts = {3, 4, 5, 515};
    run<float>(test, seed);
  }
}

void test_eight_ranks(uint64_t seed) {
  run<BFloat16>({.world_size = 8, .shape = {1, 16}, .counts = {300, 5}}, seed);
}

// Only the two halves keep a fast rank from overwriting what a slow one still reads.
void test_a_straggler_and_a_wrap(uint64_t seed) {
  for (int world_size : {2, 3}) {
    Case test{.world_size = world_size, .counts = {600, 600, 600, 600, 600, 600}};
    test.first_epoch = 0xfffffffdu;
    for (uint64_t step : {30, 90, 150, 200, 333}) {
      test.delay = {static_cast<int>((seed + step) % world_size), step + seed};
      run<float>(test, seed);
    }
  }
}

// Blocks that the grid of many launches lacks are kept close to the epoch.
void test_idle_blocks_do_not_fall_behind(uint64_t seed) {
  World world(seed);
  EmulatedGroup group(2, 64, 1000);
  run_ranks(world, 2, {1, 8}, [&](Device& device, int rank) {
    for (uint32_t number = 0; number < kMaxBlocks; ++number) {
      float value = 1;
      const AllReduceArguments arguments{{&value}, {&value}, 1};
      if (!device.launch([&] { one_shot_all_reduce_kernel<float, 2>(group.as_seen_by(rank), arguments); }))
        return;
      require(value == 2, "one element gave " + std::to_string(value));
    }
  });
  require_finished(world);
  for (uint32_t block = 0; block < kMaxBlocks; ++block) {
    require(group.control(0).arrivals[block][1] > 1000,
            "block " + std::to_string(block) + " was left behind");
  }
}

// A rank that has given up must not touch the halves again: its peers may still read them.
void test_nothing_is_staged_after_an_abort(uint64_t seed) {
  World world(seed);
  EmulatedGroup group(2, 64);
  group.control(0).abort = 2;
  float value = 1;
  const AllReduceArguments arguments{{&value}, {&value}, 1};
  Device device(world, 0, {1, 16});
  device.launch([&] { one_shot_all_reduce_kernel<float, 2>(group.as_seen_by(0), arguments); });
  require_finished(world);
  const SymmetricGroup seen = group.as_seen_by(0);
  for (uint32_t epoch : {0u, 1u}) {
    const float staged = *reinterpret_cast<const float*>(half_of(seen, 0, epoch));
    require(staged != staged, "staged after an abort");
  }
  require(group.control(1).arrivals[0][0] == 0, "signalled after an abort");
  require(group.page(0).failure.peer == 1, "the record does not name who gave up");
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 4);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_sizes_and_worlds(seed);
    test_eight_ranks(seed);
    test_a_straggler_and_a_wrap(seed);
    test_idle_blocks_do_not_fall_behind(seed);
    test_nothing_is_staged_after_an_abort(seed);
  }
  std::printf("one_shot_all_reduce: %d seeds ok\n", seeds);
}
