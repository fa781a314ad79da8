// The Hopper mainloop: TMA brings operands into a ring of stages, wgmma multiplies them, hooks take the results.
//
// Three warpgroups. The producer (one thread of it works) fills stages, as far ahead as there are free ones, so the loads
// of the next tile overlap the stores of this one. Two consumers multiply 64 rows of the tile each.
//
//   full[s]   1 arrival + the bytes of a stage: TMA has written stage s            (release by TMA, acquire by consumers)
//   empty[s]  8 arrivals, one per consumer warp: its wgmma has read stage s        (release by warps, acquire by producer)
//
// A consumer keeps the products of one stage in flight and frees the stage before it: the tensor cores never wait for
// the bookkeeping. Both read and write of a stage go through the asynchronous proxy, so no proxy fence stands there.
#pragma once

#include "cuda/kernels/descriptor.h"
#include "cuda/kernels/device_sm90.cuh"
#include "cuda/kernels/gemm_hooks.h"
#include "cuda/kernels/gemm_store.cuh"
#include "cuda/kernels/gemm_tile.cuh"

namespace interlace {

using GemmTensorMaps = GemmTensorMapsOf<ptx::TensorMap>;

constexpr int kWarpgroupThreads = 128;
constexpr int kConsumerWarpgroups = 2;
constexpr int kConsumerThreads = kConsumerWarpgroups * kWarpgroupThreads;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kGemmThreads = kConsumerThreads + kWarpgroupThreads;
constexpr uint32_t kConsumerBarrier = 1;  // named barriers; 0 is that of the whole block, from everywhere
constexpr uint32_t kEndBarrier = 2;

// 65536 registers / 384 threads = 168. Hooks wait for peers in the producer, which takes more than 40 registers; the
// consumers hold 128 accumulators and need fewer than 216. 72 + 2 * 216 = 3 * 168.
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 72;
constexpr int kConsumerRegisters = 216;

// What a block keeps in shared memory. The stages come first: TMA's swizzle wants them aligned to 1024 bytes.
template <class Tile> struct GemmShared {
  char stages[Tile::kStages][Tile::kStageBytes];
  float chunks[kConsumerWarps][kChunkFloats];
  uint64_t full[Tile::kStages];
  uint64_t empty[Tile::kStages];
  uint32_t open[Tile::kStages];  // 0: the rows of this stage's tile did not come, do not publish it
};

// The same as the instructions address it.
template <class Tile> struct GemmRing {
  uint32_t stages;  // of stages[0]
  uint32_t full;
  uint32_t empty;
  uint32_t* open;

  explicit INTERLACE_DEVICE GemmRing(GemmShared<Tile>& shared)
      : stages(ptx::shared_address(shared.stages[0])),
        full(ptx::shared_address(shared.full)),
        empty(ptx::shared_address(shared.empty)),
        open(shared.open) {}
  INTERLACE_DEVICE uint32_t stage_at(uint32_t stage) const { return stages + stage * Tile::kStageBytes; }
  INTERLACE_DEVICE uint32_t full_at(uint32_t stage) const { return full + stage * sizeof(uint64_t); }
  INTERLACE_DEVICE uint32_t empty_at(uint32_t stage) const { return empty + stage * sizeof(uint64_t); }
};
template <class Tile> constexpr uint32_t kGemmSharedBytes = sizeof(GemmShared<Tile>);
static_assert(sizeof(GemmShared<GemmTile<BFloat16, 256, false>>) <= 227 * 1024, "what sm_90 offers a block");

// A place in the ring of stages. `phase` is the parity of the lap.
template <int kStages> struct RingPlace {
  uint32_t stage = 0;
  uint32_t phase = 0;

  INTERLACE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

INTERLACE_DEVICE int32_t stages_of(int64_t depth, int stage_depth) {
  return static_cast<int32_t>((depth + stage_depth - 1) / stage_depth);
}

// Stages of one tile: the tails of K are padded with zeros by TMA, segment by segment.
template <class Tile>
INTERLACE_DEVICE int32_t stages_of_tile(const GemmArguments& arguments, const TileWork& work) {
  if (!arguments.summed) return stages_of(arguments.products[work.product].depth, Tile::kStageDepth);
  int32_t stages = 0;
  for (int32_t p = 0; p < arguments.count; ++p) {
    stages += stages_of(arguments.products[p].depth, Tile::kStageDepth);
  }
  return stages;
}

// One thread: ask TMA for stage `step` of a segment.
template <class Tile>
INTERLACE_DEVICE void load_stage(const ptx::TensorMap& x, const ptx::TensorMap& weight, const TileWork& work,
                                 int32_t step, uint32_t x_stage, uint32_t full) {
  const uint32_t weight_stage = x_stage + Tile::kXBytes;
  const int32_t depth = step * Tile::kStageDepth;
  ptx::mbarrier_arrive_expect_tx(full, Tile::kStageBytes);
  ptx::cp_async_bulk_tensor_2d(x_stage, x, depth, work.row, full);
  if constexpr (Tile::kMnMajor) {
    INTERLACE_UNROLL
    for (int box = 0; box < Tile::kColumns / Tile::kBoxColumns; ++box) {
      ptx::cp_async_bulk_tensor_2d(weight_stage + box * Tile::kBoxBytes, weight,
                                   work.column + box * Tile::kBoxColumns, depth, full);
    }
  } else {
    ptx::cp_async_bulk_tensor_2d(weight_stage, weight, depth, work.column, full);
  }
}

// One thread of the producer.
template <class Tile, class Hooks>
INTERLACE_DEVICE void produce_tiles(const GemmTensorMaps& maps, const GemmArguments& arguments, Hooks& hooks,
                                    uint32_t block, uint32_t blocks, const GemmRing<Tile>& ring) {
  RingPlace<Tile::kStages> place;
  const int64_t tiles = hooks.tiles();
  if (block >= tiles) return;
  if (arguments.rows > 0) ptx::prefetch_tensormap(maps.x[0]);
  ptx::prefetch_tensormap(maps.weights[0]);
  for (int64_t i = block; i < tiles; i += blocks) {
    const TileWork work = hooks.tile(i);
    bool open = true;
    if constexpr (Hooks::kWaits) {
      open = hooks.ready(work);
      // the rows were written by ordinary stores, which ready acquired; TMA reads through the other proxy
      ptx::fence_proxy_async_global();
    }
    for (int32_t segment = 0; segment < arguments.segments(); ++segment) {
      const int32_t product = arguments.summed ? segment : work.product;
      const ptx::TensorMap& x = work.source == 0 ? maps.x[segment] : maps.gathered[work.source - 1];
      const int32_t steps = stages_of(arguments.products[product].depth, Tile::kStageDepth);
      for (int32_t step = 0; step < steps; ++step) {
        // acquire: the consumers' reads of this stage, one lap ago, are over. Passes in the first lap.
        ptx::mbarrier_wait(ring.empty_at(place.stage), place.phase ^ 1);
        if constexpr (Hooks::kWaits && Hooks::kPublishes) ring.open[place.stage] = open;
        load_stage<Tile>(x, maps.weights[product], work, step, ring.stage_at(place.stage),
                         ring.full_at(place.stage));
        place.advance();
      }
    }
  }
}

// c (+)= x weight^T over one stage, by a warpgroup.
template <class Tile>
INTERLACE_DEVICE void multiply_stage(float (&c)[Tile::kAccumulators], uint32_t stage, uint32_t warpgroup,
                                     bool accumulate) {
  constexpr int kSteps = 4;  // of 32 bytes of K: 16 elements of 2 bytes, 32 of 1
  constexpr uint32_t kStepBytes = kStageRowBytes / kSteps;
  // MN-major: the next 16 of K lie 16 swizzled rows on
  constexpr uint32_t kWeightStep = Tile::kMnMajor ? 16 * kSwizzleRowBytes : kStepBytes;
  const uint64_t x = k_major_descriptor(stage + warpgroup * (Tile::kXBytes / kConsumerWarpgroups));
  const uint32_t start = stage + Tile::kXBytes;
  const uint64_t weight =
      Tile::kMnMajor ? mn_major_descriptor(start, Tile::kBoxBytes) : k_major_descriptor(start);
  INTERLACE_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t a = x + descriptor_step(step * kStepBytes);
    const uint64_t b = weight + descriptor_step(step * kWeightStep);
    const int keep = accumulate || step > 0;
    if constexpr (Tile::kFloat8) {
      ptx::wgmma_m64n128k32_e4m3(c, a, b, keep);
    } else if constexpr (std::is_same_v<typename Tile::Element, BFloat16> && Tile::kColumns == 256) {
      ptx::wgmma_m64n256k16_bf16<Tile::kMnMajor>(c, a, b, keep);
    } else if constexpr (std::is_same_v<typename Tile::Element, BFloat16>) {
      ptx::wgmma_m64n128k16_bf16<Tile::kMnMajor>(c, a, b, keep);
    } else if constexpr (Tile::kColumns == 256) {
      ptx::wgmma_m64n256k16_f16<Tile::kMnMajor>(c, a, b, keep);
    } else {
      ptx::wgmma_m64n128k16_f16<Tile::kMnMajor>(c, a, b, keep);
    }
  }
}

// A consumer warp has read the stage.
template <class Tile> INTERLACE_DEVICE void release_stage(const GemmRing<Tile>& ring, uint32_t stage) {
  if (ptx::tid_x() % 32 == 0) ptx::mbarrier_arrive(ring.empty_at(stage));
}

// One warpgroup: the accumulators of one tile. Returns whether the tile may be published.
template <class Tile, bool kAsksOpen>
INTERLACE_DEVICE bool consume_tile(float (&c)[Tile::kAccumulators], int32_t steps, uint32_t warpgroup,
                                   RingPlace<Tile::kStages>& place, const GemmRing<Tile>& ring) {
  bool open = true;
  uint32_t running = 0;  // the stage whose products are in flight
  ptx::wgmma_fence();
  ptx::wgmma_registers(c);
  for (int32_t step = 0; step < steps; ++step) {
    // acquire: TMA's bytes, and `open`, are there
    ptx::mbarrier_wait(ring.full_at(place.stage), place.phase);
    if constexpr (kAsksOpen) open = ring.open[place.stage] != 0;
    ptx::wgmma_fence();
    multiply_stage<Tile>(c, ring.stage_at(place.stage), warpgroup, step > 0);
    ptx::wgmma_commit_group();
    if (step > 0) {
      ptx::wgmma_wait_group<1>();
      release_stage(ring, running);
    }
    running = place.stage;
    place.advance();
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_registers(c);
  release_stage(ring, running);
  return open;
}

// The same for fp8. The tensor cores keep fewer bits than fp32 while they accumulate, so each stage (128 of K) starts
// from zero and is added here. The other warpgroup uses the tensor cores meanwhile.
template <class Tile, bool kAsksOpen>
INTERLACE_DEVICE bool consume_float8_tile(float (&sum)[Tile::kAccumulators], int32_t steps,
                                          uint32_t warpgroup, RingPlace<Tile::kStages>& place,
                                          const GemmRing<Tile>& ring) {
  bool open = true;
  INTERLACE_UNROLL
  for (int i = 0; i < Tile::kAccumulators; ++i) sum[i] = 0.0f;
  for (int32_t step = 0; step < steps; ++step) {
    float c[Tile::kAccumulators];
    ptx::mbarrier_wait(ring.full_at(place.stage), place.phase);
    if constexpr (kAsksOpen) open = ring.open[place.stage] != 0;
    ptx::wgmma_fence();
    ptx::wgmma_registers(c);
    multiply_stage<Tile>(c, ring.stage_at(place.stage), warpgroup, false);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_registers(c);
    release_stage(ring, place.stage);
    place.advance();
    INTERLACE_UNROLL
    for (int i = 0; i < Tile::kAccumulators; ++i) sum[i] += c[i];
  }
  return open;
}

// A warp hands its 16 rows of the tile to the hooks.
template <class Tile, class Hooks>
INTERLACE_DEVICE void store_tile(const float (&c)[Tile::kAccumulators], const TileWork& work, Hooks& hooks,
                                 float* chunk) {
  const int first_row = static_cast<int>(ptx::tid_x() / 32) * kChunkRows;  // consumers are threads 0..255
  if (first_row >= work.rows) return;
  INTERLACE_UNROLL
  for (int part = 0; part < Tile::kColumns / kChunkColumns; ++part) {
    if (part * kChunkColumns >= work.columns) break;
    store_chunk(&c[part * kChunkAccumulators], work, first_row, part * kChunkColumns, hooks, chunk);
  }
}

// Threads of the consumers.
template <class Tile, class Hooks>
INTERLACE_DEVICE void consume_tiles(const GemmArguments& arguments, Hooks& hooks, uint32_t block,
                                    uint32_t blocks, const GemmRing<Tile>& ring,
                                    float (&chunks)[kConsumerWarps][kChunkFloats]) {
  constexpr bool kAsksOpen = Hooks::kWaits && Hooks::kPublishes;
  const uint32_t warpgroup = ptx::tid_x() / kWarpgroupThreads;
  RingPlace<Tile::kStages> place;
  const int64_t tiles = hooks.tiles();
  for (int64_t i = block; i < tiles; i += blocks) {
    const TileWork work = hooks.tile(i);
    const int32_t steps = stages_of_tile<Tile>(arguments, work);
    float c[Tile::kAccumulators];
    bool open;
    if constexpr (Tile::kFloat8) {
      open = consume_float8_tile<Tile, kAsksOpen>(c, steps, warpgroup, place, ring);
    } else {
      open = consume_tile<Tile, kAsksOpen>(c, steps, warpgroup, place, ring);
    }
    store_tile<Tile>(c, work, hooks, chunks[ptx::tid_x() / 32]);
    if constexpr (Hooks::kPublishes) {
      // release: the stores of all consumers are ordered before what thread 0 does next
      ptx::bar_sync(kConsumerBarrier, kConsumerThreads);
      if (ptx::tid_x() == 0 && open) hooks.stored(work);
    }
  }
}

// See gemm_hooks.h. `shared` holds GemmShared<Tile>.
template <class Tile, class Hooks>
INTERLACE_DEVICE void gemm_tiles_sm90(const GemmTensorMaps& maps, const GemmArguments& arguments,
                                      Hooks& hooks, uint32_t block, uint32_t blocks, char* memory) {
  GemmShared<Tile>& shared = *reinterpret_cast<GemmShared<Tile>*>(memory);
  const GemmRing<Tile> ring(shared);
  if (ptx::tid_x() == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      ptx::mbarrier_init(ring.full_at(stage), 1);
      ptx::mbarrier_init(ring.empty_at(stage), kConsumerWarps);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::barrier_sync();  // everybody sees initialised barriers

  // The shared memory is free again behind the last barrier. Only there the producer takes its registers back: the
  // warps that had nothing to do would otherwise take those that the consumers still wait for.
  if (ptx::tid_x() >= kConsumerThreads) {
    ptx::setmaxnreg_dec<kProducerRegisters>();
    if (ptx::tid_x() == kConsumerThreads) produce_tiles<Tile>(maps, arguments, hooks, block, blocks, ring);
    ptx::warp_sync();
    ptx::bar_sync(kEndBarrier, kGemmThreads);
    ptx::setmaxnreg_inc<kLaunchRegisters>();
  } else {
    ptx::setmaxnreg_inc<kConsumerRegisters>();
    consume_tiles<Tile>(arguments, hooks, block, blocks, ring, shared.chunks);
    // between two setmaxnreg the warps of a warpgroup must meet, also those of a block without tiles
    ptx::bar_sync(kConsumerBarrier, kConsumerThreads);
    ptx::setmaxnreg_dec<kLaunchRegisters>();
    ptx::bar_sync(kEndBarrier, kGemmThreads);
  }
}

}  // namespace interlace
