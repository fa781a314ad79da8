// Which instance of the sm_90 mainloop: element, shape, layout, and what follows for shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/gemm_arguments.h"

namespace interlace {

// A tile: kGemmBlockRows x kColumns outputs; a stage of the pipeline holds 128 bytes of K of its operands.
template <class T, int kTileColumns, bool kMnMajorWeight> struct GemmTile {
  using Element = T;
  static constexpr int kColumns = kTileColumns;
  static constexpr bool kMnMajor = kMnMajorWeight;
  static constexpr bool kFloat8 = sizeof(T) == 1;
  using Out = std::conditional_t<kFloat8, BFloat16, T>;
  static constexpr int kStageDepth = kStageRowBytes / static_cast<int>(sizeof(T));
  static constexpr uint32_t kXBytes = kGemmBlockRows * kStageRowBytes;
  static constexpr uint32_t kWeightBytes = kColumns * kStageRowBytes;
  static constexpr uint32_t kStageBytes = kXBytes + kWeightBytes;
  // MN-major weights come in boxes of 64 columns
  static constexpr int kBoxColumns = kMnMajor ? kStageRowBytes / static_cast<int>(sizeof(T)) : kColumns;
  static constexpr uint32_t kBoxBytes = kWeightBytes / (kColumns / kBoxColumns);
  // 192 KiB: 4 stages of 48 KiB, or 6 of 32 KiB
  static constexpr int kStages = 196608 / kStageBytes;
  static constexpr int kAccumulators = kColumns / 2;  // of a thread: 64 rows x kColumns over 128 threads

  static_assert(kColumns == 128 || kColumns == 256, "the shapes of wgmma that are used");
  static_assert(!(kFloat8 && kMnMajor), "wgmma reads fp8 K-major only");
  static_assert(!kFloat8 || kColumns == 128, "fp8 needs a second set of accumulators");
};

}  // namespace interlace
