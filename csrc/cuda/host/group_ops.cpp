// Private ops about a group's memory: sizes, failures, abort, barrier.
#include <tuple>

#include "cuda/host/budget.h"
#include "cuda/host/cuda_error.h"
#include "cuda/host/failure.h"
#include "cuda/host/tensors.h"
#include "cuda/kernels/launch.h"

namespace interlace {
namespace {

int64_t device_segment_bytes(int64_t half_bytes) { return segment_bytes(half_bytes); }

std::tuple<int64_t, int64_t> device_page_layout() {
  return {sizeof(HostPage), offsetof(HostPage, failure) + offsetof(DeviceFailure, state)};
}

// Where in SegmentControl epochs are kept: first word, number of words, and so on. For tests that start near the wrap.
Sizes device_epoch_words() {
  constexpr int64_t kWord = sizeof(uint32_t);
  const auto word = [](size_t offset) { return static_cast<int64_t>(offset) / kWord; };
  return {word(offsetof(SegmentControl, arrivals)),      int64_t{kMaxBlocks} * kMaxRanks,
          word(offsetof(SegmentControl, epoch)),         1,
          word(offsetof(SegmentControl, tile_arrivals)), kMaxTileSignals * kMaxRanks};
}

HostPage& page_at(int64_t address) {
  check_value(address != 0 && address % alignof(HostPage) == 0, "device page: address ", address,
              " is not aligned to ", alignof(HostPage), " bytes");
  return *reinterpret_cast<HostPage*>(address);
}

std::tuple<int64_t, std::string> device_failure(int64_t page) {
  const DeviceFailure failure = read_failure(page_at(page));
  return {failure.state, describe_failure(failure)};
}

void device_request_abort(int64_t page) { request_abort(page_at(page)); }

// Every rank's abort word, by copies: kernels that wait see it, later ones do not begin. On a stream of its own, since
// the caller's may be stuck behind a waiting kernel; returns when the words are written.
void device_abort(INTERLACE_TAIL_PARAMETERS, int64_t device) {
  const SymmetricGroup group = group_of("abort", INTERLACE_TAIL_ARGUMENTS);
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  request_abort(*group.pages[group.first_rank]);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  const uint32_t word = 1 + static_cast<uint32_t>(group.first_rank);
  cudaError_t error = cudaSuccess;
  for (int peer = 0; peer < group.world_size && error == cudaSuccess; ++peer) {
    char* const to = group.segments[peer] + offsetof(SegmentControl, abort);
    error = cudaMemcpyAsync(to, &word, sizeof(word), cudaMemcpyHostToDevice, stream);
  }
  const cudaError_t finished = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check_cuda(error, "cudaMemcpyAsync of the abort word");
  check_cuda(finished, "cudaStreamSynchronize");
}

// ranks: how many ranks this launch plays, from `rank` on: 1, or all virtual ranks.
void device_barrier(INTERLACE_TAIL_PARAMETERS, int64_t ranks, int64_t device) {
  const GroupTail tail = INTERLACE_TAIL_ARGUMENTS;
  const SymmetricGroup group = group_of("barrier", tail);
  check_value(ranks >= 1 && rank + ranks <= tail.world_size() && (ranks == 1 || tail.ranks_on_device() > 1),
              "barrier: got ranks ", rank, " to ", rank + ranks - 1, " of ", tail.world_size(), " with ",
              tail.ranks_on_device(), " host pages; expected ranks of this device");
  const auto index = static_cast<int32_t>(device);
  const torch::stable::accelerator::DeviceGuard guard(index);
  check_cuda(launch_barrier(group, static_cast<int>(ranks), current_stream(index)), "launch of barrier");
}

// `count` addresses that lie in device memory at `address`.
Sizes device_read_addresses(int64_t address, int64_t count, int64_t device) {
  check_value(address != 0 && count >= 1 && count <= kMaxRanks, "read_addresses: got ", count,
              " addresses at ", address, "; expected 1 to ", kMaxRanks, " in device memory");
  const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
  Sizes addresses(count);
  check_cuda(cudaMemcpy(addresses.data(), reinterpret_cast<void*>(address), count * sizeof(int64_t),
                        cudaMemcpyDeviceToHost),
             "cudaMemcpy of addresses");
  return addresses;
}

int64_t device_multiprocessors(int64_t device) { return multiprocessors(static_cast<int>(device)); }

}  // namespace
}  // namespace interlace

STABLE_TORCH_LIBRARY_FRAGMENT(interlace, m) {
  m.def("_device_segment_bytes(int half_bytes) -> int");
  m.def("_device_page_layout() -> (int, int)");
  m.def("_device_epoch_words() -> int[]");
  m.def("_device_failure(int page) -> (int, str)");
  m.def("_device_request_abort(int page) -> ()");
  m.def("_device_abort(" INTERLACE_TAIL_SCHEMA ", int device) -> ()");
  m.def("_device_barrier(" INTERLACE_TAIL_SCHEMA ", int ranks, int device) -> ()");
  m.def("_device_read_addresses(int address, int count, int device) -> int[]");
  m.def("_device_multiprocessors(int device) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(interlace, CompositeExplicitAutograd, m) {
  m.impl("_device_segment_bytes", TORCH_BOX(&interlace::device_segment_bytes));
  m.impl("_device_page_layout", TORCH_BOX(&interlace::device_page_layout));
  m.impl("_device_epoch_words", TORCH_BOX(&interlace::device_epoch_words));
  m.impl("_device_failure", TORCH_BOX(&interlace::device_failure));
  m.impl("_device_request_abort", TORCH_BOX(&interlace::device_request_abort));
  m.impl("_device_abort", TORCH_BOX(&interlace::device_abort));
  m.impl("_device_barrier", TORCH_BOX(&interlace::device_barrier));
  m.impl("_device_read_addresses", TORCH_BOX(&interlace::device_read_addresses));
  m.impl("_device_multiprocessors", TORCH_BOX(&interlace::device_multiprocessors));
}
