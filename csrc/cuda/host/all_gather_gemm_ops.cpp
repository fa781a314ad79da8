// Private ops of all_gather_gemm and of the all-gather by copy engines.
#include <memory>

#include "cuda/host/copy_engine.h"
#include "cuda/host/cuda_error.h"
#include "cuda/host/gemm_problem.h"
#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/fused_launch.h"
#include "cuda/kernels/gemm_plan.h"

namespace interlace {
namespace {

constexpr int32_t kTileRows = kGemmBlockRows;

GatherSchedule rows_schedule(const Sizes& rows, int64_t rank) {
  GatherSchedule schedule;
  schedule.shards = shards_of(rows.data(), static_cast<int>(rows.size()));
  schedule.rank = static_cast<int32_t>(rank);
  schedule.tile_rows = kTileRows;
  schedule.chunk_row_blocks = chunk_row_blocks_for(schedule.shards, kTileRows);
  return schedule;
}

int64_t half_bytes_all_gather_gemm(Sizes rows, int64_t depth, int64_t element_bytes) {
  check_rows("all_gather_gemm", rows, static_cast<int64_t>(rows.size()));
  check_value(rows.size() >= 1 && rows.size() <= kMaxRanks, "all_gather_gemm: got ", rows.size(),
              " ranks; expected 1 to ", kMaxRanks);
  return rows_schedule(rows, 0).half_bytes(depth, element_bytes);
}

void check_own_rows(const char* op, int64_t own, const Sizes& rows, int64_t rank) {
  check_value(own == rows[rank], op, ": x has ", own, " rows; expected ", rows[rank], ", rows[", rank,
              "] of ", list_text(rows));
}

PushedRows pushed_rows(const GemmArguments& arguments, Dtype dtype) {
  const int64_t size = dtype_size(dtype);
  PushedRows pushed;
  pushed.rows = static_cast<const char*>(arguments.x[0]);
  pushed.stride_bytes = arguments.x_stride[0] * size;
  pushed.depth = arguments.products[0].depth;
  pushed.element_bytes = size;
  if (arguments.row_wise) pushed.scales = reinterpret_cast<const char*>(arguments.x_scale);
  return pushed;
}

void launch(const SymmetricGroup& group, const GemmProblem& problem, const GatherArguments& gather,
            const LaunchPlace& place) {
  const GemmArguments& arguments = problem.arguments;
  if (place.mainloop == Mainloop::kSm90) {
    TensorMapRequest requests[kTensorMaps];
    const GatheredRows rows = gathered_rows(group, gather.schedule.rank, gather.schedule,
                                            arguments.products[0].depth, problem.variant.dtype);
    tensor_map_plan(arguments, problem.variant, rows, requests);
    check_cuda(launch_all_gather_gemm_sm90(group, arguments, gather, encode_maps(requests), problem.variant,
                                           place.budget.blocks, place.stream),
               "launch of all_gather_gemm");
    return;
  }
  check_cuda(launch_all_gather_gemm_sm80(group, arguments, gather, problem.variant, place.budget.blocks,
                                         place.stream),
             "launch of all_gather_gemm");
}

void device_all_gather_gemm(Tensor x, Tensors weights, OptionalTensors biases, OptionalTensor x_scale,
                            OptionalTensors weight_scales, OptionalTensor gathered, Tensors outs, Sizes rows,
                            INTERLACE_TAIL_PARAMETERS, int64_t tile_columns, int64_t blocks,
                            int64_t comm_blocks, int64_t mainloop) {
  constexpr const char* kOp = "all_gather_gemm";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  check_rows(kOp, rows, tail.world_size());
  GemmProblem problem = gemm_problem(kOp, {{x}, weights, x_scale, weight_scales, false}, tile_columns);
  GemmArguments& arguments = problem.arguments;
  check_own_rows(kOp, arguments.rows, rows, rank);
  const GatherSchedule staging = rows_schedule(rows, rank);
  const int64_t total = staging.shards.total(), depth = arguments.products[0].depth;
  problem.set_outs(outs, total);
  problem.set_biases(biases);
  Matrix gathered_out;
  if (gathered.has_value()) {
    check_dtype(kOp, "gathered", *gathered, problem.variant.dtype);
    gathered_out = matrix_of(kOp, "gathered", *gathered, total, depth);
    problem.tensors.push_back(*gathered);
  }
  const int64_t size = dtype_size(problem.variant.dtype);
  check_half(kOp, tail, staging.half_bytes(depth, size));
  check_value(
      comm_blocks > 0 || x_scale == std::nullopt || arguments.row_wise, kOp,
      ": comm_blocks=0 with one scale for all of x; expected a scale for each row, or comm_blocks > 0");
  if (total == 0) {
    common_device(kOp, problem.tensors);
    return;
  }
  const int64_t tiles =
      ceil_div(total, kTileRows) * out_columns(arguments, problem.variant.tile_columns).tiles();
  // A block of a GEMM leaves no registers and no shared memory of its multiprocessor to anybody: on a device full of them
  // the kernels that signal the copies would never start, and the peers would wait for ever.
  const int64_t for_signals = comm_blocks == 0 && tail.world_size() > 1 ? 1 : 0;
  const LaunchPlace place = launch_place(problem, {blocks, comm_blocks, mainloop}, tail.ranks_on_device(),
                                         tiles + comm_blocks, for_signals);
  if (place.mainloop == Mainloop::kSm80) problem.variant.tile_columns = 128;
  GatherArguments gather{};
  gather.schedule =
      gather_schedule(arguments, staging.shards, static_cast<int>(rank), problem.variant.tile_columns);
  gather.comm_blocks = place.budget.comm_blocks;
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  if (comm_blocks > 0) {
    gather.gathered = gathered_out.data;
    gather.gathered_stride = gathered_out.stride;
    launch(group, problem, gather, place);
    return;
  }
  gather.schedule.chunk_row_blocks = copy_chunk_row_blocks(staging.shards, kTileRows);
  CopyEngineGather copies(group, gather.schedule, pushed_rows(arguments, problem.variant.dtype), place.device,
                          place.stream);
  launch(group, problem, gather, place);
  copies.join();
  if (gathered.has_value())
    copies.collect({static_cast<char*>(gathered_out.data), gathered_out.stride * size});
}

void device_copy_engine_all_gather(Tensor x, Tensor out, Sizes rows, INTERLACE_TAIL_PARAMETERS) {
  constexpr const char* kOp = "copy_engine_all_gather";
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of(kOp, tail);
  check_rows(kOp, rows, tail.world_size());
  const Dtype dtype = dtype_of(kOp, "x", x);
  check_dtype(kOp, "out", out, dtype);
  const Matrix own = matrix_of(kOp, "x", x);
  check_own_rows(kOp, own.rows, rows, rank);
  GatherSchedule schedule = rows_schedule(rows, rank);
  const Matrix all = matrix_of(kOp, "out", out, schedule.shards.total(), own.columns);
  const int64_t size = dtype_size(dtype);
  check_half(kOp, tail, schedule.half_bytes(own.columns, size));
  schedule.chunk_row_blocks = copy_chunk_row_blocks(schedule.shards, kTileRows);
  const int32_t device = common_device(kOp, {x, out});
  if (schedule.shards.total() == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  PushedRows pushed;
  pushed.rows = static_cast<const char*>(own.data);
  pushed.stride_bytes = own.stride * size;
  pushed.depth = own.columns;
  pushed.element_bytes = size;
  copy_engine_all_gather(group, schedule, pushed, {static_cast<char*>(all.data), all.stride * size}, device,
                         current_stream(device));
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def("_device_half_bytes_all_gather_gemm(int[] rows, int depth, int element_bytes) -> int");
  m.def(
      "_device_all_gather_gemm(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? x_scale, Tensor?[] "
      "weight_scales, Tensor(a!)? gathered, Tensor(b!)[] outs, int[] rows, " INTERLACE_TAIL_SCHEMA
      ", int tile_columns, int blocks, int comm_blocks, int mainloop=0) -> ()");
  m.def("_device_copy_engine_all_gather(Tensor x, Tensor(a!) out, int[] rows, " INTERLACE_TAIL_SCHEMA
        ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("_device_half_bytes_all_gather_gemm", TORCH_BOX(&interlace::half_bytes_all_gather_gemm));
  m.impl("_device_all_gather_gemm", TORCH_BOX(&interlace::device_all_gather_gemm));
  m.impl("_device_copy_engine_all_gather", TORCH_BOX(&interlace::device_copy_engine_all_gather));
}
