// The operands of a GEMM, checked, as the kernels take them; and which mainloop multiplies them.
#pragma once

#include "cuda/host/budget.h"
#include "cuda/host/tensor_map.h"
#include "cuda/host/tensors.h"
#include "cuda/kernels/gemm_arguments.h"

namespace interlace {

// As an op gets them. xs: one for all weights, or (summed) one for each.
struct GemmOperands {
  const Tensors& xs;
  const Tensors& weights;
  const OptionalTensor& x_scale;
  const OptionalTensors& weight_scales;
  bool summed;
};

enum class Mainloop { kSm80, kSm90 };

struct GemmProblem {
  const char* op = nullptr;
  GemmArguments arguments{};  // without outs, biases and residual
  GemmVariant variant{};
  Dtype out_dtype = Dtype::kBFloat16;
  Tensors tensors;  // all that were given, to find their device

  void set_outs(const Tensors& outs, int64_t rows);
  void set_biases(const OptionalTensors& biases);
  void set_residual(const OptionalTensor& residual, int64_t rows);
  int64_t columns() const { return arguments.products[0].columns; }
};

GemmProblem gemm_problem(const char* op, const GemmOperands& operands, int64_t tile_columns);

// requested: 80, 90, or 0 for the best that the device of this compute capability (90 is 9.0) and the layout allow.
// ValueError when the requested one, or any, cannot multiply this.
Mainloop choose_mainloop(const GemmProblem& problem, int64_t requested, int capability);

// What a launch needs besides the problem. The device is asked for here, after all checks of the operands.
struct LaunchPlace {
  int32_t device;
  cudaStream_t stream;
  Mainloop mainloop;
  Budget budget;
};
struct LaunchWish {
  int64_t blocks;
  int64_t comm_blocks;
  int64_t mainloop;
};
// others: multiprocessors that this launch must leave to kernels which it waits for.
LaunchPlace launch_place(const GemmProblem& problem, const LaunchWish& wish, int64_t ranks_on_device,
                         int64_t useful_blocks, int64_t others = 0);

}  // namespace interlace
