// Private op of the plain GEMM.
#include "cuda/host/cuda_error.h"
#include "cuda/host/gemm_problem.h"
#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/gemm_plan.h"
#include "cuda/kernels/plain_gemm.h"

namespace interlace {
namespace {

void device_gemm(Tensors xs, Tensors weights, OptionalTensors biases, OptionalTensor residual,
                 OptionalTensor x_scale, OptionalTensors weight_scales, Tensors outs, bool summed,
                 int64_t tile_columns, int64_t blocks, int64_t mainloop) {
  GemmProblem problem = gemm_problem("gemm", {xs, weights, x_scale, weight_scales, summed}, tile_columns);
  GemmArguments& arguments = problem.arguments;
  problem.set_outs(outs, arguments.rows);
  problem.set_biases(biases);
  problem.set_residual(residual, arguments.rows);
  const int64_t tiles =
      ceil_div(arguments.rows, kGemmBlockRows) * out_columns(arguments, problem.variant.tile_columns).tiles();
  if (arguments.rows == 0) {
    common_device(problem.op, problem.tensors);
    return;
  }
  const LaunchPlace place = launch_place(problem, {blocks, 0, mainloop}, 1, tiles);
  const torch::stable::accelerator::DeviceGuard guard(place.device);
  if (place.mainloop == Mainloop::kSm90) {
    TensorMapRequest requests[kTensorMaps];
    tensor_map_plan(arguments, problem.variant, {}, requests);
    check_cuda(launch_plain_gemm_sm90(arguments, encode_maps(requests), problem.variant, place.budget.blocks,
                                      place.stream),
               "launch of gemm");
  } else {
    problem.variant.tile_columns = 128;
    check_cuda(launch_plain_gemm_sm80(arguments, problem.variant, place.budget.blocks, place.stream),
               "launch of gemm");
  }
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def(
      "_device_gemm(Tensor[] xs, Tensor[] weights, Tensor?[] biases, Tensor? residual, Tensor? x_scale, "
      "Tensor?[] weight_scales, Tensor(a!)[] outs, bool summed, int tile_columns, int blocks, int "
      "mainloop=0) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("_device_gemm", TORCH_BOX(&interlace::device_gemm));
}
