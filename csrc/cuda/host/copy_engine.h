// All-gather by the copy engines: they push this rank's rows into every peer's staging while the multiprocessors compute.
//
//   caller's stream   barrier (odd epoch) ----> GEMM of the next epoch, waits per chunk ----> join ----> copies out
//   side stream            `-> copy, signal, copy, signal, ... (peer by peer, chunk by chunk) --^
//
// Everything is ordered by events, so it is right on any stream of the caller and inside a captured graph. After an
// abort the copies still run, the signals do not: rows that a peer was still reading in an epoch that had not failed may
// be overwritten then; that peer raises at its next call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/gather_schedule.h"
#include "cuda/kernels/segment.h"

namespace interlace {

// The rows that this rank brings: `schedule.shards.rows(schedule.rank)` of them, in device memory.
struct PushedRows {
  const char* rows = nullptr;
  int64_t stride_bytes = 0;  // between rows
  int64_t depth = 0;  // elements of a row
  int64_t element_bytes = 0;
  const char* scales = nullptr;  // a float for each row, or null

  int64_t row_bytes() const { return depth * element_bytes; }
};

// Where the gathered rows go, in the order of ranks.
struct GatheredOut {
  char* rows = nullptr;
  int64_t stride_bytes = 0;
};

// Chunks of a shard: a few, so that the first products start early and each copy is long.
constexpr int64_t kCopyChunks = 4;
int32_t copy_chunk_row_blocks(const Shards& shards, int32_t tile_rows);

// Construction launches the barrier on `stream` and the pushes beside it; `join` makes `stream` wait for the pushes.
// The destructor joins too: a capture with a stream left apart would be lost.
class CopyEngineGather {
 public:
  CopyEngineGather(const SymmetricGroup& group, const GatherSchedule& schedule, const PushedRows& pushed,
                   int device, cudaStream_t stream);
  ~CopyEngineGather();
  CopyEngineGather(const CopyEngineGather&) = delete;
  CopyEngineGather& operator=(const CopyEngineGather&) = delete;
  void join();

  // After `join`: copies the rows of all ranks to `out`, on the caller's stream.
  void collect(const GatheredOut& out);

 private:
  void push_chunk(const GatherSchedule::Push& push);
  void copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t rows,
                 cudaStream_t stream) const;

  const SymmetricGroup& group_;
  const GatherSchedule& schedule_;
  const PushedRows pushed_;
  cudaStream_t stream_;
  cudaStream_t side_;
  bool joined_ = false;
};

// out = the rows of all ranks, no kernel but barriers. Takes two epochs.
void copy_engine_all_gather(const SymmetricGroup& group, const GatherSchedule& schedule,
                            const PushedRows& pushed, const GatheredOut& out, int device,
                            cudaStream_t stream);

}  // namespace interlace
