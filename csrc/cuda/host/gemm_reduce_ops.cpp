// Private ops of gemm_reduce_scatter and gemm_all_reduce, with or without residual and RMSNorm.
#include "cuda/host/cuda_error.h"
#include "cuda/host/gemm_problem.h"
#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/fused_launch.h"
#include "cuda/kernels/gemm_plan.h"

namespace interlace {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

// What follows the sum: out and residual, or (with a norm) normalised, and out only when wanted.
struct Behind {
  const OptionalTensor& bias;
  const OptionalTensor& residual;
  const OptionalTensor& norm_weight;
  double eps;
  const OptionalTensor& out;
  const OptionalTensor& normalised;
};

void set_behind(GemmProblem& problem, const Behind& behind, int64_t rows, ReduceArguments& reduce) {
  const char* const op = problem.op;
  check_value(behind.out.has_value() || behind.normalised.has_value(), op,
              ": got neither out nor normalised; expected one of them");
  if (behind.out.has_value()) problem.set_outs({*behind.out}, rows);
  problem.set_biases({behind.bias});
  problem.set_residual(behind.residual, rows);
  check_value(behind.normalised.has_value() || !behind.norm_weight.has_value(), op,
              ": got norm_weight without normalised; expected where the norm goes");
  if (!behind.normalised.has_value()) return;
  check_value(behind.eps >= 0, op, ": eps is ", behind.eps, "; expected 0 or more");
  check_dtype(op, "normalised", *behind.normalised, problem.out_dtype);
  const Matrix normalised = matrix_of(op, "normalised", *behind.normalised, rows, problem.columns());
  reduce.normalised = normalised.data;
  reduce.normalised_stride = normalised.stride;
  reduce.eps = static_cast<float>(behind.eps);
  problem.tensors.push_back(*behind.normalised);
  if (behind.norm_weight.has_value()) {
    check_dtype(op, "norm_weight", *behind.norm_weight, problem.out_dtype);
    reduce.norm_weight = vector_of(op, "norm_weight", *behind.norm_weight, problem.columns());
    problem.tensors.push_back(*behind.norm_weight);
  }
}

// rows: of every rank (reduce-scatter), or null.
ReduceSchedule schedule_of(const GemmArguments& arguments, const Sizes* rows, int64_t world_size,
                           int64_t rank, int32_t tile_columns) {
  if (rows == nullptr) {
    return all_reduce_schedule(arguments, static_cast<int>(world_size), static_cast<int>(rank), tile_columns);
  }
  return reduce_scatter_schedule(arguments, shards_of(rows->data(), static_cast<int>(world_size)),
                                 static_cast<int>(rank), tile_columns);
}

struct ReduceWish {
  bool float32_wire;
  bool use_multicast;
  LaunchWish launch;
};

void run(GemmProblem& problem, ReduceArguments& reduce, const GroupTail& tail, const SymmetricGroup& group,
         const Sizes* rows, const ReduceWish& wish) {
  const char* const op = problem.op;
  const GemmArguments& arguments = problem.arguments;
  check_value(!wish.use_multicast || tail.multicast != 0, op,
              ": use_multicast without a multicast address; this workspace has none");
  reduce.float32_wire = wish.float32_wire;
  reduce.multicast = wish.use_multicast;
  reduce.schedule = schedule_of(arguments, rows, tail.world_size(), tail.rank, problem.variant.tile_columns);
  check_value(reduce.schedule.fits(), op, ": ", arguments.rows, " rows need more signals than there are (",
              kMaxTileSignals, "); cut x by rows");
  const int64_t out_bytes = dtype_size(problem.out_dtype);
  const int64_t wire_bytes = wish.float32_wire ? kFloatBytes : out_bytes;
  check_half(op, tail,
             reduce.schedule.half_bytes(reduce.multicast, problem.columns(), wire_bytes, out_bytes));
  if (arguments.rows == 0) {
    common_device(op, problem.tensors);
    return;
  }
  const int64_t useful = reduce.schedule.tiles() + wish.launch.comm_blocks;
  const LaunchPlace place = launch_place(problem, wish.launch, tail.ranks_on_device(), useful);
  if (place.mainloop == Mainloop::kSm80) {
    check_value(!wish.use_multicast, op,
                ": use_multicast needs the sm_90 mainloop, which cannot multiply this");
    problem.variant.tile_columns = 128;
    reduce.schedule = schedule_of(arguments, rows, tail.world_size(), tail.rank, 128);
  }
  reduce.comm_blocks = place.budget.comm_blocks;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  if (place.mainloop == Mainloop::kSm90) {
    TensorMapRequest requests[kTensorMaps];
    tensor_map_plan(arguments, problem.variant, {}, requests);
    check_cuda(launch_gemm_reduce_sm90(group, arguments, reduce, encode_maps(requests), problem.variant,
                                       place.budget.blocks, place.stream),
               "launch of the GEMM with a reduction");
    return;
  }
  check_cuda(
      launch_gemm_reduce_sm80(group, arguments, reduce, problem.variant, place.budget.blocks, place.stream),
      "launch of the GEMM with a reduction");
}

void device_gemm_reduce_scatter(Tensors xs, Tensors weights, OptionalTensor bias, OptionalTensor residual,
                                OptionalTensor norm_weight, double eps, OptionalTensor x_scale,
                                OptionalTensors weight_scales, OptionalTensor out, OptionalTensor normalised,
                                Sizes rows, bool float32_wire, bool use_multicast, INTERLACE_TAIL_PARAMETERS,
                                int64_t tile_columns, int64_t blocks, int64_t comm_blocks, int64_t mainloop) {
  constexpr const char* kOp = "gemm_reduce_scatter";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  check_rows(kOp, rows, tail.world_size());
  GemmProblem problem = gemm_problem(kOp, {xs, weights, x_scale, weight_scales, true}, tile_columns);
  int64_t total = 0;
  for (const int64_t count : rows) total += count;
  check_value(problem.arguments.rows == total, kOp, ": x has ", problem.arguments.rows, " rows; expected ",
              total, ", the sum of rows ", list_text(rows));
  ReduceArguments reduce{};
  set_behind(problem, {bias, residual, norm_weight, eps, out, normalised}, rows[rank], reduce);
  run(problem, reduce, tail, group, &rows, {float32_wire, use_multicast, {blocks, comm_blocks, mainloop}});
}

void device_gemm_all_reduce(Tensors xs, Tensors weights, OptionalTensor bias, OptionalTensor residual,
                            OptionalTensor norm_weight, double eps, OptionalTensor x_scale,
                            OptionalTensors weight_scales, OptionalTensor out, OptionalTensor normalised,
                            bool float32_wire, bool use_multicast, INTERLACE_TAIL_PARAMETERS,
                            int64_t tile_columns, int64_t blocks, int64_t comm_blocks, int64_t mainloop) {
  constexpr const char* kOp = "gemm_all_reduce";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  GemmProblem problem = gemm_problem(kOp, {xs, weights, x_scale, weight_scales, true}, tile_columns);
  ReduceArguments reduce{};
  set_behind(problem, {bias, residual, norm_weight, eps, out, normalised}, problem.arguments.rows, reduce);
  run(problem, reduce, tail, group, nullptr, {float32_wire, use_multicast, {blocks, comm_blocks, mainloop}});
}

// rows: of every rank for reduce-scatter; one number, of x, for all-reduce. Half of what a segment needs for staging.
int64_t half_bytes_gemm_reduce(Sizes rows, int64_t world_size, bool scatter, int64_t columns,
                               int64_t out_bytes, bool float32_wire, bool use_multicast) {
  constexpr const char* kOp = "gemm_reduce";
  check_value(world_size >= 1 && world_size <= kMaxRanks, kOp, ": got ", world_size, " ranks; expected 1 to ",
              kMaxRanks);
  check_rows(kOp, rows, scatter ? world_size : 1);
  GemmArguments arguments{};
  arguments.rows = rows[0];
  arguments.count = 1;
  arguments.summed = true;
  arguments.products[0].columns = columns;
  const ReduceSchedule schedule =
      schedule_of(arguments, scatter ? &rows : nullptr, world_size, 0, /*tile_columns=*/128);
  return schedule.half_bytes(use_multicast, columns, float32_wire ? kFloatBytes : out_bytes, out_bytes);
}

}  // namespace
}  // namespace interlace

#define INTERLACE_REDUCE_SCHEMA                                                                              \
  "(Tensor[] xs, Tensor[] weights, Tensor? bias, Tensor? residual, Tensor? norm_weight, float eps, Tensor? " \
  "x_scale, Tensor?[] weight_scales, Tensor(a!)? out, Tensor(b!)? normalised, "
#define INTERLACE_REDUCE_SCHEMA_END                               \
  "bool float32_wire, bool use_multicast, " INTERLACE_TAIL_SCHEMA \
  ", int tile_columns, int blocks, int comm_blocks, int mainloop=0) -> ()"

STABLE_TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def("_device_gemm_reduce_scatter" INTERLACE_REDUCE_SCHEMA "int[] rows, " INTERLACE_REDUCE_SCHEMA_END);
  m.def("_device_gemm_all_reduce" INTERLACE_REDUCE_SCHEMA INTERLACE_REDUCE_SCHEMA_END);
  m.def(
      "_device_half_bytes_gemm_reduce(int[] rows, int world_size, bool scatter, int columns, int out_bytes, "
      "bool float32_wire, bool use_multicast) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("_device_gemm_reduce_scatter", TORCH_BOX(&interlace::device_gemm_reduce_scatter));
  m.impl("_device_gemm_all_reduce", TORCH_BOX(&interlace::device_gemm_all_reduce));
  m.impl("_device_half_bytes_gemm_reduce", TORCH_BOX(&interlace::half_bytes_gemm_reduce));
}
