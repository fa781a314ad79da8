// The sm_90 mainloop with hooks that wait for rows and publish tiles: everything in its order. Instances are few, so that
// planted bugs are quickly compiled.
#include "emu/gemm_hooks_testing.h"

namespace interlace::emu {
namespace {

template <class GemmTile> struct Loop {
  using Tile = GemmTile;
  static constexpr uint32_t kThreads = kGemmThreads;
  static constexpr uint32_t kSharedBytes = kGemmSharedBytes<Tile>;

  template <class Hooks> static void run(const Problem<Tile>& problem, Hooks& hooks, char* shared) {
    gemm_tiles_sm90<Tile>(problem.maps, problem.arguments, hooks, ptx::ctaid_x(), ptx::nctaid_x(), shared);
  }
};

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace;
  using namespace interlace::emu;
  const int seeds = seeds_from(argc, argv, 8);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_hooks_wait_and_publish<Loop<GemmTile<BFloat16, 128, false>>>(seed);
    test_hooks_wait_and_publish<Loop<GemmTile<BFloat16, 128, true>>>(seed);
    test_a_tile_cut_short_is_not_published<Loop<GemmTile<BFloat16, 128, false>>>(seed);
  }
  std::printf("gemm_hooks_sm90: %d seeds ok\n", seeds);
}
