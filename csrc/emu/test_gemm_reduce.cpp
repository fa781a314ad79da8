// gemm_reduce_scatter and gemm_all_reduce on a mainloop of ordinary loads: every sum over the ranks, with bias, residual
// and RMSNorm, for any shards, call after call with a rank that lags and counters that wrap; the same bits whoever comes
// first; a rank that does not come ends the others.
#include "emu/plain_mainloop.h"
#include "emu/reduce_cases.h"

namespace interlace::emu {
namespace {

using namespace reduce_cases;

using Bf16 = PlainMainloop<BFloat16, 4, 8>;
using Fp16 = PlainMainloop<Float16, 8, 16>;
using Fp8 = PlainMainloop<Float8E4m3, 4, 8>;

void test_worlds_shards_and_columns(uint64_t seed) {
  for (const bool scatter : {true, false}) {
    Case one{.calls = {{.rows = {9}, .columns = 11, .scatter = scatter, .bias = true, .residual = true},
                       {.rows = {0}, .scatter = scatter}}};
    run<Bf16>(one, seed);
    Case two{
        .calls = {{.rows = {5, 2}, .columns = 17, .scatter = scatter, .bias = true},
                  {.rows = {1, 0}, .columns = 1, .depths = {1}, .scatter = scatter, .residual = true},
                  {.rows = {0, 8}, .columns = 16, .depths = {8, 3}, .scatter = scatter, .aligned = true}}};
    two.comm_blocks = 0;
    run<Bf16>(two, seed);
    two.float32_wire = true;
    run<Fp16>(two, seed);
    Case three{.calls = {{.rows = {5, 0, 9}, .columns = 9, .scatter = scatter, .residual = true},
                         {.rows = {0, 0, 0}, .columns = 3, .scatter = scatter},
                         {.rows = {3, 3, 3}, .columns = 24, .scatter = scatter, .bias = true}}};
    three.blocks = 4;
    three.comm_blocks = 2;
    run<Bf16>(three, seed);
    Case four{.calls = {{.rows = {9, 1, 0, 4}, .columns = 10, .scatter = scatter},
                        {.rows = {1, 0, 0, 0}, .columns = 8, .scatter = scatter}}};
    four.unit_rows = 1;
    four.float32_wire = true;
    run<Bf16>(four, seed);
  }
  Case eight{.calls = {{.rows = {3, 9, 0, 1, 5, 2, 0, 4}, .scatter = true},
                       {.rows = {1, 1, 1, 1, 1, 1, 1, 1}, .columns = 8, .scatter = false}}};
  eight.blocks = 2;
  run<Bf16>(eight, seed);
}

void test_scales_of_float8(uint64_t seed) {
  run<Fp8>({.calls = {{.rows = {3, 6}, .columns = 10, .depths = {9}, .bias = true}}}, seed);
}

void test_norms(uint64_t seed) {
  for (const bool scatter : {true, false}) {
    Call both{.rows = {5, 0, 4}, .columns = 67, .scatter = scatter, .bias = true, .residual = true};
    both.norm = true;
    Call norm_only = both;
    norm_only.keep_sum = false;
    norm_only.columns = 300;  // several packs for a thread
    run<Bf16>({.calls = {both, norm_only, both}}, seed);
  }
}

void test_the_switch_sums(uint64_t seed) {
  for (const bool scatter : {true, false}) {
    const Call plain{.rows = {5, 0, 6}, .columns = 17, .scatter = scatter, .bias = true, .residual = true};
    Call normed = plain;
    normed.norm = true;
    Case test{.calls = {plain, normed, {.rows = {0, 0, 0}, .scatter = scatter}, plain}};
    test.multicast = true;
    test.delay = {static_cast<int>(seed % 3), 40 * seed};
    run<Bf16>(test, seed);
    test.calls = {plain};
    run<Fp16>(test, seed);
    test.float32_wire = true;
    run<Bf16>(test, seed);
  }
}

// Only the two halves keep a fast rank from overwriting what a slow one still sums; only the signal to a rank without
// rows keeps the others from running away from it. Ops and shapes take turns on one group.
void test_a_straggler_and_a_wrap(uint64_t seed) {
  const Call uneven{.rows = {7, 0, 6}, .columns = 9, .residual = true};
  const Call all{.rows = {5, 2, 4}, .columns = 17, .scatter = false, .norm = true};
  const Call lonely{.rows = {0, 0, 9}, .columns = 8};
  for (uint64_t step : {25, 180, 520}) {
    Case test{.calls = {uneven, all, lonely, lonely, lonely, all, all, uneven}};
    test.first_epoch = 0xfffffffdu;
    test.delay = {static_cast<int>((seed + step) % 3), step + seed};
    run<Bf16>(test, seed);
  }
}

// Partial sums of very different size: any other order, or a rounding on the way, gives other bits.
template <bool kScatter> void test_sums_are_in_rank_order(uint64_t seed) {
  constexpr int kWorld = 4;
  const float sizes[kWorld] = {1.0f, 0x1p24f, 1.0f, -0x1p24f};  // in rank order: ((1 + 2^24) + 1) - 2^24
  float want = 0;
  for (float size : sizes) want += size;
  const Call call{.rows = {4, 4, 4, 4}, .columns = 8, .depths = {1}, .scatter = kScatter};
  Case test{.calls = {call}};
  test.float32_wire = true;
  test.delay = {static_cast<int>(seed % kWorld), 10 + seed};
  World world(seed, test.delay);
  EmulatedGroup group(kWorld, largest_half<Bf16>(test));
  run_ranks(world, kWorld, {2, Bf16::kThreads}, [&](Device& device, int rank) {
    Operands<Bf16> operands(call, rank, 0);
    for (int64_t row = 0; row < 16; ++row) from_float(1.0f, operands.xs[0].at(row, 0));
    for (int64_t column = 0; column < 8; ++column) from_float(sizes[rank], operands.weights[0].at(column, 0));
    const GemmArguments arguments = operands.arguments();
    const ReduceArguments reduce = reduce_arguments(test, operands);
    if (!device.launch([&] { launch<Bf16>(group.as_seen_by(rank), arguments, reduce); })) return;
    for (int64_t row = 0; row < operands.out_rows; ++row) {
      for (int64_t column = 0; column < 8; ++column)
        require_equal(to_float(operands.out.at(row, column)), want, place("out", rank, 0, row, column));
    }
  });
  require_finished(world);
}

// The other rank never comes. Every role of this one leaves, the record says for which row block it waited, and the next
// launch neither stores nor signals.
void test_a_missing_rank_ends_the_call(uint64_t seed) {
  for (const bool scatter : {true, false}) {
    const bool asked = scatter;
    const Call call{.rows = {6, 5}, .columns = 9, .scatter = scatter};
    const Case test{.calls = {call}};
    World world(seed, {}, 3'000'000);
    EmulatedGroup group(2, largest_half<Bf16>(test), 6, asked ? 600 : 1);
    group.page(0).abort_request = asked;
    Operands<Bf16> operands(call, 0, 0);
    const GemmArguments arguments = operands.arguments();
    const ReduceArguments reduce = reduce_arguments(test, operands);
    Device device(world, 0, {3, Bf16::kThreads});
    for (int time = 0; time < 2; ++time)
      device.launch([&] { launch<Bf16>(group.as_seen_by(0), arguments, reduce); });
    require_finished(world);
    const DeviceFailure& failure = group.page(0).failure;
    const auto want = static_cast<uint32_t>(asked ? FailureState::kAborted : FailureState::kTimedOut);
    // a request of the host may find a reducer that still waits for the tiles of its own rank
    require(failure.state == want && (failure.peer == 1 || (asked && failure.peer == 0)) &&
                failure.want == 7 && failure.seen == 6,
            "the record is wrong: state " + std::to_string(failure.state) + ", peer " +
                std::to_string(failure.peer) + ", seen " + std::to_string(failure.seen));
    require(failure.tile >= 1 && failure.tile <= 3, "the record does not name the row block");
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
    test_scales_of_float8(seed);
    test_norms(seed);
    test_the_switch_sums(seed);
    test_a_straggler_and_a_wrap(seed);
    test_sums_are_in_rank_order<true>(seed);
    test_sums_are_in_rank_order<false>(seed);
    test_a_missing_rank_ends_the_call(seed);
  }
  std::printf("gemm_reduce: %d seeds ok\n", seeds);
}
