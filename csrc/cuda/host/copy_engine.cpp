#include "cuda/host/copy_engine.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/host/cuda_error.h"
#include "cuda/kernels/collective_launch.h"
#include "cuda/kernels/launch.h"

namespace interlace {
namespace {

// An event that only orders.
class Event {
 public:
  Event() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~Event() { cudaEventDestroy(event_); }  // what waits for it already keeps it alive
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // What is launched on `later` from now on comes after what was launched on `earlier` so far.
  void order(cudaStream_t earlier, cudaStream_t later) {
    check_cuda(cudaEventRecord(event_, earlier), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(later, event_, 0), "cudaStreamWaitEvent");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// What this thread sets up while it lives is no part of a graph that is being captured, and does not spoil it.
class OutsideCapture {
 public:
  OutsideCapture() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then what it was before
};

// The stream beside `stream`. Never destroyed: the driver may be gone when this process ends. Beyond kMost, callers share
// them, which costs overlap only: each is used between two events.
cudaStream_t side_stream(int device, cudaStream_t stream) {
  constexpr size_t kMost = 32;
  static std::mutex mutex;
  static auto& streams = *new std::map<std::pair<int, cudaStream_t>, cudaStream_t>();
  const std::lock_guard lock(mutex);
  cudaStream_t& side = streams[{device, stream}];
  if (side == nullptr && streams.size() > kMost) {
    const auto same_device = [device](const auto& entry) {
      return entry.first.first == device && entry.second != nullptr;
    };
    const auto other = std::find_if(streams.begin(), streams.end(), same_device);
    if (other != streams.end()) side = other->second;
  }
  if (side == nullptr) {
    // torch captures on a stream of its own, whose side stream is first needed then
    const OutsideCapture outside;
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_cuda(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, greatest),
               "cudaStreamCreateWithPriority");
  }
  return side;
}

char* half_zero(const SymmetricGroup& group, int rank) {
  return group.segments[rank] + sizeof(SegmentControl);
}

}  // namespace

int32_t copy_chunk_row_blocks(const Shards& shards, int32_t tile_rows) {
  int64_t most = 1;
  for (int rank = 0; rank < shards.world_size; ++rank)
    most = std::max(most, ceil_div(shards.rows(rank), tile_rows));
  return std::max(chunk_row_blocks_for(shards, tile_rows), static_cast<int32_t>(ceil_div(most, kCopyChunks)));
}

CopyEngineGather::CopyEngineGather(const SymmetricGroup& group, const GatherSchedule& schedule,
                                   const PushedRows& pushed, int device, cudaStream_t stream)
    : group_(group),
      schedule_(schedule),
      pushed_(pushed),
      stream_(stream),
      side_(side_stream(device, stream)) {
  check_cuda(launch_push_barrier(group_, stream_), "launch of the barrier before the copies");
  Event free;  // every peer's half 0 is, from here on
  free.order(stream_, side_);
  try {
    for (int64_t i = 0; i < schedule_.pushes(); ++i) push_chunk(schedule_.push(i));
  } catch (...) {
    Event end;
    end.order(side_, stream_);
    throw;
  }
}

CopyEngineGather::~CopyEngineGather() {
  try {
    join();
  } catch (...) {  // the call has failed already, or the next one on this stream will
  }
}

void CopyEngineGather::join() {
  if (joined_) return;
  joined_ = true;
  Event end;
  end.order(side_, stream_);
}

void CopyEngineGather::push_chunk(const GatherSchedule::Push& push) {
  const int rank = schedule_.rank;
  const Range rows = schedule_.rows_of_chunk(rank, push.chunk);
  const int64_t row = schedule_.staged_row(rank) + rows.begin;
  char* const half = half_zero(group_, push.peer);
  const int64_t stride = GatherSchedule::staged_row_bytes(pushed_.depth, pushed_.element_bytes);
  copy_rows(half + row * stride, stride, pushed_.rows + rows.begin * pushed_.stride_bytes,
            pushed_.stride_bytes, rows.size(), side_);
  if (pushed_.scales != nullptr && rows.size() > 0) {
    constexpr int64_t kScale = sizeof(float);
    char* const scales = half + schedule_.scales_offset(pushed_.depth, pushed_.element_bytes);
    check_cuda(cudaMemcpyAsync(scales + row * kScale, pushed_.scales + rows.begin * kScale,
                               rows.size() * kScale, cudaMemcpyDeviceToDevice, side_),
               "cudaMemcpyAsync");
  }
  check_cuda(launch_publish_chunk(group_, push.peer, push.chunk, side_), "launch of publish_chunk");
}

void CopyEngineGather::copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                                 int64_t rows, cudaStream_t stream) const {
  const int64_t bytes = pushed_.row_bytes();
  if (rows == 0 || bytes == 0) return;
  if (rows == 1 || (to_stride == bytes && from_stride == bytes)) {
    check_cuda(cudaMemcpyAsync(to, from, rows * bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
    return;
  }
  check_cuda(
      cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, rows, cudaMemcpyDeviceToDevice, stream),
      "cudaMemcpy2DAsync");
}

void CopyEngineGather::collect(const GatheredOut& out) {
  const Shards& shards = schedule_.shards;
  const int64_t stride = GatherSchedule::staged_row_bytes(pushed_.depth, pushed_.element_bytes);
  for (int source = 0; source < shards.world_size; ++source) {
    const bool own = source == schedule_.rank;
    const char* const from =
        own ? pushed_.rows : half_zero(group_, schedule_.rank) + schedule_.staged_row(source) * stride;
    copy_rows(out.rows + shards.begin(source) * out.stride_bytes, out.stride_bytes, from,
              own ? pushed_.stride_bytes : stride, shards.rows(source), stream_);
  }
}

void copy_engine_all_gather(const SymmetricGroup& group, const GatherSchedule& schedule,
                            const PushedRows& pushed, const GatheredOut& out, int device,
                            cudaStream_t stream) {
  CopyEngineGather gather(group, schedule, pushed, device, stream);
  gather.join();
  // the pushes of all ranks lie before this epoch, which is the even one
  check_cuda(launch_barrier(group, 1, stream), "launch of the barrier after the copies");
  gather.collect(out);
}

}  // namespace interlace
