// interlace::pack_weight and its inverse; what the engine is, for reports.
#include "cpu/brgemm.h"
#include "cpu/host.h"
#include "cpu/isa.h"

namespace interlace {
namespace {

// [N, K] of any strides -> panels [ceil(N / 64), panel] in the type the engine multiplies in.
Tensor pack_weight(const Tensor& weight) {
  const char* op = "pack_weight";
  const Dtype dtype = dtype_of(weight, op);
  check_value(weight.dim() == 2, op, ": expected a weight [N, K], got ", weight.dim(), " dims");
  check_type(has_tiles(engine(), dtype), op, ": there is no tile kernel for ", dtype_name(dtype),
             " here; leave the weight as it is");
  Tensors keep;
  const WeightView view = weight_of(weight, -1, weight.size(1), dtype, op, keep);
  const Dtype compute = compute_dtype(dtype);
  const int64_t bytes = panel_bytes(compute, view.k);
  const Sizes shape{ceil_div(view.n, kTileColumns), bytes / dtype_size(compute)};
  Tensor packed = torch::stable::empty(shape, scalar_type(compute));
  auto* out = static_cast<char*>(packed.data_ptr());
  torch::stable::parallel_for(0, shape[0], 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      pack_panel(view, panel, compute, reinterpret_cast<uint32_t*>(out + panel * bytes));
    }
  });
  return packed;
}

Tensor unpack_weight(const Tensor& packed, int64_t rows, int64_t depth) {
  const Dtype compute = dtype_of(packed, "unpack_weight");
  WeightView view;
  view.data = packed.data_ptr();
  view.n = rows;
  view.k = depth;
  view.packed = true;
  check_value(packed.dim() == 2 && packed.is_contiguous() && packed.size(0) == ceil_div(rows, kTileColumns) &&
                  packed.size(1) * dtype_size(compute) == panel_bytes(compute, depth),
              "unpack_weight: the panels do not fit rows=", rows, ", depth=", depth);
  Tensor plain = torch::stable::empty(Sizes{rows, depth}, packed.scalar_type());
  auto* out = static_cast<char*>(plain.data_ptr());
  for (int64_t panel = 0; panel < packed.size(0); ++panel) {
    unpack_panel(view, panel, compute, out + panel * kTileColumns * depth * dtype_size(compute), depth);
  }
  return plain;
}

std::tuple<std::string, bool, bool, int64_t> engine_info() {
  return {isa().name, engine().float32_tiles, engine().bfloat16_tiles, scratch_bytes()};
}

void set_isa(const std::string& name) { cap_isa(name.c_str()); }

// What choose_gemm answers, by name: for `interlace doctor`.
std::tuple<std::string, std::string> choose(const std::string& op, const std::string& dtype, int64_t rows) {
  for (const Op known : {Op::kAllGatherGemm, Op::kGemmReduceScatter, Op::kGemmAllReduce}) {
    for (const Dtype type : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16, Dtype::kFloat64}) {
      if (op != op_name(known) || dtype != dtype_name(type)) continue;
      const Choice choice = choose_gemm(known, engine(), type, rows);
      return {algorithm_name(choice.algorithm), choice.reason};
    }
  }
  fail_argument("ValueError", "choose: unknown op '", op, "' or dtype '", dtype, "'");
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_IMPL(interlace, CPU, m) {
  m.impl("pack_weight", TORCH_BOX(&interlace::pack_weight));
  m.impl("unpack_weight", TORCH_BOX(&interlace::unpack_weight));
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("engine_info", TORCH_BOX(&interlace::engine_info));
  m.impl("cap_isa", TORCH_BOX(&interlace::set_isa));
  m.impl("choose", TORCH_BOX(&interlace::choose));
}
