// The sm_80 mainloop as its tests run it.
#pragma once

#include "cuda/kernels/plain_gemm_sm80.cuh"
#include "emu/gemm_hooks_testing.h"

namespace interlace::emu {

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

}  // namespace interlace::emu
