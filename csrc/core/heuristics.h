// Which algorithm a call takes: a pure function of what all ranks know, with the reason in words.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "core/signal.h"

namespace interlace {

enum class Algorithm { kReference, kOneShot, kOwner, kInPlace, kLibrary, kTwoShot };

constexpr const char* algorithm_name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kReference: return "reference";
    case Algorithm::kOneShot: return "one_shot";
    case Algorithm::kOwner: return "owner_computes";
    case Algorithm::kInPlace: return "peers_read_in_place";
    case Algorithm::kLibrary: return "library_gemm";
    case Algorithm::kTwoShot: return "two_shot";
  }
  return "unknown";
}

struct Choice {
  Algorithm algorithm;
  const char* reason;
};

// What the processor and torch offer. Equal on all ranks: they share the host.
struct Engine {
  bool float32_tiles = false;   // torch's brgemm for fp32 works here (fp16 is widened to it)
  bool bfloat16_tiles = false;  // the same for bf16
};

// Up to this many rows of x one flag per call beats a flag per tile: measured on Zen 5, N = 1024 and 4096, K = 512 to
// 2048, two ranks. One shot / owner, time over compute only, bf16: 0.98 / 1.00 at 4 rows, 1.02 / 1.01 at 16, 1.06 / 1.02
// at 24, 1.09 / 1.03 at 64.
constexpr int64_t kOneShotRows = 8;
// all_gather_gemm: up to this many rows in all, gathering them and streaming the weight once beats a product a shard.
constexpr int64_t kGatherFirstRows = 64;
// Up to this many rows plain weights are multiplied by the dot kernel, which streams them once and packs nothing.
constexpr int64_t kDotRows = 4;
// Plain collectives: up to this many bytes everybody reads everything, one signal; beyond, everybody owns a part.
constexpr int64_t kOneShotBytes = 32 * 1024;

constexpr bool has_tiles(const Engine& engine, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
    case Dtype::kFloat16: return engine.float32_tiles;
    case Dtype::kBFloat16: return engine.bfloat16_tiles || engine.float32_tiles;
    default: return false;
  }
}

constexpr Choice choose_gemm(Op op, const Engine& engine, Dtype dtype, int64_t rows) {
  if (dtype == Dtype::kFloat64)
    return {Algorithm::kLibrary, "fp64 has no tile kernel: torch.mm, then the collective"};
  if (!has_tiles(engine, dtype)) {
    return {Algorithm::kLibrary,
            "this processor or torch has no brgemm: torch.mm in fp32, then the collective"};
  }
  if (op == Op::kAllGatherGemm) {
    return {Algorithm::kInPlace,
            "own shard first, then the peers' rows where they lie; up to 64 rows are gathered"};
  }
  if (rows <= kOneShotRows)
    return {Algorithm::kOneShot, "few rows: one flag a call, every rank sums its rows"};
  return {Algorithm::kOwner, "many rows: peers' tiles first, own tiles add the peers' partial sums"};
}

constexpr Choice choose_all_reduce(int64_t bytes) {
  if (bytes <= kOneShotBytes) return {Algorithm::kOneShot, "small: every rank reads every rank, one signal"};
  return {Algorithm::kTwoShot, "large: every rank sums a part, then reads the others' parts"};
}

}  // namespace interlace
