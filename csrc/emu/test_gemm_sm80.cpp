// The sm_80 mainloop: bit-exact for any shape, layout, alignment, element and number of products; hooks in their order.
#include "cuda/kernels/plain_gemm_sm80.cuh"
#include "emu/gemm_hooks_testing.h"

namespace interlace::emu {
namespace {

using gemm_sm80::GemmTile;

template <class GemmTile> struct Loop {
  using Tile = GemmTile;
  static constexpr uint32_t kThreads = gemm_sm80::kThreads;
  static constexpr uint32_t kSharedBytes = gemm_sm80::kSharedBytes;

  template <class Hooks> static void run(const Problem<Tile>& problem, Hooks& hooks, char* shared) {
    const GatheredRows nothing;
    gemm_sm80::gemm_tiles<Tile>(nothing, problem.arguments, hooks, ptx::ctaid_x(), ptx::nctaid_x(), shared);
  }
};

template <class Tile> void multiply(const Case& test, uint64_t seed) {
  World world(seed);
  Problem<Tile> problem(test);
  Device device(world, 0, {test.blocks, gemm_sm80::kThreads, gemm_sm80::kSharedBytes});
  device.launch([&] { plain_gemm_sm80_kernel<Tile>(problem.arguments); });
  require_finished(world);
  problem.check();
}

// Tails in every dimension, more steps than the ring has stages, K that is not a multiple of anything.
template <class Tile> void test_shapes(uint64_t seed) {
  const int64_t odd = static_cast<int64_t>(seed * 37 % 61);
  const int64_t depth = (gemm_sm80::kStages + 1) * gemm_sm80::kStageDepth + 5;
  multiply<Tile>({.rows = 129 + odd, .products = {{129 + odd, depth}}, .bias = true}, seed);
  multiply<Tile>({.rows = 1 + odd % 7, .products = {{3 + odd, 1 + odd % 3}}, .blocks = 1}, seed);
}

// Rows that no 16-byte copy could read.
template <class Tile> void test_any_alignment(uint64_t seed) {
  const int64_t odd = static_cast<int64_t>(seed * 11 % 50);
  multiply<Tile>({.rows = 35, .products = {{70 + odd, 70 + odd}}, .unaligned = true, .blocks = 1}, seed);
}

// Weights of different width share the rows; then products are summed, each with its own tail of K. A block goes from one
// tile to the next.
template <class Tile> void test_several_products(uint64_t seed) {
  multiply<Tile>({.rows = 70, .products = {{130, 77}, {8, 77}, {51, 77}}, .bias = true}, seed);
  multiply<Tile>({.rows = 65,
                  .products = {{51, 77}, {51, 1}, {51, 200}},
                  .summed = true,
                  .bias = true,
                  .residual = true},
                 seed);
}

// The rows that peers brought are the other source of x.
void test_gathered_rows(uint64_t seed) {
  using Tile = GemmTile<BFloat16, false>;
  const Case test{.rows = 40, .products = {{20, 100}}};
  World world(seed);
  Problem<Tile> problem(test);
  struct FromStaging : PlainHooks<Tile> {
    TileWork tile(int64_t index) const {
      TileWork work = PlainHooks<Tile>::tile(index);
      work.source = 2;
      work.row += 5;
      return work;
    }
    void store(const TileWork& work, int row, int column, float (&values)[kStoreColumns], int valid) const {
      TileWork own = work;
      own.row -= 5;
      PlainHooks<Tile>::store(own, row, column, values, valid);
    }
  };
  GatheredRows gathered;
  gathered.stride = problem.x[0].stride;
  gathered.halves[1] = problem.x[0].data() - 5 * gathered.stride;
  problem.arguments.x[0] = nullptr;
  Device device(world, 0, {1, gemm_sm80::kThreads, gemm_sm80::kSharedBytes});
  device.launch([&] {
    INTERLACE_DYNAMIC_SHARED(shared);
    FromStaging hooks{{problem.arguments}};
    gemm_sm80::gemm_tiles<Tile>(gathered, problem.arguments, hooks, 0, 1, shared);
  });
  require_finished(world);
  problem.check();
}

void test_all(uint64_t seed) {
  using Tile = GemmTile<BFloat16, false>;
  using Transposed = GemmTile<BFloat16, true>;
  using Half = GemmTile<Float16, false>;
  using HalfTransposed = GemmTile<Float16, true>;
  test_shapes<Tile>(seed);
  test_shapes<HalfTransposed>(seed);
  test_any_alignment<Half>(seed);
  test_any_alignment<Transposed>(seed);
  test_several_products<Half>(seed);
  test_several_products<Transposed>(seed);
  test_gathered_rows(seed);
  test_hooks_wait_and_publish<Loop<Tile>>(seed);
  test_a_tile_cut_short_is_not_published<Loop<Tile>>(seed);
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) test_all(seed);
  std::printf("gemm_sm80: %d seeds ok\n", seeds);
}
