// all_gather_gemm on a mainloop of ordinary loads: every row of every rank, for any shards and columns, call after call
// with a rank that lags and counters that wrap; fp8 scales travel with their rows; a rank that does not come ends the
// others.
#include "emu/gather_cases.h"
#include "emu/plain_mainloop.h"

namespace interlace::emu {
namespace {

using namespace gather_cases;

using Bf16 = PlainMainloop<BFloat16, 8, 8>;
using Fp16 = PlainMainloop<Float16, 4, 16>;
using Fp8 = PlainMainloop<Float8E4m3, 8, 8>;

void test_worlds_shards_and_columns(uint64_t seed) {
  run<Bf16>({.calls = {{.rows = {21}, .columns = {13}, .bias = true, .gathered = true},
                       {.rows = {0}, .columns = {5}}}},
            seed);
  run<Bf16>({.calls = {{.rows = {17, 3}, .columns = {9, 17, 1}, .depth = 11, .bias = true, .gathered = true},
                       {.rows = {1, 0}, .columns = {8}, .depth = 1, .gathered = true},
                       {.rows = {0, 16}, .columns = {24, 8, 8, 8}, .depth = 16, .aligned = true}}},
            seed);
  run<Fp16>(
      {.calls = {{.rows = {7, 0, 12}, .columns = {19}, .bias = true, .gathered = true},
                 {.rows = {0, 0, 0}, .columns = {3}},
                 {.rows = {4, 4, 4}, .columns = {16, 3}, .depth = 8, .gathered = true, .aligned = true}},
       .blocks = 4,
       .comm_blocks = 2},
      seed);
  run<Bf16>({.calls = {{.rows = {9, 1, 0, 17}, .columns = {11}, .gathered = true},
                       {.rows = {3, 5, 8, 2}, .columns = {8, 7}, .bias = true}},
             .chunk_row_blocks = 2},
            seed);
}

void test_eight_ranks(uint64_t seed) {
  run<Bf16>({.calls = {{.rows = {3, 9, 0, 1, 8, 2, 0, 5}, .columns = {9}, .gathered = true},
                       {.rows = {1, 1, 1, 1, 1, 1, 1, 1}, .columns = {3}}},
             .blocks = 2},
            seed);
}

void test_scales_travel_with_the_rows(uint64_t seed) {
  run<Fp8>({.calls = {{.rows = {9, 4}, .columns = {10}, .depth = 21, .bias = true, .gathered = true}}}, seed);
  run<Fp8>({.calls = {{.rows = {5, 0, 18}, .columns = {8, 3}, .depth = 32, .aligned = true},
                      {.rows = {4, 9, 1}, .columns = {9}, .depth = 16, .row_wise = false}}},
           seed);
}

// Only the two halves keep a fast rank from overwriting what a slow one still reads; only the signal of a rank without
// rows keeps the others from running away from it.
void test_a_straggler_and_a_wrap(uint64_t seed) {
  const Call uneven{.rows = {9, 0, 6}, .columns = {9}, .gathered = true};
  const Call other{.rows = {2, 8, 11}, .columns = {3, 8}};
  const Call lonely{.rows = {0, 0, 12}, .columns = {8}};
  for (uint64_t step : {20, 160, 470}) {
    Case test{.calls = {uneven, other, lonely, lonely, lonely, lonely, uneven, other}};
    test.first_epoch = 0xfffffffdu;
    test.delay = {static_cast<int>((seed + step) % 3), step + seed};
    run<Bf16>(test, seed);
  }
}

// Words that no call of a long row uses are kept close to the epoch.
void test_idle_words_do_not_fall_behind(uint64_t seed) {
  constexpr uint32_t kFirst = kMaxTileSignals - 3, kCalls = 6;
  const Call call{.rows = {2, 3}, .columns = {3}, .depth = 2};
  const Case test{.calls = {call}};
  World world(seed);
  EmulatedGroup group(2, largest_half<Bf16>(test), kFirst);
  run_ranks(world, 2, {2, Bf16::kThreads}, [&](Device& device, int rank) {
    for (uint32_t number = 0; number < kCalls; ++number) {
      Operands<Bf16> operands(call, rank, 0);
      const GemmArguments arguments = operands.arguments();
      const GatherArguments gather = gather_arguments(test, operands);
      if (!device.launch([&] { launch<Bf16>(group.as_seen_by(rank), arguments, gather); })) return;
    }
  });
  require_finished(world);
  for (uint32_t epoch = kFirst + 1; epoch <= kFirst + kCalls; ++epoch) {
    for (int rank : {0, 1}) {
      require(group.control(rank).tile_arrivals[epoch % kMaxTileSignals][1 - rank] >= epoch,
              "the word of a tile was left behind");
      require(group.control(rank).arrivals[epoch % kMaxBlocks][1 - rank] >= epoch,
              "the word of a block was left behind");
    }
  }
}

void test_two_runs_give_the_same_bits(uint64_t seed) {
  static std::vector<uint16_t> first;
  const Call call{.rows = {11, 6}, .columns = {13}, .depth = 40};
  const Case test{.calls = {call}};
  World world(seed);
  EmulatedGroup group(2, largest_half<Bf16>(test));
  std::vector<uint16_t> bits[2];
  run_ranks(world, 2, {3, Bf16::kThreads}, [&](Device& device, int rank) {
    Operands<Bf16> operands(call, rank, 0);
    for (int64_t k = 0; k < call.depth; ++k)
      from_float(1.0f / static_cast<float>(3 + k), operands.weights[0].at(2, k));
    const GemmArguments arguments = operands.arguments();
    const GatherArguments gather = gather_arguments(test, operands);
    if (!device.launch([&] { launch<Bf16>(group.as_seen_by(rank), arguments, gather); })) return;
    for (int64_t row = 0; row < 17; ++row) {
      for (int64_t column = 0; column < 13; ++column)
        bits[rank].push_back(operands.outs[0].at(row, column).bits);
    }
  });
  require_finished(world);
  bits[0].insert(bits[0].end(), bits[1].begin(), bits[1].end());
  if (first.empty()) first = bits[0];
  require(first == bits[0], "another order of threads gave other bits");
}

// Rank 1 never comes. Every role of rank 0 leaves, the record says for which chunk it waited, and the next launch neither
// stores nor signals.
void test_a_missing_rank_ends_the_call(uint64_t seed) {
  const Call call{.rows = {6, 9}, .columns = {9}, .gathered = true};
  const Case test{.calls = {call}};
  for (const bool asked : {false, true}) {
    World world(seed, {}, 3'000'000);
    EmulatedGroup group(2, largest_half<Bf16>(test), 6, asked ? 600 : 0.02);
    group.page(0).abort_request = asked;
    Operands<Bf16> operands(call, 0, 0);
    const GemmArguments arguments = operands.arguments();
    const GatherArguments gather = gather_arguments(test, operands);
    Device device(world, 0, {3, Bf16::kThreads});
    for (int time = 0; time < 2; ++time)
      device.launch([&] { launch<Bf16>(group.as_seen_by(0), arguments, gather); });
    require_finished(world);
    const DeviceFailure& failure = group.page(0).failure;
    const auto want = static_cast<uint32_t>(asked ? FailureState::kAborted : FailureState::kTimedOut);
    require(failure.state == want && failure.peer == 1 && failure.want == 7 && failure.seen == 6,
            "the record is wrong");
    require(failure.tile >= 1 && failure.tile <= 2, "the record does not name the chunk");
    require(group.control(1).abort == 1, "the peer is not told");
    require(group.control(1).tile_arrivals[0][0] <= 7, "signalled after the abort");
    require(group.control(0).epoch == 8, "the epochs are not closed");
  }
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 4);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_worlds_shards_and_columns(seed);
    test_eight_ranks(seed);
    test_scales_travel_with_the_rows(seed);
    test_a_straggler_and_a_wrap(seed);
    test_idle_words_do_not_fall_behind(seed);
    test_two_runs_give_the_same_bits(seed);
    test_a_missing_rank_ends_the_call(seed);
  }
  std::printf("all_gather_gemm: %d seeds ok\n", seeds);
}
