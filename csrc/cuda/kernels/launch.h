// Launches of the kernels, for host code that knows neither nvcc nor torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/call.h"
#include "cuda/kernels/all_reduce_arguments.h"
#include "cuda/kernels/segment.h"

namespace interlace {

// How many ranks of the group this launch plays, from group.first_rank on: 1, or all of them as virtual ranks on one
// device. All blocks of all ranks must be resident at once: they wait for each other.
cudaError_t launch_barrier(const SymmetricGroup& group, int ranks_played, cudaStream_t stream);

// Before copy engines push: the epoch after it uses half 0 (push_barrier_kernel).
cudaError_t launch_push_barrier(const SymmetricGroup& group, cudaStream_t stream);

// `blocks` per rank, 1..kMaxBlocks and equal on all ranks; dtype fp32, bf16 or fp16.
cudaError_t launch_one_shot_all_reduce(const SymmetricGroup& group, int ranks_played,
                                       const AllReduceArguments& arguments, Dtype dtype, int blocks,
                                       cudaStream_t stream);

}  // namespace interlace
