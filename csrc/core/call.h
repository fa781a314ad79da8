// What a rank says about the call it is in: compared between ranks at first contact, printed when ranks disagree.
#pragma once

#include <cstdint>
#include <string_view>

namespace interlace {

enum class Op : uint32_t {
  kNone,
  kAllGatherGemm,
  kGemmReduceScatter,
  kGemmAllReduce,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGemmAllReduceNorm,
  kGemmReduceScatterNorm,
  kAllGatherGemmScaled,
  kGemmReduceScatterScaled,
  kColumnGemm,
  kBarrier,
  kGrow,
  kRefused,
};

constexpr const char* op_name(Op op) {
  switch (op) {
    case Op::kAllGatherGemm: return "all_gather_gemm";
    case Op::kGemmReduceScatter: return "gemm_reduce_scatter";
    case Op::kGemmAllReduce: return "gemm_all_reduce";
    case Op::kAllReduce: return "all_reduce";
    case Op::kAllGather: return "all_gather";
    case Op::kReduceScatter: return "reduce_scatter";
    case Op::kAllToAll: return "all_to_all";
    case Op::kGemmAllReduceNorm: return "gemm_all_reduce_norm";
    case Op::kGemmReduceScatterNorm: return "gemm_reduce_scatter_norm";
    case Op::kAllGatherGemmScaled: return "all_gather_gemm_scaled";
    case Op::kGemmReduceScatterScaled: return "gemm_reduce_scatter_scaled";
    case Op::kColumnGemm: return "column_gemm";
    case Op::kBarrier: return "barrier";
    case Op::kGrow: return "workspace growth";
    case Op::kRefused: return "refused call";
    case Op::kNone: break;
  }
  return "no call";
}

// The op of that name; the sums over several products are told apart by their number of weights only.
constexpr Op op_named(std::string_view name) {
  if (name.starts_with("sum_")) name.remove_prefix(4);
  for (uint32_t i = 1; i < static_cast<uint32_t>(Op::kGrow); ++i) {
    if (name == op_name(static_cast<Op>(i))) return static_cast<Op>(i);
  }
  return Op::kNone;
}

// Integers are summed by the plain collectives only; kBytes is what is copied and never summed; fp8 is multiplied only.
enum class Dtype : uint32_t { kFloat32, kBFloat16, kFloat16, kFloat64, kInt32, kInt64, kBytes, kFloat8E4m3 };

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return "float32";
    case Dtype::kBFloat16: return "bfloat16";
    case Dtype::kFloat16: return "float16";
    case Dtype::kFloat64: return "float64";
    case Dtype::kInt32: return "int32";
    case Dtype::kInt64: return "int64";
    case Dtype::kFloat8E4m3: return "float8_e4m3fn";
    case Dtype::kBytes: break;
  }
  return "bytes";
}

constexpr int64_t dtype_size(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
    case Dtype::kInt32: return 4;
    case Dtype::kFloat64:
    case Dtype::kInt64: return 8;
    case Dtype::kBytes:
    case Dtype::kFloat8E4m3: return 1;
    default: return 2;
  }
}

constexpr int kMaxDims = 6;
constexpr int64_t kGatheredDim = -1;  // in Call::shape: each rank brings a length of its own
constexpr int64_t kAnySize = -2;  // in Call::shape: may differ between ranks

// Everything here must be equal on all ranks; what may differ (the length of a shard) travels as `extent` beside it.
struct Call {
  Op op = Op::kNone;
  Dtype dtype = Dtype::kFloat32;
  int32_t dim = 0;  // the dim that is gathered or scattered, counted from the front
  uint32_t ndim = 0;  // dims in `shape`
  int64_t shape[kMaxDims] = {};  // shape of x, leading dims beyond kMaxDims folded together
  int64_t columns = 0;  // rows of the weight (sum over weights), or bytes of the workspace for kGrow
  int64_t total = -1;  // length of the gathered dim, when the callers know it
  int64_t half_bytes = 0;  // where this rank looks for the peers' halves; set by Group::begin
  uint32_t weights = 0;  // number of weights
  uint32_t options = 0;  // bias present, gathered wanted: what changes the work

  // Multiply-xor over the fields, eight bytes a step: 64 bits, a few nanoseconds.
  constexpr uint64_t fingerprint() const {
    uint64_t hash = 14695981039346656037ull;
    auto mix = [&hash](uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 29;
    };
    mix(static_cast<uint64_t>(op) << 32 | static_cast<uint64_t>(dtype));
    mix(static_cast<uint64_t>(static_cast<uint32_t>(dim)) << 32 | ndim);
    for (uint32_t i = 0; i < ndim; ++i) mix(static_cast<uint64_t>(shape[i]));
    mix(static_cast<uint64_t>(columns));
    mix(static_cast<uint64_t>(total));
    mix(static_cast<uint64_t>(half_bytes));
    mix(static_cast<uint64_t>(weights) << 32 | options);
    return hash;
  }
};

}  // namespace interlace
