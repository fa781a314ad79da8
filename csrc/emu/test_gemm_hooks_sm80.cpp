// The sm_80 mainloop with hooks that wait for rows and publish tiles, rows of the staging, and one product of each kind.
// One instance, so that planted bugs are quickly compiled.
#include "emu/gemm_sm80_testing.h"

namespace interlace::emu {
namespace {

using Tile = GemmTile<BFloat16, false>;

// The rows that peers brought are the other source of x.
void test_gathered_rows(uint64_t seed) {
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
  auto untouched = problem.x[0];  // the other half
  for (auto& pack : untouched.storage) pack = {};
  GatheredRows gathered;
  gathered.halves[0] = untouched.data() - 5 * untouched.stride;
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

void test_products(uint64_t seed) {
  multiply<Tile>({.rows = 35, .products = {{70, 69}}, .unaligned = true, .blocks = 1}, seed);
  multiply<Tile>({.rows = 5, .products = {{51, 77}, {51, 1}, {51, 200}}, .summed = true, .blocks = 1}, seed);
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_products(seed);
    test_gathered_rows(seed);
    test_a_tile_cut_short_is_not_published<Loop<Tile>>(seed);
    test_hooks_wait_and_publish<Loop<Tile>>(seed);
  }
  std::printf("gemm_hooks_sm80: %d seeds ok\n", seeds);
}
