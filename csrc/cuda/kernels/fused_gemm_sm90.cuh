// The sm_90 mainloop as the fused kernels take it, and which instances of it are built.
#pragma once

#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/gemm_sm90.cuh"

namespace interlace::gemm_sm90 {

template <class GemmTile> struct Mainloop {
  using Tile = GemmTile;
  using Element = typename Tile::Element;
  using Out = typename Tile::Out;
  using Maps = GemmTensorMaps;
  static constexpr int kThreads = kGemmThreads;
  static constexpr uint32_t kSharedBytes = kGemmSharedBytes<Tile>;
  static constexpr int kTileRows = kGemmBlockRows;
  static constexpr int kTileColumns = Tile::kColumns;
  static constexpr bool kSwitch = true;

  template <class Hooks>
  INTERLACE_DEVICE static void run(const Maps& maps, const GemmArguments& arguments, Hooks& hooks,
                                   uint32_t block, uint32_t blocks, char* shared) {
    gemm_tiles_sm90<Tile>(maps, arguments, hooks, block, blocks, shared);
  }
};

// launch(Mainloop()) of the instance that `variant` names; otherwise `none`.
template <class Launch, class Result>
Result with_instance(const GemmVariant& variant, Launch launch, Result none) {
  const bool wide = variant.tile_columns == 256;
  switch (variant.dtype) {
    case Dtype::kBFloat16:
      if (wide && variant.mn_major) return launch(Mainloop<GemmTile<BFloat16, 256, true>>());
      if (wide) return launch(Mainloop<GemmTile<BFloat16, 256, false>>());
      if (variant.mn_major) return launch(Mainloop<GemmTile<BFloat16, 128, true>>());
      return launch(Mainloop<GemmTile<BFloat16, 128, false>>());
    case Dtype::kFloat16:
      if (wide) return none;
      if (variant.mn_major) return launch(Mainloop<GemmTile<Float16, 128, true>>());
      return launch(Mainloop<GemmTile<Float16, 128, false>>());
    case Dtype::kFloat8E4m3:
      if (wide || variant.mn_major) return none;
      return launch(Mainloop<GemmTile<Float8E4m3, 128, false>>());
    default: return none;
  }
}

}  // namespace interlace::gemm_sm90
