// Calls of all fused GEMMs take turns on one group, with barriers between some, a rank that lags and counters that wrap;
// rows of a gather pushed by a copy engine on a stream beside the one of the kernels.
#include "cuda/kernels/barrier.cuh"
#include "cuda/kernels/publish_chunk.cuh"
#include "emu/gather_cases.h"
#include "emu/plain_mainloop.h"
#include "emu/reduce_cases.h"

namespace interlace::emu {
namespace {

using Bf16 = PlainMainloop<BFloat16, 4, 8>;

// One round: a gather, a reduction, sometimes a barrier.
void play_round(Device& device, EmulatedGroup& group, const gather_cases::Case& gathers,
                const reduce_cases::Case& reduces, int rank, int round, bool* alive) {
  const SymmetricGroup seen = group.as_seen_by(rank);
  gather_cases::Operands<Bf16> gather_operands(gathers.calls[round % gathers.calls.size()], rank, round);
  const GemmArguments gather_arguments = gather_operands.arguments();
  const GatherArguments gather = gather_cases::gather_arguments(gathers, gather_operands);
  reduce_cases::Operands<Bf16> reduce_operands(reduces.calls[round % reduces.calls.size()], rank, round);
  const GemmArguments reduce_arguments = reduce_operands.arguments();
  const ReduceArguments reduce = reduce_cases::reduce_arguments(reduces, reduce_operands);
  *alive = device.launch([&] { gather_cases::launch<Bf16>(seen, gather_arguments, gather); }) &&
           device.launch([&] { reduce_cases::launch<Bf16>(seen, reduce_arguments, reduce); }) &&
           (round % 3 != 1 || device.launch([&] { barrier_kernel(seen); }));
  if (!*alive) return;
  gather_operands.check();
  reduce_operands.check();
}

void test_ops_take_turns(uint64_t seed) {
  const gather_cases::Case gathers{.calls = {{.rows = {5, 0, 2}, .columns = {9, 3}, .gathered = true},
                                             {.rows = {0, 6, 1}, .columns = {4}, .bias = true}}};
  const reduce_cases::Case reduces{.calls = {{.rows = {3, 0, 6}, .columns = 11},
                                             {.rows = {2, 2, 1}, .columns = 9, .scatter = false},
                                             {.rows = {0, 5, 0}, .columns = 5}}};
  const int64_t half_bytes =
      std::max(gather_cases::largest_half<Bf16>(gathers), reduce_cases::largest_half<Bf16>(reduces));
  for (uint64_t step : {70, 400}) {
    World world(seed, {static_cast<int>((seed + step) % 3), step + seed});
    EmulatedGroup group(3, half_bytes, 0xfffffffbu);
    run_ranks(world, 3, {3, Bf16::kThreads}, [&](Device& device, int rank) {
      bool alive = true;
      for (int round = 0; round < 5 && alive; ++round)
        play_round(device, group, gathers, reduces, rank, round, &alive);
    });
    require_finished(world);
  }
}

// What a copy engine does: rows of one chunk into half 0 of a peer.
void copy_chunk(const SymmetricGroup& group, const GemmArguments& arguments, const GatherSchedule& schedule,
                int peer, int64_t chunk) {
  const Range rows = schedule.rows_of_chunk(schedule.rank, chunk);
  const int64_t depth = arguments.products[0].depth;
  const GatherStaging<BFloat16> theirs(group, peer, 0, schedule, depth);
  const auto* const x = static_cast<const BFloat16*>(arguments.x[0]);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    std::memcpy(theirs.row(schedule.staged_row(schedule.rank) + row), x + row * arguments.x_stride[0],
                static_cast<size_t>(depth) * sizeof(BFloat16));
  }
}

// One call with comm_blocks = 0: the barrier, then kernel and copies beside each other.
bool gather_by_copy_engine(World& world, Device& device, const SymmetricGroup& seen,
                           const GemmArguments& arguments, const GatherArguments& gather, int rank) {
  if (!device.launch(Shape{1, 32}, [&] { push_barrier_kernel(seen); })) return false;
  bool copied = true;
  std::thread side([&] {
    Device engine(world, rank, {1, 1});
    for (int64_t i = 0; i < gather.schedule.pushes() && copied; ++i) {
      const GatherSchedule::Push push = gather.schedule.push(i);
      copied = engine.launch([&] { copy_chunk(seen, arguments, gather.schedule, push.peer, push.chunk); }) &&
               engine.launch([&] { publish_chunk_kernel(seen, push.peer, push.chunk); });
    }
  });
  const bool multiplied = device.launch([&] { gather_cases::launch<Bf16>(seen, arguments, gather); });
  side.join();  // the caller's stream waits for the copies' event
  return multiplied && copied;
}

void test_a_copy_engine_pushes(uint64_t seed) {
  gather_cases::Case test{
      .calls = {{.rows = {9, 0, 5}, .columns = {9}}, {.rows = {1, 6, 4}, .columns = {3, 10}, .bias = true}}};
  test.comm_blocks = 0;
  World world(seed, {static_cast<int>(seed % 3), 60 + seed});
  EmulatedGroup group(3, gather_cases::largest_half<Bf16>(test), 0xfffffffcu);
  run_ranks(world, 3, {2, Bf16::kThreads}, [&](Device& device, int rank) {
    const SymmetricGroup seen = group.as_seen_by(rank);
    for (int number = 0; number < 4; ++number) {
      gather_cases::Operands<Bf16> operands(test.calls[number % 2], rank, number);
      const GemmArguments arguments = operands.arguments();
      const GatherArguments gather = gather_cases::gather_arguments(test, operands);
      if (!gather_by_copy_engine(world, device, seen, arguments, gather, rank)) return;
      operands.check();
      // other ops use both halves in between
      if (number == 1 && !device.launch(Shape{1, 32}, [&] { barrier_kernel(seen); })) return;
    }
  });
  require_finished(world);
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 4);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_ops_take_turns(seed);
    test_a_copy_engine_pushes(seed);
  }
  std::printf("fused_calls: %d seeds ok\n", seeds);
}
