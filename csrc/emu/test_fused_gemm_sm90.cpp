// The fused GEMMs on the Hopper mainloop: TMA reads what peers have pushed, tiles of 128 rows go to their owners.
#include "cuda/kernels/fused_gemm_sm90.cuh"
#include "emu/gather_cases.h"
#include "emu/reduce_cases.h"
#include "emu/tensor_maps.h"

namespace interlace::emu {
namespace {

template <class Tile> struct Hopper : gemm_sm90::Mainloop<Tile> {
  static GemmTensorMaps maps(const GemmArguments& arguments, const GatheredRows& gathered) {
    const GemmVariant variant{dtype_of<typename Tile::Element>, Tile::kMnMajor, Tile::kColumns};
    const char* const refused = gemm_sm90_refuses(arguments, variant);
    require(refused == nullptr, refused == nullptr ? "" : refused);
    return encoded_maps(arguments, variant, gathered);
  }
};

using Bf16 = Hopper<GemmTile<BFloat16, 128, false>>;
using Wide = Hopper<GemmTile<BFloat16, 256, false>>;
using Fp16 = Hopper<GemmTile<Float16, 128, false>>;
using Fp8 = Hopper<GemmTile<Float8E4m3, 128, false>>;

void test_gather(uint64_t seed) {
  using gather_cases::run;
  gather_cases::Case two{.calls = {{.rows = {130, 3}, .columns = {9}, .depth = 70, .gathered = true},
                                   {.rows = {1, 0}, .columns = {130, 8}, .depth = 7, .bias = true}}};
  gather_cases::Case three{.calls = {{.rows = {2, 0, 129}, .columns = {5}, .depth = 33}}};
  gather_cases::Case scaled{.calls = {{.rows = {3, 5}, .columns = {11}, .depth = 40, .gathered = true}}};
  for (gather_cases::Case* test : {&two, &three, &scaled}) {
    test->blocks = 2;
    for (gather_cases::Call& call : test->calls) call.aligned = true;
  }
  run<Bf16>(two, seed);
  run<Fp16>(three, seed);
  run<Fp8>(scaled, seed);
}

void test_reduce(uint64_t seed) {
  using reduce_cases::run;
  for (const bool scatter : {true, false}) {
    reduce_cases::Case two{
        .calls = {{.rows = {129, 2}, .columns = 10, .depths = {70}, .scatter = scatter},
                  {.rows = {0, 3}, .columns = 258, .depths = {9, 30}, .scatter = scatter}}};
    reduce_cases::Case three{.calls = {{.rows = {5, 0, 2}, .columns = 12, .scatter = scatter, .norm = true}}};
    for (reduce_cases::Case* test : {&two, &three}) {
      test->blocks = 2;
      for (reduce_cases::Call& call : test->calls) call.aligned = true;
    }
    run<Wide>(two, seed);
    three.float32_wire = scatter;
    run<Fp16>(three, seed);
  }
}

// Rank 1 never comes: the producer goes on without its rows, the consumers with it, and all blocks leave.
void test_a_missing_rank_ends_the_calls(uint64_t seed) {
  World world(seed, {}, 3'000'000);
  const gather_cases::Call gathered{.rows = {3, 200}, .columns = {9}, .depth = 70, .aligned = true};
  const reduce_cases::Call reduced{.rows = {3, 130}, .columns = 9, .depths = {9}, .aligned = true};
  const gather_cases::Case gather_case{.calls = {gathered}};
  const reduce_cases::Case reduce_case{.calls = {reduced}};
  gather_cases::Operands<Bf16> gather_operands(gathered, 0, 0);
  reduce_cases::Operands<Bf16> reduce_operands(reduced, 0, 0);
  const GemmArguments gather_arguments = gather_operands.arguments();
  const GemmArguments reduce_arguments = reduce_operands.arguments();
  const GatherArguments gather = gather_cases::gather_arguments(gather_case, gather_operands);
  const ReduceArguments reduce = reduce_cases::reduce_arguments(reduce_case, reduce_operands);
  for (const bool gathers : {true, false}) {
    EmulatedGroup group(2, 1 << 20, 6, 0.02);
    Device device(world, 0, {3, Bf16::kThreads, Bf16::kSharedBytes});
    device.launch([&] {
      if (gathers)
        gather_cases::launch<Bf16>(group.as_seen_by(0), gather_arguments, gather);
      else
        reduce_cases::launch<Bf16>(group.as_seen_by(0), reduce_arguments, reduce);
    });
    require_finished(world);
    require(group.page(0).failure.state == static_cast<uint32_t>(FailureState::kTimedOut),
            "there is no record");
    require(group.control(0).epoch == 7, "the epoch is not closed");
  }
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 2);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_gather(seed);
    test_reduce(seed);
    test_a_missing_rank_ends_the_calls(seed);
  }
  std::printf("fused_gemm_sm90: %d seeds ok\n", seeds);
}
