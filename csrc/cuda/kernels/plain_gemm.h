// Launch of gemm, the plain product, for host code that knows neither nvcc nor torch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/kernels/gemm_arguments.h"

namespace interlace {

// The maps hold what tensor_map_plan asks for (gemm_plan.h, which also says what is legal). `blocks`: at most so many
// multiprocessors are used.
cudaError_t launch_plain_gemm_sm90(const GemmArguments& arguments, const GemmTensorMapsOf<CUtensorMap>& maps,
                                   const GemmVariant& variant, int blocks, cudaStream_t stream);

// The same on sm_80 and later: bf16 and fp16, tiles of 128 columns; addresses and strides of any alignment.
cudaError_t launch_plain_gemm_sm80(const GemmArguments& arguments, const GemmVariant& variant, int blocks,
                                   cudaStream_t stream);

}  // namespace interlace
