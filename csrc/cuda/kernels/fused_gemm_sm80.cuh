// The sm_80 mainloop as the fused kernels take it, and which instances of it are built.
#pragma once

#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/gemm_sm80.cuh"

namespace interlace::gemm_sm80 {

template <class GemmTile> struct Mainloop {
  using Tile = GemmTile;
  using Element = typename Tile::Element;
  using Out = typename Tile::Out;
  using Maps = GatheredRows;  // no tensor maps: where the second source of x lies
  static constexpr int kThreads = gemm_sm80::kThreads;
  static constexpr uint32_t kSharedBytes = gemm_sm80::kSharedBytes;
  static constexpr int kTileRows = kGemmBlockRows;
  static constexpr int kTileColumns = Tile::kColumns;
  static constexpr bool kSwitch = false;  // the instructions came with sm_90

  template <class Hooks>
  INTERLACE_DEVICE static void run(const Maps& gathered, const GemmArguments& arguments, Hooks& hooks,
                                   uint32_t block, uint32_t blocks, char* shared) {
    gemm_tiles<Tile>(gathered, arguments, hooks, block, blocks, shared);
  }
};

// launch(Mainloop()) of the instance that `variant` names; otherwise `none`.
template <class Launch, class Result>
Result with_instance(const GemmVariant& variant, Launch launch, Result none) {
  if (variant.tile_columns != gemm_sm80::kTileColumns) return none;
  switch (variant.dtype) {
    case Dtype::kBFloat16:
      if (variant.mn_major) return launch(Mainloop<GemmTile<BFloat16, true>>());
      return launch(Mainloop<GemmTile<BFloat16, false>>());
    case Dtype::kFloat16:
      if (variant.mn_major) return launch(Mainloop<GemmTile<Float16, true>>());
      return launch(Mainloop<GemmTile<Float16, false>>());
    default: return none;
  }
}

}  // namespace interlace::gemm_sm80
