// The fused GEMMs on the mainloop of sm_80: cp.async reads what peers have pushed, also rows of odd length.
#include "cuda/kernels/fused_gemm_sm80.cuh"
#include "emu/gather_cases.h"
#include "emu/reduce_cases.h"

namespace interlace::emu {
namespace {

template <class T> struct Ampere : gemm_sm80::Mainloop<gemm_sm80::GemmTile<T, false>> {
  static GatheredRows maps(const GemmArguments&, const GatheredRows& gathered) { return gathered; }
};

void test_gather(uint64_t seed) {
  gather_cases::Case two{.calls = {{.rows = {130, 3}, .columns = {9}, .depth = 70, .gathered = true},
                                   {.rows = {1, 0}, .columns = {130, 8}, .depth = 7, .bias = true}}};
  gather_cases::Case three{.calls = {{.rows = {2, 0, 129}, .columns = {5}, .depth = 33, .aligned = true}}};
  two.blocks = three.blocks = 2;
  gather_cases::run<Ampere<BFloat16>>(two, seed);
  gather_cases::run<Ampere<Float16>>(three, seed);
}

void test_reduce(uint64_t seed) {
  for (const bool scatter : {true, false}) {
    reduce_cases::Case two{
        .calls = {{.rows = {129, 2}, .columns = 10, .depths = {70}, .scatter = scatter},
                  {.rows = {0, 3}, .columns = 130, .depths = {9, 30}, .scatter = scatter}}};
    reduce_cases::Case three{.calls = {{.rows = {5, 0, 2}, .columns = 12, .scatter = scatter, .norm = true}}};
    two.blocks = three.blocks = 2;
    two.float32_wire = scatter;
    three.calls[0].aligned = true;
    reduce_cases::run<Ampere<BFloat16>>(two, seed);
    reduce_cases::run<Ampere<Float16>>(three, seed);
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
  }
  std::printf("fused_gemm_sm80: %d seeds ok\n", seeds);
}
