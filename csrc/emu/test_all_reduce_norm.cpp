// one_shot_all_reduce_norm, two_shot_all_reduce_norm, reduce_scatter_norm: sums exact, norm to the last bit of the
// element, the same bits on all ranks and from both all-reduces; any rows and columns, launch after launch.
#include <cmath>

#include "cuda/kernels/launching.cuh"
#include "cuda/kernels/one_shot_all_reduce_norm.cuh"
#include "cuda/kernels/reduce_scatter_norm.cuh"
#include "cuda/kernels/switch_wire.cuh"
#include "cuda/kernels/two_shot_all_reduce_norm.cuh"
#include "emu/array.h"

namespace interlace::emu {
namespace {

using Kernel = void (*)(SymmetricGroup, RowArguments);
struct OneShot {
  using Kernel = emu::Kernel;
  template <typename T, int kBound, bool kAligned>
  static constexpr Kernel kernel = one_shot_all_reduce_norm_kernel<T, kBound, kAligned>;
};
struct TwoShot {
  using Kernel = emu::Kernel;
  template <typename T, int kBound, bool kAligned>
  static constexpr Kernel kernel = two_shot_all_reduce_norm_kernel<T, kBound, kAligned>;
};
struct Scatter {
  using Kernel = emu::Kernel;
  template <typename T, int kBound, bool kAligned>
  static constexpr Kernel kernel = reduce_scatter_norm_kernel<T, kBound, kAligned>;
};

constexpr float kEps = 1e-5f;

// Small integers: sums with bias and residual are exact in every format.
float input_value(int rank, int64_t i) { return static_cast<float>((i * 7 + rank * 13) % 17) - 8.0f; }
float residual_value(int64_t i) { return static_cast<float>(i % 5) - 2.0f; }
float bias_value(int64_t column) { return static_cast<float>(column % 3); }
float weight_value(int64_t column) { return 0.5f + static_cast<float>(column % 4) / 4; }

struct Case {
  int world_size = 2;
  Shape shape{2, 64};
  int64_t rows = 3;
  int64_t columns = 40;
  bool residual = true;
  bool bias = true;
  bool weight = true;
  bool sums = true;  // wanted, in place of the residual if there is one
  bool norm = true;
  bool through_switch = false;  // the two-shot all-reduce and the reduce-scatter
  int64_t shift = 0;
  int launches = 1;
  uint32_t first_epoch = 0xfffffffeu;
  Delay delay = {};

  float sum_at(int64_t row, int64_t column) const {
    const int64_t i = row * columns + column;
    float sum = residual ? residual_value(i) : 0;
    for (int rank = 0; rank < world_size; ++rank) sum += input_value(rank, i);
    return bias ? sum + bias_value(column) : sum;
  }
};

// What a rank ends up with; row `first_row` of the whole is its row 0.
template <typename T> struct Results {
  Array<T> sums;
  Array<T> outs;
};

template <typename T>
void check(const Case& test, const std::string& name, int64_t first_row, int64_t rows, Results<T>& results) {
  if (test.sums) {
    results.sums.expect(name + ": sums", [&](int64_t i) {
      return test.sum_at(first_row + i / test.columns, i % test.columns);
    });
  }
  results.outs.expect_guarded(name);
  if (!test.norm) return;
  const double unit = sizeof(T) == 4 ? 0x1p-20 : std::is_same_v<T, Float16> ? 0x1p-10 : 0x1p-7;
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t column = 0; column < test.columns; ++column) {
      squares += std::pow(test.sum_at(first_row + row, column), 2);
    }
    const double scale = 1 / std::sqrt(squares / static_cast<double>(test.columns) + kEps);
    for (int64_t column = 0; column < test.columns; ++column) {
      const double want =
          test.sum_at(first_row + row, column) * scale * (test.weight ? weight_value(column) : 1);
      const float got = results.outs.at(row * test.columns + column);
      // rounded once: half a unit in the last place; the rest is room for fp32
      require(std::fabs(got - want) <= 0.51 * unit * std::fabs(want) + 1e-7,
              name + ": row " + std::to_string(row) + ", column " + std::to_string(column) + ": " +
                  std::to_string(got) + " instead of " + std::to_string(want));
    }
  }
}

// As the launch functions choose; the one-shot all-reduce has no kernel for the switch.
template <typename Kernels, typename T> Kernel instance(const Case& test, bool aligned) {
  if constexpr (!std::is_same_v<Kernels, OneShot>) {
    if (test.through_switch && aligned) return Kernels::template kernel<T, kThroughSwitch, true>;
    if (test.through_switch) return Kernels::template kernel<T, kThroughSwitch, false>;
  }
  return aligned ? instance_for<AlignedRows<Kernels>, T>(test.world_size)
                 : instance_for<AnyRows<Kernels>, T>(test.world_size);
}

template <typename Kernels, typename T>
Results<T> launch(const Case& test, Device& device, const EmulatedGroup& group, int rank,
                  const Shards& shards, int64_t first_row, int64_t rows) {
  const int64_t whole = test.rows * test.columns, own = rows * test.columns;
  Array<T> input(whole, test.shift, [&](int64_t i) { return input_value(rank, i); });
  Array<T> bias(test.columns, 0, bias_value), weight(test.columns, test.shift, weight_value);
  Results<T> results{Array<T>(own, test.shift == 0 ? 0 : rank,
                              [&](int64_t i) { return residual_value(first_row * test.columns + i); }),
                     Array<T>(own, test.shift)};
  RowArguments arguments{};
  arguments.inputs[0] = input.data();
  if (test.residual) arguments.residuals[0] = results.sums.data();
  if (test.sums) arguments.sums[0] = results.sums.data();
  if (test.norm) arguments.outs[0] = results.outs.data();
  if (test.bias) arguments.bias = bias.data();
  if (test.weight) arguments.norm_weight = weight.data();
  arguments.eps = kEps;
  arguments.columns = test.columns;
  arguments.rows = shards;
  const Kernel kernel = instance<Kernels, T>(test, rows_are_aligned(arguments, 1, sizeof(T)));
  device.launch([&] { kernel(group.as_seen_by(rank), arguments); });
  return results;
}

template <typename T> void run(const Case& test, uint64_t seed) {
  World world(seed, test.delay);
  const int64_t bytes = sizeof(T);
  EmulatedGroup group(test.world_size,
                      std::max(one_shot_half_bytes(test.rows, test.columns, bytes),
                               std::max(two_shot_half_bytes(test.rows, test.columns, bytes, test.world_size),
                                        slots_half_bytes(test.rows, test.columns, bytes, test.world_size))),
                      test.first_epoch);
  if (test.through_switch) group.bind_multicast(world);
  // uneven and, with few rows, empty: the last rank gets what is left
  int64_t lengths[kMaxRanks] = {};
  for (int r = 0; r + 1 < test.world_size; ++r) lengths[r] = r % 2 == 0 ? test.rows / test.world_size : 0;
  lengths[test.world_size - 1] = test.rows - shards_of(lengths, test.world_size).total();
  const Shards shards = shards_of(lengths, test.world_size);

  run_ranks(world, test.world_size, test.shape, [&](Device& device, int rank) {
    const std::string where = ", rank " + std::to_string(rank) + " of " + std::to_string(test.world_size) +
                              ", " + std::to_string(test.rows) + " x " + std::to_string(test.columns);
    for (int number = 0; number < test.launches; ++number) {
      auto one = launch<OneShot, T>(test, device, group, rank, shards, 0, test.rows);
      auto two = launch<TwoShot, T>(test, device, group, rank, shards, 0, test.rows);
      auto scattered =
          launch<Scatter, T>(test, device, group, rank, shards, shards.begin(rank), shards.rows(rank));
      if (world.stuck()) return;
      check(test, "one_shot_all_reduce_norm" + where, 0, test.rows, one);
      check(test, "two_shot_all_reduce_norm" + where, 0, test.rows, two);
      check(test, "reduce_scatter_norm" + where, shards.begin(rank), shards.rows(rank), scattered);
      for (int64_t i = 0; i < two.outs.count() && test.norm; ++i) {
        require(one.outs.at(i) == two.outs.at(i), "the two all-reduces differ" + where);
      }
    }
  });
  require_finished(world);
}

void test_shapes_and_worlds(uint64_t seed) {
  for (int world_size : {1, 2, 3, 4}) {
    run<BFloat16>({.world_size = world_size, .rows = 5, .columns = 40}, seed);
    run<Float16>({.world_size = world_size, .rows = 7, .columns = 13, .shift = 1}, seed);
    run<float>({.world_size = world_size, .shape = {3, 32}, .rows = 1, .columns = 1}, seed);
  }
  run<BFloat16>({.world_size = 8, .shape = {1, 32}, .rows = 2, .columns = 24}, seed);
  run<float>({.rows = 0, .columns = 8}, seed);
}

// Longer than what the threads of a team hold in registers.
void test_long_rows(uint64_t seed) {
  run<BFloat16>({.shape = {1, 32}, .rows = 2, .columns = 8 * 32 * held_packs(true) + 304}, seed);
  run<float>({.shape = {1, 32}, .rows = 1, .columns = 4 * 32 * held_packs(true) + 3, .sums = false}, seed);
}

// Many rows in a block: teams of several warps or several teams, and several turns each.
void test_many_rows(uint64_t seed) {
  run<BFloat16>({.shape = {1, 128}, .rows = 3, .columns = 520}, seed);
  run<BFloat16>({.world_size = 3, .shape = {1, 128}, .rows = 11, .columns = 264}, seed);
}

void test_optional_operands(uint64_t seed) {
  run<BFloat16>({.residual = false, .bias = false, .weight = false}, seed);
  run<Float16>({.residual = false, .norm = false}, seed);
  run<float>({.bias = false, .sums = false}, seed);
}

void test_through_the_switch(uint64_t seed) {
  for (int world_size : {1, 2, 3}) {
    run<BFloat16>({.world_size = world_size, .rows = 5, .through_switch = true}, seed);
  }
  run<Float16>({.rows = 2, .columns = 13, .through_switch = true, .shift = 1}, seed);
  run<float>({.rows = 4, .through_switch = true}, seed);
}

void test_a_straggler(uint64_t seed) {
  for (int world_size : {2, 3}) {
    const Delay delay{static_cast<int>(seed % world_size), 60 + 50 * seed};
    run<BFloat16>({.world_size = world_size, .rows = 6, .launches = 3, .delay = delay}, seed);
  }
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_shapes_and_worlds(seed);
    test_long_rows(seed);
    test_many_rows(seed);
    test_optional_operands(seed);
    test_through_the_switch(seed);
    test_a_straggler(seed);
  }
  std::printf("all_reduce_norm: %d seeds ok\n", seeds);
}
