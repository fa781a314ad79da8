// The sm_80 mainloop: bit-exact for any shape, layout, alignment, element and number of products.
#include "emu/gemm_sm80_testing.h"

namespace interlace::emu {
namespace {

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
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) test_all(seed);
  std::printf("gemm_sm80: %d seeds ok\n", seeds);
}
