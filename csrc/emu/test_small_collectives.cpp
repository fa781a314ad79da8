// two_shot_all_reduce, reduce_scatter, all_gather, all_to_all, publish_chunk: right for any length, alignment and world,
// mixed on one group launch after launch without a barrier, with a rank that lags, with counters that wrap.
#include "cuda/kernels/all_gather.cuh"
#include "cuda/kernels/all_to_all.cuh"
#include "cuda/kernels/barrier.cuh"
#include "cuda/kernels/launching.cuh"
#include "cuda/kernels/publish_chunk.cuh"
#include "cuda/kernels/reduce_scatter.cuh"
#include "cuda/kernels/switch_wire.cuh"
#include "cuda/kernels/two_shot_all_reduce.cuh"
#include "emu/array.h"

namespace interlace::emu {
namespace {

struct TwoShot {
  using Kernel = void (*)(SymmetricGroup, AllReduceArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = two_shot_all_reduce_kernel<T, kBound>;
};
struct Scatter {
  using Kernel = void (*)(SymmetricGroup, ShardArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = reduce_scatter_kernel<T, kBound>;
};
struct Gather {
  using Kernel = void (*)(SymmetricGroup, ShardArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = all_gather_kernel<T, kBound>;
};
struct AllToAll {
  using Kernel = void (*)(SymmetricGroup, AllToAllArguments);
  template <typename T, int kBound> static constexpr Kernel kernel = all_to_all_kernel<T, kBound>;
};

// Small integers: sums are exact in every format. Different for every rank, launch and element.
float value_of(int rank, int number, int64_t i) {
  return static_cast<float>((i * 7 + rank * 13 + number * 5) % 17 + 1);
}

float sum_of(int world_size, int number, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < world_size; ++rank) sum += value_of(rank, number, i);
  return sum;
}

// Uneven, some empty: rank r brings or gets (3 r + number) % 4 parts of `unit`.
Shards uneven(int world_size, int number, int64_t unit) {
  int64_t lengths[kMaxRanks] = {};
  for (int rank = 0; rank < world_size; ++rank) lengths[rank] = (3 * rank + number) % 4 * unit;
  return shards_of(lengths, world_size);
}

constexpr int64_t kLargest = 4000;  // elements of 4 bytes, of all tensors here

struct Rank {
  Device& device;
  const EmulatedGroup& group;
  int rank;
  int world_size;
  bool through_switch = false;  // where the op has such a kernel

  template <typename Kernels, typename T> typename Kernels::Kernel instance() const {
    if (through_switch) return Kernels::template kernel<T, kThroughSwitch>;
    return instance_for<Kernels, T>(world_size);
  }
  // What copies elements of T, as the launch functions choose it.
  template <typename Kernels, typename T> typename Kernels::Kernel copying() const {
    if constexpr (!std::is_same_v<Kernels, AllToAll>) {
      if (through_switch && sizeof(T) == 1) return Kernels::template kernel<uint8_t, kThroughSwitch>;
      if (through_switch) return Kernels::template kernel<uint16_t, kThroughSwitch>;
    }
    return copying_instance<Kernels>(sizeof(T), world_size);
  }
  std::string name(const char* op, int number) const {
    return std::string(op) + ", rank " + std::to_string(rank) + " of " + std::to_string(world_size) +
           ", launch " + std::to_string(number);
  }

  template <typename T> bool all_reduce(int number, int64_t count, bool in_place, int64_t shift) {
    Array<T> input(count, shift, [&](int64_t i) { return value_of(rank, number, i); });
    Array<T> apart(count, rank);
    Array<T>& out = in_place ? input : apart;
    const AllReduceArguments arguments{{input.data()}, {out.data()}, count};
    const auto kernel = instance<TwoShot, T>();
    if (!device.launch([&] { kernel(group.as_seen_by(rank), arguments); })) return false;
    out.expect(name("two_shot_all_reduce", number), [&](int64_t i) { return sum_of(world_size, number, i); });
    return true;
  }

  template <typename T> bool reduce_scatter(int number, int64_t unit, int64_t shift) {
    const Shards shards = uneven(world_size, number, unit);
    Array<T> input(shards.total(), shift, [&](int64_t i) { return value_of(rank, number, i); });
    Array<T> out(shards.rows(rank), rank);
    const ShardArguments arguments{{input.data()}, {out.data()}, shards};
    const auto kernel = instance<Scatter, T>();
    if (!device.launch([&] { kernel(group.as_seen_by(rank), arguments); })) return false;
    out.expect(name("reduce_scatter", number),
               [&](int64_t i) { return sum_of(world_size, number, shards.begin(rank) + i); });
    return true;
  }

  template <typename T> bool all_gather(int number, int64_t unit, int64_t shift) {
    const Shards shards = uneven(world_size, number, unit);
    Array<T> input(shards.rows(rank), shift, [&](int64_t i) { return value_of(rank, number, i); });
    Array<T> out(shards.total(), rank);
    const ShardArguments arguments{{input.data()}, {out.data()}, copied(shards, sizeof(T))};
    const auto kernel = copying<Gather, T>();
    if (!device.launch([&] { kernel(group.as_seen_by(rank), arguments); })) return false;
    out.expect(name("all_gather", number), [&](int64_t i) {
      int from = 0;
      while (i >= shards.begins[from + 1]) ++from;
      return value_of(from, number, i - shards.begin(from));
    });
    return true;
  }

  // Rank a sends rank b (a + 2 b + number) % 4 units.
  template <typename T> bool all_to_all(int number, int64_t unit, int64_t shift) {
    const auto units = [&](int from, int to) { return (from + 2 * to + number) % 4 * unit; };
    int64_t sent[kMaxRanks] = {}, received[kMaxRanks] = {};
    for (int peer = 0; peer < world_size; ++peer) {
      sent[peer] = units(rank, peer);
      received[peer] = units(peer, rank);
    }
    AllToAllArguments arguments{};
    const Shards out_shards = shards_of(received, world_size), in_shards = shards_of(sent, world_size);
    arguments.received[0] = copied(out_shards, sizeof(T));
    arguments.sent[0] = copied(in_shards, sizeof(T));
    arguments.largest = 3 * unit * copies_per_element(sizeof(T));
    Array<T> input(in_shards.total(), shift, [&](int64_t i) { return value_of(rank, number, i); });
    Array<T> out(out_shards.total(), rank);
    arguments.inputs[0] = input.data();
    arguments.outs[0] = out.data();
    const auto kernel = copying<AllToAll, T>();
    if (!device.launch([&] { kernel(group.as_seen_by(rank), arguments); })) return false;
    out.expect(name("all_to_all", number), [&](int64_t i) {
      int from = 0;
      while (i >= out_shards.begins[from + 1]) ++from;
      int64_t first = 0;  // of the piece for this rank in the input of `from`
      for (int peer = 0; peer < rank; ++peer) first += units(from, peer);
      return value_of(from, number, first + i - out_shards.begin(from));
    });
    return true;
  }
};

// All ops in turn on one group: each leaves the halves and the words as the next needs them.
void run_mixed(uint64_t seed, int world_size, Shape shape, uint32_t first_epoch, Delay delay,
               bool through_switch = false) {
  World world(seed, delay);
  EmulatedGroup group(world_size, kLargest * 4, first_epoch);
  if (through_switch) group.bind_multicast(world);
  run_ranks(world, world_size, shape, [&](Device& device, int rank) {
    Rank self{device, group, rank, world_size, through_switch};
    int number = 0;
    bool moving = true;
    for (int64_t count : {1, 130, 0, 77}) {
      moving = moving && self.all_reduce<float>(++number, count, false, 0);
      moving = moving && self.reduce_scatter<BFloat16>(++number, count, 0);
      moving = moving && self.all_reduce<BFloat16>(++number, 2 * count, true, rank);
      moving = moving && self.all_gather<uint16_t>(++number, count, rank);
      moving = moving && self.all_gather<uint8_t>(++number, count, 0);
      moving = moving && self.all_to_all<uint32_t>(++number, count, 0);
      moving = moving && self.reduce_scatter<Float16>(++number, count / 2, rank);
      moving = moving && self.all_to_all<uint16_t>(++number, count / 3, rank);
      moving = moving && self.all_reduce<Float16>(++number, count + 1, false, 1);
    }
  });
  require_finished(world);
  for (int rank = 0; rank < world_size; ++rank) {
    require(group.page(rank).failure.state == 0, "failure recorded without a failure");
  }
}

// Only halves and epochs keep a fast rank from overwriting what a slow one still reads.
void test_a_straggler_and_a_wrap(uint64_t seed) {
  for (int world_size : {2, 3}) {
    for (uint64_t step : {40, 150, 333}) {
      const Delay delay{static_cast<int>((seed + step) % world_size), step + seed};
      World world(seed, delay);
      EmulatedGroup group(world_size, kLargest * 4, 0xfffffff9u);
      run_ranks(world, world_size, {2, 8}, [&](Device& device, int rank) {
        Rank self{device, group, rank, world_size};
        for (int number = 0; number < 6; ++number) {
          if (!self.all_reduce<float>(number, 300, false, 0)) return;
          if (number % 2 == 1 && !self.reduce_scatter<float>(number, 90, 0)) return;
        }
      });
      require_finished(world);
    }
  }
}

// Words of blocks that the grid lacks stay close to the epoch, also when every launch takes two epochs.
void test_idle_blocks_do_not_fall_behind(uint64_t seed) {
  World world(seed);
  EmulatedGroup group(2, 64, 1000);
  run_ranks(world, 2, {1, 8}, [&](Device& device, int rank) {
    Rank self{device, group, rank, 2};
    for (uint32_t number = 0; number < kMaxBlocks / 2; ++number) {
      if (!self.all_reduce<float>(static_cast<int>(number), 1, false, 0)) return;
    }
  });
  require_finished(world);
  for (uint32_t block = 0; block < kMaxBlocks; ++block) {
    require(group.control(0).arrivals[block][1] > 1000,
            "block " + std::to_string(block) + " was left behind");
  }
}

// Rank 1 never comes: rank 0 leaves with a record, neither reduces nor publishes, and closes both epochs; the next launch
// leaves at once.
void test_a_missing_rank_ends_the_call(uint64_t seed) {
  World world(seed);
  EmulatedGroup group(2, 1024, 6, /*timeout_seconds=*/0.02);
  Array<float> input(40, 0, [](int64_t) { return 1.0f; }), out(40, 0);
  const AllReduceArguments arguments{{input.data()}, {out.data()}, 40};
  Device device(world, 0, {2, 8});
  for (const uint32_t epoch : {8u, 10u}) {
    device.launch([&] { two_shot_all_reduce_kernel<float, 2>(group.as_seen_by(0), arguments); });
    require_finished(world);
    require(group.control(0).epoch == epoch, "the epochs are not closed");
  }
  const DeviceFailure& failure = group.page(0).failure;
  require(failure.state == static_cast<uint32_t>(FailureState::kTimedOut) && failure.peer == 1 &&
              failure.want == 7 && failure.seen == 6,
          "the record does not name the wait");
  require(group.control(1).abort == 1, "the peer was not told");
  require(group.control(1).arrivals[0][0] == 7, "signalled after the wait was cut short");
  out.expect("all_reduce without a peer", [](int64_t) { return 77.0f; });
}

// A copy (here: the test's own stores) into the peer's half, then its signal, beside a reader that waits for it.
void test_publish_chunk(uint64_t seed) {
  constexpr int64_t kChunk = 5;
  World world(seed);
  EmulatedGroup group(2, 64, 8);
  run_ranks(world, 2, {1, 1}, [&](Device& device, int rank) {
    SegmentControl& own = group.control(rank);
    own.push_epoch = 10;
    if (rank == 0) {
      const SymmetricGroup seen = group.as_seen_by(0);
      for (int i = 0; i < 16; ++i) reinterpret_cast<int*>(half_of(seen, 1, 10))[i] = i;
      device.launch([&] { publish_chunk_kernel(seen, 1, kChunk); });
      return;
    }
    const SymmetricGroup seen = group.as_seen_by(1);
    device.launch([&] { require(wait_for_tile(seen, Op::kAllGatherGemm, 0, kChunk, 10), "cut short"); });
    for (int i = 0; i < 16; ++i) {
      require(reinterpret_cast<const int*>(half_of(seen, 1, 10))[i] == i, "the chunk is not there");
    }
  });
  require_finished(world);
  group.control(0).abort = 1;
  group.control(0).push_epoch = 12;
  Device(world, 0, {1, 1}).launch([&] { publish_chunk_kernel(group.as_seen_by(0), 1, kChunk); });
  require(group.control(1).tile_arrivals[kChunk][0] == 10, "signalled after an abort");
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) {
    for (int world_size : {1, 2, 3, 4}) {
      const Delay delay{seed % world_size, static_cast<uint64_t>(97 * seed)};
      run_mixed(seed, world_size, {seed % 3 + 1u, 8}, 0xfffffff0u, delay);
      run_mixed(seed, world_size, {2, 8}, 7, delay, true);
    }
    if (seed % 4 == 1) run_mixed(seed, 8, {1, 8}, 0, {});
    test_a_straggler_and_a_wrap(seed);
    test_idle_blocks_do_not_fall_behind(seed);
    test_a_missing_rank_ends_the_call(seed);
    test_publish_chunk(seed);
  }
  std::printf("small_collectives: %d seeds ok\n", seeds);
}
