// The sm_90 mainloop: bit-exact for any shape, layout, element and number of products. A block plays several tiles: the
// ring of stages wraps, stores overlap loads.
#include "emu/gemm_problem.h"

namespace interlace::emu {
namespace {

// ---- shapes ----

// Tails in every dimension, more stages than the ring has, K that is not a multiple of anything.
template <class Tile> void test_shapes(uint64_t seed) {
  constexpr int64_t kLap = int64_t{Tile::kStages} * Tile::kStageDepth;
  const int64_t odd = static_cast<int64_t>(seed * 37 % 61);
  run<Tile>({.rows = 129 + odd,
             .products = {{Tile::kColumns + 1 + odd, kLap + Tile::kStageDepth + 5}},
             .bias = true},
            seed);
  run<Tile>({.rows = 1 + odd % 7, .products = {{3 + odd, 1 + odd % 3}}, .blocks = 1}, seed);
}

// Three weights of different width share the rows; a block goes from one to the next.
template <class Tile> void test_several_products(uint64_t seed) {
  const Case test{.rows = 70, .products = {{130, 77}, {8, 77}, {51, 77}}, .bias = true};
  run<Tile>(test, seed);
}

template <class Tile> void test_summed_products(uint64_t seed) {
  const Case test{
      .rows = 65, .products = {{51, 77}, {51, 1}, {51, 200}}, .summed = true, .bias = true, .residual = true};
  run<Tile>(test, seed);
}

// ---- what is legal ----

void test_what_cannot_be_multiplied_is_refused() {
  alignas(16) char memory[64] = {};
  GemmArguments legal{};
  legal.x[0] = memory;
  legal.x_stride[0] = 8;
  legal.rows = 5;
  legal.count = 1;
  legal.products[0].weight = memory;
  legal.products[0].columns = 3;
  legal.products[0].depth = 1;
  legal.products[0].stride = 8;
  const GemmVariant variant{Dtype::kBFloat16, false, 128};
  require(gemm_sm90_refuses(legal, variant) == nullptr, "a legal product is refused");
  const auto refused = [&](auto change, GemmVariant how) {
    GemmArguments arguments = legal;
    change(arguments);
    require(gemm_sm90_refuses(arguments, how) != nullptr, "an illegal product is not refused");
  };
  const auto nothing = [](GemmArguments&) {};
  refused([](GemmArguments& a) { a.x_stride[0] = 1; }, variant);  // K = 1, dense: rows 2 bytes apart
  refused([](GemmArguments& a) { a.products[0].stride = 12; }, variant);
  refused([&](GemmArguments& a) { a.x[0] = memory + 2; }, variant);
  refused([&](GemmArguments& a) { a.products[0].weight = memory + 8; }, variant);
  refused([](GemmArguments& a) { a.rows = kMaxTensorDim; }, variant);
  refused([](GemmArguments& a) { a.rows = -1; }, variant);
  refused([](GemmArguments& a) { a.count = kMaxProducts + 1; }, variant);
  refused(nothing, {Dtype::kFloat32, false, 128});
  refused(nothing, {Dtype::kFloat16, false, 256});
  refused(nothing, {Dtype::kFloat8E4m3, true, 128});
  refused(nothing, {Dtype::kBFloat16, false, 64});
  legal.rows = 0;
  legal.x[0] = nullptr;  // a rank without rows
  require(gemm_sm90_refuses(legal, variant) == nullptr, "no rows are refused");
  legal.rows = 1;
  legal.x[0] = memory;
  legal.x_stride[0] = 1;  // one row has no stride
  require(gemm_sm90_refuses(legal, variant) == nullptr, "a single row is refused for its stride");
}

void test_all(uint64_t seed) {
  using Wide = GemmTile<BFloat16, 256, false>;
  using WideTransposed = GemmTile<BFloat16, 256, true>;
  using Narrow = GemmTile<BFloat16, 128, false>;
  using NarrowTransposed = GemmTile<BFloat16, 128, true>;
  using Half = GemmTile<Float16, 128, false>;
  using HalfTransposed = GemmTile<Float16, 128, true>;
  using Float8 = GemmTile<Float8E4m3, 128, false>;
  test_shapes<Wide>(seed);
  test_shapes<WideTransposed>(seed);
  test_shapes<NarrowTransposed>(seed);
  test_shapes<Half>(seed);
  test_several_products<Narrow>(seed);
  test_several_products<HalfTransposed>(seed);
  test_summed_products<Narrow>(seed);
  test_summed_products<WideTransposed>(seed);
  for (const bool row_wise : {false, true}) {
    run<Float8>({.rows = 75, .products = {{131, 1000}, {9, 1000}}, .bias = true, .row_wise = row_wise}, seed);
  }
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  test_what_cannot_be_multiplied_is_refused();
  for (int seed = 1; seed <= seeds; ++seed) test_all(seed);
  std::printf("gemm_sm90: %d seeds ok\n", seeds);
}
