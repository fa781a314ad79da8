// Ops that launch the device kernels on memory a provider has set up: symmetric memory of several GPUs, or virtual ranks
// on one. They take addresses as numbers; the public ops choose provider and algorithm.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "cuda/kernels/all_reduce_arguments.h"
#include "cuda/kernels/launch.h"

namespace interlace {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// segments: address of every rank's segment. pages: address of the host page of every rank this launch plays.
SymmetricGroup make_group(const char* op, const std::vector<int64_t>& segments,
                          const std::vector<int64_t>& pages, int64_t half_bytes, int64_t first_rank,
                          double timeout_seconds) {
  const auto world_size = static_cast<int64_t>(segments.size());
  const auto played = static_cast<int64_t>(pages.size());
  STD_TORCH_CHECK(world_size >= 1 && world_size <= kMaxRanks, op, ": expected 1 to ", kMaxRanks,
                  " segments, one per rank; got ", world_size);
  STD_TORCH_CHECK(played >= 1 && first_rank >= 0 && first_rank + played <= world_size, op, ": ranks ",
                  first_rank, " to ", first_rank + played - 1, " are not in a group of ", world_size);
  STD_TORCH_CHECK(half_bytes >= 0 && half_bytes % 16 == 0, op, ": half_bytes must be a multiple of 16, got ",
                  half_bytes);
  STD_TORCH_CHECK(timeout_seconds > 0, op, ": timeout must be positive, got ", timeout_seconds, " seconds");
  SymmetricGroup group{};
  for (int64_t rank = 0; rank < world_size; ++rank) {
    STD_TORCH_CHECK(segments[rank] != 0 && segments[rank] % 128 == 0, op, ": the segment of rank ", rank,
                    " must be aligned to 128 bytes");
    group.segments[rank] = reinterpret_cast<char*>(segments[rank]);
  }
  for (int64_t i = 0; i < played; ++i) {
    STD_TORCH_CHECK(pages[i] != 0 && pages[i] % 64 == 0, op, ": the host page of rank ", first_rank + i,
                    " must be pinned memory aligned to 64 bytes");
    group.pages[first_rank + i] = reinterpret_cast<HostPage*>(pages[i]);
  }
  group.half_bytes = half_bytes;
  group.timeout_nanoseconds = static_cast<uint64_t>(timeout_seconds * 1e9);
  group.world_size = static_cast<int32_t>(world_size);
  group.first_rank = static_cast<int32_t>(first_rank);
  return group;
}

// Blocks of all ranks on one device wait for each other, so all must be resident: at most one per multiprocessor.
void check_resident(const char* op, int64_t blocks, int64_t ranks_played, int32_t device) {
  STD_TORCH_CHECK(blocks >= 1 && blocks <= kMaxBlocks, op, ": expected 1 to ", kMaxBlocks, " blocks, got ",
                  blocks);
  int multiprocessors = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  STD_TORCH_CHECK(blocks * ranks_played <= multiprocessors, op, ": ", ranks_played, " ranks of ", blocks,
                  " blocks do not fit on ", multiprocessors, " multiprocessors at once; use fewer blocks");
}

Dtype dtype_of(const char* op, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::kFloat32;
    case ScalarType::BFloat16: return Dtype::kBFloat16;
    case ScalarType::Half: return Dtype::kFloat16;
    default: STD_TORCH_CHECK(false, op, ": expected float32, bfloat16 or float16, got another dtype");
  }
}

int64_t device_segment_bytes(int64_t half_bytes) { return segment_bytes(half_bytes); }

void device_barrier(std::vector<int64_t> segments, std::vector<int64_t> pages, int64_t first_rank,
                    double timeout, int64_t device) {
  const SymmetricGroup group = make_group("barrier", segments, pages, 0, first_rank, timeout);
  const auto index = static_cast<int32_t>(device);
  check_resident("barrier", 1, static_cast<int64_t>(pages.size()), index);
  const torch::stable::accelerator::DeviceGuard guard(index);
  STD_CUDA_CHECK(launch_barrier(group, static_cast<int>(pages.size()), current_stream(index)));
}

// inputs and outs: one tensor per rank this launch plays, all of one dtype and length on one device.
void device_one_shot_all_reduce(std::vector<Tensor> inputs, std::vector<Tensor> outs,
                                std::vector<int64_t> segments, std::vector<int64_t> pages, int64_t half_bytes,
                                int64_t first_rank, int64_t blocks, double timeout) {
  constexpr const char* kOp = "one_shot_all_reduce";
  const SymmetricGroup group = make_group(kOp, segments, pages, half_bytes, first_rank, timeout);
  STD_TORCH_CHECK(inputs.size() == pages.size() && outs.size() == pages.size(), kOp, ": expected ",
                  pages.size(), " inputs and outs, got ", inputs.size(), " and ", outs.size());
  const Dtype dtype = dtype_of(kOp, inputs[0]);
  const int32_t device = inputs[0].get_device_index();
  AllReduceArguments arguments{};
  arguments.count = inputs[0].numel();
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensor* tensor : {&inputs[i], &outs[i]}) {
      STD_TORCH_CHECK(tensor->is_contiguous() && tensor->is_cuda() && tensor->get_device_index() == device &&
                          tensor->numel() == arguments.count && dtype_of(kOp, *tensor) == dtype,
                      kOp,
                      ": all inputs and outs must be contiguous, of one dtype and length, on one device");
    }
    arguments.inputs[i] = inputs[i].const_data_ptr();
    arguments.outs[i] = outs[i].mutable_data_ptr();
  }
  STD_TORCH_CHECK(arguments.count * dtype_size(dtype) <= half_bytes, kOp, ": ",
                  arguments.count * dtype_size(dtype), " bytes do not fit into a half of ", half_bytes,
                  "; set up larger segments");
  check_resident(kOp, blocks, static_cast<int64_t>(pages.size()), device);
  const torch::stable::accelerator::DeviceGuard guard(device);
  STD_CUDA_CHECK(launch_one_shot_all_reduce(group, static_cast<int>(pages.size()), arguments, dtype,
                                            static_cast<int>(blocks), current_stream(device)));
}

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def("_device_segment_bytes(int half_bytes) -> int");
  m.def("_device_barrier(int[] segments, int[] pages, int first_rank, float timeout, int device) -> ()");
  m.def(
      "_device_one_shot_all_reduce(Tensor[] inputs, Tensor(a!)[] outs, int[] segments, int[] pages, "
      "int half_bytes, int first_rank, int blocks, float timeout) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("_device_segment_bytes", TORCH_BOX(&interlace::device_segment_bytes));
  m.impl("_device_barrier", TORCH_BOX(&interlace::device_barrier));
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CUDA, m) {
  m.impl("_device_one_shot_all_reduce", TORCH_BOX(&interlace::device_one_shot_all_reduce));
}
