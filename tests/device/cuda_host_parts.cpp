// The parts of the CUDA host half that need no torch, against a runtime and a driver that only write down what they are
// asked: order and addresses of the copy engine's work, the cache of tensor maps, block budgets, failure texts.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/budget.h"
#include "cuda/host/copy_engine.h"
#include "cuda/host/failure.h"
#include "cuda/host/tensor_map.h"
#include "cuda/kernels/collective_launch.h"
#include "cuda/kernels/gemm_plan.h"
#include "cuda/kernels/launch.h"
#include "runtime/errors.h"

namespace {

std::vector<std::string> calls;  // what the runtime was asked, in order
int encoded = 0;
CUresult encode_result = CUDA_SUCCESS;
int failing_copy = -1;  // number of the copy that fails
int copies = 0;

std::string name_of(cudaStream_t stream) {
  return stream == reinterpret_cast<cudaStream_t>(1) ? "caller" : "side";
}

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  for (const std::string& call : calls) std::fprintf(stderr, "  %s\n", call.c_str());
  std::exit(1);
}
void require(bool condition, const std::string& text) {
  if (!condition) fail(text);
}
void require_raises(const std::function<void()>& body, const std::string& text) {
  try {
    body();
  } catch (const std::exception& error) {
    require(std::string(error.what()).find(text) != std::string::npos,
            std::string("other text: ") + error.what());
    return;
  }
  fail("nothing raised; expected: " + text);
}

CUresult CUDAAPI encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                        const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                        const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  ++encoded;
  require(rank == 2 && steps[0] == 1 && steps[1] == 1 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
              fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
          "a tensor map of another kind");
  map->opaque[0] = reinterpret_cast<cuuint64_t>(address);
  map->opaque[1] = sizes[0];
  map->opaque[2] = sizes[1];
  map->opaque[3] = strides[0];
  map->opaque[4] = box[0];
  map->opaque[5] = box[1];
  map->opaque[6] = type;
  return encode_result;
}

}  // namespace

// ---- the runtime that only writes down ----
extern "C" {
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  static intptr_t next = 100;
  *event = reinterpret_cast<cudaEvent_t>(++next);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t stream) {
  calls.push_back("record " + name_of(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
  calls.push_back("wait " + name_of(stream));
  return cudaSuccess;
}
cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;  // as torch captures
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  static intptr_t next = 1000;
  require(capture_mode == cudaStreamCaptureModeRelaxed, "a stream is set up outside of a capture");
  require(flags == cudaStreamNonBlocking && priority == -5,
          "the side stream must not wait for the default stream");
  *stream = reinterpret_cast<cudaStream_t>(++next);
  calls.push_back("create side");
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  require(capture_mode == cudaStreamCaptureModeGlobal, "the copies are part of the capture");
  if (copies++ == failing_copy) return cudaErrorInvalidValue;
  calls.push_back("copy " + std::to_string(reinterpret_cast<intptr_t>(from)) + " -> " +
                  std::to_string(reinterpret_cast<intptr_t>(to)) + " " + std::to_string(bytes) + " " +
                  name_of(stream));
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t rows, cudaMemcpyKind, cudaStream_t stream) {
  if (copies++ == failing_copy) return cudaErrorInvalidValue;
  calls.push_back("copy2d " + std::to_string(reinterpret_cast<intptr_t>(from)) + "/" +
                  std::to_string(from_pitch) + " -> " + std::to_string(reinterpret_cast<intptr_t>(to)) + "/" +
                  std::to_string(to_pitch) + " " + std::to_string(width) + "x" + std::to_string(rows) + " " +
                  name_of(stream));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrMultiProcessorCount  ? 132
                                                          : 0;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidValue"; }
const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long, cudaDriverEntryPointQueryResult* status) {
  require(std::string(symbol) == "cuTensorMapEncodeTiled" && version == 12000, "another entry point");
  *function = reinterpret_cast<void*>(&encode);
  *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}

namespace interlace {

cudaError_t launch_push_barrier(const SymmetricGroup&, cudaStream_t stream) {
  calls.push_back("push_barrier " + name_of(stream));
  return cudaSuccess;
}
cudaError_t launch_barrier(const SymmetricGroup&, int ranks, cudaStream_t stream) {
  calls.push_back("barrier " + std::to_string(ranks) + " " + name_of(stream));
  return cudaSuccess;
}
cudaError_t launch_publish_chunk(const SymmetricGroup&, int peer, int64_t chunk, cudaStream_t stream) {
  calls.push_back("publish " + std::to_string(peer) + "." + std::to_string(chunk) + " " + name_of(stream));
  return cudaSuccess;
}

namespace {

constexpr int64_t kBase = int64_t{1} << 32;  // of the segment of rank 0; the others follow at this distance
const cudaStream_t kCaller = reinterpret_cast<cudaStream_t>(1);

SymmetricGroup group_of(int world_size, int rank) {
  SymmetricGroup group{};
  for (int r = 0; r < world_size; ++r) group.segments[r] = reinterpret_cast<char*>(kBase * (r + 1));
  group.world_size = world_size;
  group.first_rank = rank;
  group.half_bytes = 1 << 20;
  return group;
}

GatherSchedule schedule_of(const std::vector<int64_t>& rows, int rank, int32_t chunk_row_blocks) {
  GatherSchedule schedule;
  schedule.shards = shards_of(rows.data(), static_cast<int>(rows.size()));
  schedule.rank = rank;
  schedule.tile_rows = 4;
  schedule.chunk_row_blocks = chunk_row_blocks;
  return schedule;
}

std::string copy2d(int64_t from, int64_t from_pitch, int64_t to, int64_t to_pitch, const char* size,
                   const char* stream) {
  return "copy2d " + std::to_string(from) + "/" + std::to_string(from_pitch) + " -> " + std::to_string(to) +
         "/" + std::to_string(to_pitch) + " " + size + " " + stream;
}

int64_t half_zero(int rank) { return kBase * (rank + 1) + static_cast<int64_t>(sizeof(SegmentControl)); }

// Rank 1 of three; 5, 6 and 0 rows of 10 elements of 2 bytes, 24 bytes apart; chunks of 4 rows.
void test_copies_go_to_half_zero_in_the_order_of_need() {
  calls.clear();
  const SymmetricGroup group = group_of(3, 1);
  const GatherSchedule schedule = schedule_of({5, 6, 0}, 1, 1);
  const PushedRows pushed{reinterpret_cast<char*>(4096), 24, 10, 2, nullptr};
  copy_engine_all_gather(group, schedule, pushed, {reinterpret_cast<char*>(8192), 20}, 0, kCaller);
  constexpr int64_t kPitch = 32;  // 20 bytes, rounded up to what TMA reads
  const int64_t own_row = 8;  // rank 0's five rows take two tiles of 4
  const int64_t to0 = half_zero(0) + own_row * kPitch, to2 = half_zero(2) + own_row * kPitch;
  const std::vector<std::string> expected = {
      "create side",
      "push_barrier caller",
      "record caller",
      "wait side",
      copy2d(4096, 24, to0, kPitch, "20x4", "side"),
      "publish 0.0 side",
      copy2d(4096 + 4 * 24, 24, to0 + 4 * kPitch, kPitch, "20x2", "side"),
      "publish 0.1 side",
      copy2d(4096, 24, to2, kPitch, "20x4", "side"),
      "publish 2.0 side",
      copy2d(4096 + 4 * 24, 24, to2 + 4 * kPitch, kPitch, "20x2", "side"),
      "publish 2.1 side",
      "record side",
      "wait caller",
      "barrier 1 caller",
      copy2d(half_zero(1), kPitch, 8192, 20, "20x5", "caller"),
      copy2d(4096, 24, 8192 + 5 * 20, 20, "20x6", "caller"),
  };
  for (size_t i = 0; i < expected.size() || i < calls.size(); ++i) {
    require(i < expected.size() && i < calls.size() && calls[i] == expected[i],
            "call " + std::to_string(i) + ": expected " + (i < expected.size() ? expected[i] : "nothing"));
  }
}

// A rank without rows copies nothing and still signals: every call must hear from every peer.
void test_an_empty_shard_is_announced() {
  calls.clear();
  const SymmetricGroup group = group_of(2, 1);
  CopyEngineGather gather(group, schedule_of({4, 0}, 1, 1), {nullptr, 0, 8, 2, nullptr}, 0, kCaller);
  gather.join();
  require(calls[3] == "publish 0.0 side" && copies > 0, "no signal of an empty shard");
  for (const std::string& call : calls) require(call.rfind("copy", 0) != 0, "copied nothing's bytes");
}

void test_scales_travel_before_the_signal() {
  calls.clear();
  const SymmetricGroup group = group_of(2, 0);
  const GatherSchedule schedule = schedule_of({4, 4}, 0, 1);
  CopyEngineGather gather(
      group, schedule, {reinterpret_cast<char*>(4096), 16, 16, 1, reinterpret_cast<char*>(512)}, 0, kCaller);
  const std::string scales =
      "copy 512 -> " + std::to_string(half_zero(1) + schedule.scales_offset(16, 1)) + " 16 side";
  require(calls[4] == scales && calls[5] == "publish 1.0 side",
          "scales are not there when the chunk is signalled");
}

// When a copy cannot be queued the side stream is still joined: a capture with a stream left apart would be lost.
void test_a_failed_copy_leaves_no_stream_apart() {
  calls.clear();
  const SymmetricGroup group = group_of(2, 0);
  failing_copy = copies;
  require_raises(
      [&] {
        CopyEngineGather gather(group, schedule_of({4, 4}, 0, 1),
                                {reinterpret_cast<char*>(4096), 16, 8, 2, nullptr}, 0, kCaller);
      },
      "failed: cudaErrorInvalidValue");
  failing_copy = -1;
  require(calls.back() == "wait caller", "the side stream was left apart");
}

void test_chunks_are_few() {
  const std::vector<int64_t> rows = {8192, 5000};
  const Shards shards = shards_of(rows.data(), 2);
  GatherSchedule schedule = schedule_of(rows, 0, copy_chunk_row_blocks(shards, 128));
  schedule.tile_rows = 128;
  require(schedule.chunks(0) == kCopyChunks && schedule.chunks(1) <= kCopyChunks, "too many signals");
}

void test_maps_are_found_by_shape_and_place() {
  TensorMapCache cache(&encode);
  encoded = 0;
  const TensorMapRequest request{reinterpret_cast<void*>(256), Dtype::kBFloat16, 64, 100, 128, 64, 128};
  const CUtensorMap first = cache.get(request);
  require(first.opaque[1] == 64 && first.opaque[2] == 100 && first.opaque[3] == 128 && first.opaque[5] == 128,
          "sizes of the map");
  cache.get(request);
  require(encoded == 1, "an equal request is encoded again");
  const auto other = [&](auto change) {
    TensorMapRequest changed = request;
    change(changed);
    const int before = encoded;
    cache.get(changed);
    require(encoded == before + 1, "another request was answered with an old map");
  };
  other([](TensorMapRequest& r) { r.address = reinterpret_cast<void*>(512); });
  other([](TensorMapRequest& r) { r.dtype = Dtype::kFloat16; });
  other([](TensorMapRequest& r) { r.inner = 63; });
  other([](TensorMapRequest& r) { r.outer = 99; });
  other([](TensorMapRequest& r) { r.outer_stride_bytes = 144; });
  other([](TensorMapRequest& r) { r.box_inner = 32; });
  other([](TensorMapRequest& r) { r.box_outer = 256; });
  for (int64_t i = 0; i < 3 * static_cast<int64_t>(TensorMapCache::kCapacity); ++i) {
    other([i](TensorMapRequest& r) {
      r.address = reinterpret_cast<void*>(1 << 20 | i << 4);
      r.outer = 7;
    });
    require(cache.size() <= TensorMapCache::kCapacity, "the cache grows without bound");
  }
  encode_result = CUDA_ERROR_INVALID_VALUE;
  require_raises([&] { cache.get({reinterpret_cast<void*>(256), Dtype::kBFloat16, 1, 2, 16, 64, 128}); },
                 "bfloat16 matrix [2, 1] with rows 16 bytes apart");
  encode_result = CUDA_SUCCESS;
}

void test_maps_of_a_gemm_lie_in_the_plan_s_order() {
  GemmArguments arguments{};
  arguments.count = 2;
  arguments.summed = true;
  arguments.rows = 100;
  for (int p = 0; p < 2; ++p) {
    arguments.x[p] = reinterpret_cast<void*>(4096 + 16 * p);
    arguments.x_stride[p] = 64;
    arguments.products[p] = {};
    arguments.products[p].weight = reinterpret_cast<void*>(8192 + 16 * p);
    arguments.products[p].columns = 40;
    arguments.products[p].depth = 64;
    arguments.products[p].stride = 64;
  }
  TensorMapRequest requests[kTensorMaps];
  tensor_map_plan(arguments, {Dtype::kBFloat16, false, 128}, {}, requests);
  const GemmTensorMaps maps = encode_maps(requests);
  require(
      maps.x[1].opaque[0] == 4112 && maps.weights[0].opaque[0] == 8192 && maps.weights[1].opaque[0] == 8208,
      "a map in another's place");
  require(maps.gathered[0].opaque[0] == 0 && maps.weights[2].opaque[0] == 0, "a map that nobody asked for");
}

void test_budgets_are_resident_or_refused() {
  require(choose_budget("op", {132, 1}, 0, 8, 1000).blocks == 132, "not all multiprocessors");
  require(choose_budget("op", {132, 8}, 0, 2, 1000).blocks == 16, "virtual ranks share them");
  require(choose_budget("op", {132, 1}, 0, 0, 5).blocks == 5, "more blocks than tiles");
  require(choose_budget("op", {132, 1}, 0, 4, 0).blocks == 5, "nobody multiplies");
  require_raises([] { choose_budget("op", {132, 4}, 34, 0, 100); },
                 "34 blocks of 4 ranks do not fit on 132 multiprocessors at once; use at most 33");
  require_raises([] { choose_budget("op", {132, 1}, 8, 8, 100); }, "comm_blocks=8 of 8 blocks leave none");
  require_raises([] { choose_budget("op", {132, 1}, -1, 0, 100); }, "expected numbers >= 0");
  require(multiprocessors(0) == 132 && compute_capability(0) == 90, "attributes");
}

void test_failures_are_told_in_words() {
  HostPage page{};
  require(read_failure(page).state == 0, "a failure out of nothing");
  page.failure = {static_cast<uint32_t>(FailureState::kTimedOut),
                  static_cast<uint32_t>(Op::kGemmAllReduce),
                  2,
                  3,
                  7,
                  11,
                  9,
                  5};
  const std::string text = describe_failure(read_failure(page));
  require(text == "gemm_all_reduce, rank 2: no answer from rank 3, chunk 5: wanted epoch 11, seen epoch 9",
          text);
  page.failure.tile = 0;
  page.failure.state = static_cast<uint32_t>(FailureState::kAborted);
  const std::string aborted = describe_failure(read_failure(page));
  require(aborted.find("rank 3 gave up") != std::string::npos && aborted.find("block 7") != std::string::npos,
          aborted);
  request_abort(page);
  require(page.abort_request == 1, "no request");
}

}  // namespace
}  // namespace interlace

int main() {
  interlace::test_copies_go_to_half_zero_in_the_order_of_need();
  interlace::test_an_empty_shard_is_announced();
  interlace::test_scales_travel_before_the_signal();
  interlace::test_a_failed_copy_leaves_no_stream_apart();
  interlace::test_chunks_are_few();
  interlace::test_maps_are_found_by_shape_and_place();
  interlace::test_maps_of_a_gemm_lie_in_the_plan_s_order();
  interlace::test_budgets_are_resident_or_refused();
  interlace::test_failures_are_told_in_words();
  std::printf("cuda host parts ok\n");
}
