// Launches of the small-message collectives. See launch.h for ranks_played and blocks; each kernel's file says how much a
// half must hold (core/staging.h). cudaErrorInvalidValue: no instance for that dtype, or no multicast address.
#pragma once

#include <cuda_runtime_api.h>

#include "core/call.h"
#include "cuda/kernels/all_reduce_arguments.h"
#include "cuda/kernels/row_arguments.h"
#include "cuda/kernels/segment.h"
#include "cuda/kernels/shard_arguments.h"

namespace interlace {

// Sums of fp32, bf16 or fp16.
cudaError_t launch_two_shot_all_reduce(const SymmetricGroup& group, int ranks_played,
                                       const AllReduceArguments& arguments, Dtype dtype, int blocks,
                                       cudaStream_t stream);
cudaError_t launch_one_shot_all_reduce_norm(const SymmetricGroup& group, int ranks_played,
                                            const RowArguments& arguments, Dtype dtype, int blocks,
                                            cudaStream_t stream);
cudaError_t launch_two_shot_all_reduce_norm(const SymmetricGroup& group, int ranks_played,
                                            const RowArguments& arguments, Dtype dtype, int blocks,
                                            cudaStream_t stream);
cudaError_t launch_reduce_scatter(const SymmetricGroup& group, int ranks_played,
                                  const ShardArguments& arguments, Dtype dtype, int blocks,
                                  cudaStream_t stream);
cudaError_t launch_reduce_scatter_norm(const SymmetricGroup& group, int ranks_played,
                                       const RowArguments& arguments, Dtype dtype, int blocks,
                                       cudaStream_t stream);

// The same through the switch (NVLS): group.multicast is set, on all ranks alike; GPUs from sm_90 on.
cudaError_t launch_two_shot_all_reduce_multimem(const SymmetricGroup& group, int ranks_played,
                                                const AllReduceArguments& arguments, Dtype dtype, int blocks,
                                                cudaStream_t stream);
cudaError_t launch_two_shot_all_reduce_norm_multimem(const SymmetricGroup& group, int ranks_played,
                                                     const RowArguments& arguments, Dtype dtype, int blocks,
                                                     cudaStream_t stream);
cudaError_t launch_reduce_scatter_multimem(const SymmetricGroup& group, int ranks_played,
                                           const ShardArguments& arguments, Dtype dtype, int blocks,
                                           cudaStream_t stream);
cudaError_t launch_reduce_scatter_norm_multimem(const SymmetricGroup& group, int ranks_played,
                                                const RowArguments& arguments, Dtype dtype, int blocks,
                                                cudaStream_t stream);
cudaError_t launch_all_gather_multimem(const SymmetricGroup& group, int ranks_played,
                                       const ShardArguments& arguments, int64_t element_bytes, int blocks,
                                       cudaStream_t stream);

// Copies of elements of any size, in bytes.
cudaError_t launch_all_gather(const SymmetricGroup& group, int ranks_played, const ShardArguments& arguments,
                              int64_t element_bytes, int blocks, cudaStream_t stream);
cudaError_t launch_all_to_all(const SymmetricGroup& group, int ranks_played,
                              const AllToAllArguments& arguments, int64_t element_bytes, int blocks,
                              cudaStream_t stream);

// After a copy engine's push, on the same stream: chunk `chunk` of first_rank has arrived at `peer`, in the epoch after
// the last launch_push_barrier.
cudaError_t launch_publish_chunk(const SymmetricGroup& group, int peer, int64_t chunk, cudaStream_t stream);

}  // namespace interlace
