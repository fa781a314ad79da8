// Launches of the fused GEMMs, for host code that knows neither nvcc nor torch.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/kernels/fused_arguments.h"

namespace interlace {

// One launch plays rank group.first_rank. `blocks`, comm blocks included, must all be resident at once: at least one
// more than comm_blocks. Halves must hold what the schedule's half_bytes says. sm_90: the maps hold what tensor_map_plan
// asks for (gemm_plan.h, which also says what is legal), with gathered_rows as the second source of a gather.
cudaError_t launch_all_gather_gemm_sm90(const SymmetricGroup& group, const GemmArguments& arguments,
                                        const GatherArguments& gather,
                                        const GemmTensorMapsOf<CUtensorMap>& maps, const GemmVariant& variant,
                                        int blocks, cudaStream_t stream);
// gemm_reduce_scatter or gemm_all_reduce, as reduce.schedule says.
cudaError_t launch_gemm_reduce_sm90(const SymmetricGroup& group, const GemmArguments& arguments,
                                    const ReduceArguments& reduce, const GemmTensorMapsOf<CUtensorMap>& maps,
                                    const GemmVariant& variant, int blocks, cudaStream_t stream);

// The same for sm_80 and later without tensor maps; bf16 and fp16, tiles of 128 columns, no multicast.
cudaError_t launch_all_gather_gemm_sm80(const SymmetricGroup& group, const GemmArguments& arguments,
                                        const GatherArguments& gather, const GemmVariant& variant, int blocks,
                                        cudaStream_t stream);
cudaError_t launch_gemm_reduce_sm80(const SymmetricGroup& group, const GemmArguments& arguments,
                                    const ReduceArguments& reduce, const GemmVariant& variant, int blocks,
                                    cudaStream_t stream);

}  // namespace interlace
