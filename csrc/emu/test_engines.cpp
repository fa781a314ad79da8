// The asynchronous engines of sm_90a: bulk copies, mbarriers and wgmma do what the device does, whatever the order in
// which they complete, and a kernel that forgets a wait or a fence is caught.
#include "cuda/kernels/descriptor.h"
#include "cuda/kernels/device_sm90.cuh"
#include "emu/misuse_testing.h"

namespace interlace::emu {
namespace {

constexpr int kStages = 2;
constexpr int kBoxColumns = 64;  // 128 bytes
constexpr int kRowsA = 64, kRowsB = 128;
constexpr uint32_t kBytesA = kRowsA * 128, kBytesB = kRowsB * 128, kStageBytes = kBytesA + kBytesB;
constexpr uint32_t kConsumers = 128;

// What the ring below forgets.
enum class Bug {
  kNone,
  kNoFullWait,
  kNoEmptyWait,
  kReleasedEarly,
  kNoWait,
  kNoProductFence,
  kNoProxyFence,
  kNotShown,
  kTooManyBytes,
  kTooManyArrivals,
  kWrongStride,
  kReservedBits,
  kWarpsDiffer,
  kLeftRunning,
};

struct RingShared {
  char stages[kStages][kStageBytes];
  uint64_t full[kStages], empty[kStages];
};

struct RingArguments {
  TensorMap a, b;
  int steps;  // of 64 columns
  float* out;  // [64, 128]
  const uint32_t* signal;  // 7 when a is there
  Bug bug;
};

// One warp keeps the ring filled.
inline void produce(const RingArguments& arguments, RingShared& shared) {
  while (ptx::ld_acquire_sys_u32(arguments.signal) != 7) ptx::nanosleep_u32(20);
  if (arguments.bug != Bug::kNoProxyFence) ptx::fence_proxy_async_global();
  for (int step = 0; step < arguments.steps; ++step) {
    const int stage = step % kStages;
    const uint32_t full = ptx::shared_address(&shared.full[stage]);
    const uint32_t at = ptx::shared_address(shared.stages[stage]);
    if (arguments.bug != Bug::kNoEmptyWait) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.empty[stage]), (step / kStages + 1) & 1);
    }
    ptx::mbarrier_arrive_expect_tx(full, kStageBytes + (arguments.bug == Bug::kTooManyBytes ? 16 : 0));
    if (arguments.bug == Bug::kTooManyArrivals) ptx::mbarrier_arrive(full);
    ptx::cp_async_bulk_tensor_2d(at, arguments.a, step * kBoxColumns, 0, full);
    ptx::cp_async_bulk_tensor_2d(at + kBytesA, arguments.b, step * kBoxColumns, 0, full);
  }
}

inline void multiply_stage(const RingArguments& arguments, uint32_t at, float (&d)[64], bool first) {
  for (uint32_t k = 0; k < 4; ++k) {
    uint64_t a = k_major_descriptor(at + 32 * k);
    const uint64_t b = k_major_descriptor(at + kBytesA + 32 * k);
    if (arguments.bug == Bug::kWrongStride) a = matrix_descriptor(at + 32 * k, 16, 512);
    if (arguments.bug == Bug::kReservedBits) a |= 1ull << 53;
    if (arguments.bug == Bug::kWarpsDiffer && ptx::tid_x() >= 32) a += descriptor_step(32);
    ptx::wgmma_m64n128k16_bf16<0>(d, a, b, !first || k > 0);
  }
}

inline void consume(const RingArguments& arguments, RingShared& shared) {
  float d[64];
  for (float& element : d) element = 1e9f;  // overwritten by the first product
  for (int step = 0; step < arguments.steps; ++step) {
    const int stage = step % kStages;
    const uint32_t empty = ptx::shared_address(&shared.empty[stage]);
    if (arguments.bug != Bug::kNoFullWait) {
      ptx::mbarrier_wait(ptx::shared_address(&shared.full[stage]), step / kStages & 1);
    }
    if (arguments.bug != Bug::kNoProductFence) ptx::wgmma_fence();
    multiply_stage(arguments, ptx::shared_address(shared.stages[stage]), d, step == 0);
    ptx::wgmma_commit_group();
    const bool early = arguments.bug == Bug::kReleasedEarly;
    if (early && ptx::tid_x() % 32 == 0) ptx::mbarrier_arrive(empty);
    if (early) ptx::bar_sync(1, kConsumers);  // time for the producer
    if (arguments.bug != Bug::kNoWait && arguments.bug != Bug::kLeftRunning) ptx::wgmma_wait_group<0>();
    if (!early && ptx::tid_x() % 32 == 0) ptx::mbarrier_arrive(empty);
  }
  const uint32_t row = ptx::tid_x() / 32 * 16 + ptx::tid_x() % 32 / 4, column = ptx::tid_x() % 4 * 2;
  for (uint32_t i = 0; i < 64; ++i) {
    arguments.out[(row + i % 4 / 2 * 8) * kRowsB + column + i / 4 * 8 + i % 2] = d[i];
  }
  if (arguments.bug == Bug::kNoWait) ptx::wgmma_wait_group<0>();
}

inline void ring_kernel(const RingArguments& arguments) {
  INTERLACE_DYNAMIC_SHARED(memory);
  RingShared& shared = *reinterpret_cast<RingShared*>(memory);
  if (ptx::tid_x() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), kConsumers / 32);
    }
    if (arguments.bug != Bug::kNotShown) ptx::fence_mbarrier_init();
  }
  ptx::barrier_sync();
  if (ptx::tid_x() < kConsumers) {
    consume(arguments, shared);
  } else if (ptx::tid_x() == kConsumers) {
    produce(arguments, shared);
  }
}

float value_of(int row, int column, int factor) {
  return static_cast<float>((row * factor + column * 3) % 13 - 6);
}

std::vector<uint16_t> matrix(int rows, int columns, int stride, int factor) {
  std::vector<uint16_t> elements(rows * stride, 0x7fff);  // NaN between the rows
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < columns; ++k)
      elements[row * stride + k] = bfloat16_from_float(value_of(row, k, factor));
  }
  return elements;
}

// out[64, 128] = a[m, depth] b[n, depth]^T, where rows and columns that a and b lack are zero. A thread of its own writes
// a while the kernel waits for it, as a peer would.
void run_ring(uint64_t seed, int steps, int depth, Bug bug = Bug::kNone) {
  constexpr int kM = 50, kN = 117;
  const int stride = (depth + 7) / 8 * 8;
  World world(seed, {}, /*idle_rounds=*/2000);
  const std::vector<uint16_t> source = matrix(kM, depth, stride, 5), b = matrix(kN, depth, stride, 7);
  std::vector<uint16_t> a(source.size());
  std::vector<float> out(kRowsA * kRowsB, NAN);
  uint32_t signal = 0;
  std::thread peer([&] {
    std::copy(source.begin(), source.end(), a.begin());
    __atomic_store_n(&signal, 7, __ATOMIC_RELEASE);
  });
  {
    Device device(world, 0, {1, kConsumers + 32, sizeof(RingShared)});
    const RingArguments arguments{make_tensor_map(a.data(), depth, kM, stride, 2, kBoxColumns, kRowsA),
                                  make_tensor_map(b.data(), depth, kN, stride, 2, kBoxColumns, kRowsB),
                                  steps,
                                  out.data(),
                                  &signal,
                                  bug};
    device.launch([&] { ring_kernel(arguments); });
  }
  peer.join();
  require_finished(world);
  for (int m = 0; m < kRowsA; ++m) {
    for (int n = 0; n < kRowsB; ++n) {
      float want = 0;
      for (int k = 0; k < depth && m < kM && n < kN; ++k) want += value_of(m, k, 5) * value_of(n, k, 7);
      const float got = out[m * kRowsB + n];
      require(got == want, "element " + std::to_string(m) + ", " + std::to_string(n) + " is " +
                               std::to_string(got) + " instead of " + std::to_string(want));
    }
  }
}

void test_a_ring_multiplies(uint64_t seed) {
  run_ring(seed, 1, 9);
  run_ring(seed, 7, 7 * kBoxColumns - 5);
}

// Every bug of the ring, each shown by several seeds at most.
void test_bugs_of_the_ring_are_caught() {
  const auto ring = [](Bug bug) {
    return [bug] {
      for (uint64_t seed = 1; seed <= 4; ++seed) run_ring(seed, 5, 5 * kBoxColumns, bug);
    };
  };
  require_success("the ring", ring(Bug::kNone));
  require_caught("no wait for full", Shows::kRaceOrFailure, ring(Bug::kNoFullWait));
  require_caught("no wait for empty", Shows::kFailure, ring(Bug::kNoEmptyWait));
  require_caught("a stage released before its products end", Shows::kRaceOrFailure,
                 ring(Bug::kReleasedEarly));
  require_caught("no proxy fence", Shows::kRace, ring(Bug::kNoProxyFence));
  require_caught("a wrong stride offset", Shows::kFailure, ring(Bug::kWrongStride));
  require_caught("accumulators read before the wait", Shows::kFailure, ring(Bug::kNoWait));
  require_misuse("no wgmma_fence", "no wgmma_fence since the registers", ring(Bug::kNoProductFence));
  require_misuse("no fence_mbarrier_init", "no fence_mbarrier_init after", ring(Bug::kNotShown));
  require_misuse("too many arrivals", "all 1 threads have arrived", ring(Bug::kTooManyArrivals));
  require_misuse("reserved bits", "reserved bits or a base offset", ring(Bug::kReservedBits));
  require_misuse("warps that differ", "the warps of a warpgroup issue different products",
                 ring(Bug::kWarpsDiffer));
  require_misuse("products left running", "a wgmma is still running", ring(Bug::kLeftRunning));
  // the dump says who waits, for which phase, and what is missing
  require_misuse("too many bytes expected",
                 "rank 0 block 0 threads 0..127: waits for parity 0 of the mbarrier at",
                 ring(Bug::kTooManyBytes));
  require_misuse("too many bytes expected", "0 of 1 threads and 16 bytes still to come",
                 ring(Bug::kTooManyBytes));
}

// Boxes beyond every edge: what lies outside is zero, what lies inside comes swizzled; rows of 128 bytes or plain ones.
template <typename T> void test_boxes(uint64_t seed, int swizzle_bytes) {
  constexpr int kColumns = 300, kRows = 37, kStride = 304, kBoxRows = 24;
  const int box_columns = 128 / static_cast<int>(sizeof(T));
  std::vector<T> source(kRows * kStride, T(-1));
  for (int i = 0; i < kRows * kStride; ++i) {
    if (i % kStride < kColumns) source[i] = static_cast<T>(i % 251 + 1);
  }
  const TensorMap map = make_tensor_map(source.data(), kColumns, kRows, kStride, sizeof(T), box_columns,
                                        kBoxRows, swizzle_bytes);
  const std::vector<std::pair<int, int>> corners = {
      {0, 0}, {290, 20}, {-3, -5}, {kColumns, 0}, {128, kRows - 1}};
  const uint32_t bytes = map.box_bytes();
  std::vector<char> seen(corners.size() * bytes);
  World world(seed);
  Device device(world, 0, {1, 64, static_cast<uint32_t>(corners.size()) * bytes + 64});
  device.launch([&] {
    INTERLACE_DYNAMIC_SHARED(memory);
    const uint32_t boxes = ptx::shared_address(memory);
    const uint32_t barriers = boxes + static_cast<uint32_t>(corners.size()) * bytes;
    if (ptx::tid_x() == 0) {
      for (uint32_t i = 0; i < corners.size(); ++i) ptx::mbarrier_init(barriers + 8 * i, 1);
      ptx::fence_mbarrier_init();
      for (uint32_t i = 0; i < corners.size(); ++i) {
        ptx::mbarrier_arrive_expect_tx(barriers + 8 * i, bytes);
        ptx::cp_async_bulk_tensor_2d(boxes + i * bytes, map, corners[i].first, corners[i].second,
                                     barriers + 8 * i);
      }
    }
    ptx::barrier_sync();
    if (ptx::tid_x() < corners.size()) {
      const uint32_t i = ptx::tid_x();
      ptx::mbarrier_wait(barriers + 8 * i, 0);
      for (uint32_t at = 0; at < bytes; ++at) seen[i * bytes + at] = memory[i * bytes + at];
    }
  });
  require_finished(world);
  for (size_t i = 0; i < corners.size(); ++i) {
    for (int row = 0; row < kBoxRows; ++row) {
      for (int column = 0; column < box_columns; ++column) {
        const int x = corners[i].first + column, y = corners[i].second + row;
        const bool inside = x >= 0 && x < kColumns && y >= 0 && y < kRows;
        const T want = inside ? source[y * kStride + x] : T(0);
        size_t at = i * bytes + row * 128 + column * sizeof(T);
        if (swizzle_bytes == 128) at ^= row % 8 * 16;
        T got;
        std::memcpy(&got, &seen[at], sizeof(T));
        require(got == want, "box " + std::to_string(i) + " row " + std::to_string(row) + " column " +
                                 std::to_string(column) + ": " + std::to_string(got));
      }
    }
  }
}

// All wgmma instructions, by their layouts of b. a and b are put into shared memory by hand, where the PTX documentation
// says.
struct Format {
  Element element;
  int columns;
  bool transposed;
};

uint32_t encode(Element element, float value) {
  if (element == Element::kBf16) return bfloat16_from_float(value);
  if (element == Element::kF16) return float16_from_float(value);
  return e4m3_from_float(value);
}

INTERLACE_DEVICE void multiply(const Format& format, uint64_t a, uint64_t b, float (&d)[128]) {
  float (&half)[64] = reinterpret_cast<float (&)[64]>(d);
  const bool wide = format.columns == 256, bf16 = format.element == Element::kBf16;
  if (format.element == Element::kE4m3) return ptx::wgmma_m64n128k32_e4m3(half, a, b, 1);
  if (format.transposed) {
    if (wide)
      return bf16 ? ptx::wgmma_m64n256k16_bf16<1>(d, a, b, 1) : ptx::wgmma_m64n256k16_f16<1>(d, a, b, 1);
    return bf16 ? ptx::wgmma_m64n128k16_bf16<1>(half, a, b, 1) : ptx::wgmma_m64n128k16_f16<1>(half, a, b, 1);
  }
  if (wide)
    return bf16 ? ptx::wgmma_m64n256k16_bf16<0>(d, a, b, 1) : ptx::wgmma_m64n256k16_f16<0>(d, a, b, 1);
  return bf16 ? ptx::wgmma_m64n128k16_bf16<0>(half, a, b, 1) : ptx::wgmma_m64n128k16_f16<0>(half, a, b, 1);
}

// Two products in two groups on the same registers, which start at 1.
void test_wgmma(uint64_t seed, const Format& format) {
  const int bytes_each = format.element == Element::kE4m3 ? 1 : 2;
  const int depth = 32 / bytes_each;
  const auto a_value = [](int m, int k) { return value_of(m, k, 11); };
  const auto b_value = [](int n, int k) { return value_of(n, k, 4); };
  constexpr uint32_t kBytesOfB = 256 * 128;
  std::vector<float> out(64 * format.columns);
  World world(seed);
  Device device(world, 0, {1, kWarpgroupThreads, kBytesA + kBytesOfB});
  device.launch([&] {
    INTERLACE_DYNAMIC_SHARED(memory);
    const auto put = [&](size_t row_start, int offset, float value) {
      const size_t at = (row_start + offset) ^ (row_start / 128 % 8 * 16);
      const uint32_t bits = encode(format.element, value);
      std::memcpy(memory + at, &bits, bytes_each);
    };
    const int thread = static_cast<int>(ptx::tid_x());
    for (int k = 0; k < 2 * depth; ++k) {
      if (thread < 64) put(thread * 128, k * bytes_each, a_value(thread, k));
      for (int n = thread; n < format.columns; n += 128) {
        const size_t row = format.transposed ? n / 64 * 64 * 128 + k * 128 : n * 128;
        put(kBytesA + row, format.transposed ? n % 64 * 2 : k * bytes_each, b_value(n, k));
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::barrier_sync();
    float d[128];
    for (float& element : d) element = 1;
    const uint32_t start = ptx::shared_address(memory);
    const uint32_t step = format.transposed ? 16 * 128 : 32;
    ptx::wgmma_fence();
    for (uint32_t k = 0; k < 2; ++k) {
      const uint32_t b = start + kBytesA + k * step;
      multiply(format, k_major_descriptor(start + 32 * k),
               format.transposed ? mn_major_descriptor(b, 64 * 128) : k_major_descriptor(b), d);
      ptx::wgmma_commit_group();
    }
    ptx::wgmma_wait_group<1>();
    ptx::wgmma_wait_group<0>();
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int i = 0; i < format.columns / 2; ++i) {
      out[(row + i % 4 / 2 * 8) * format.columns + column + i / 4 * 8 + i % 2] = d[i];
    }
  });
  require_finished(world);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < format.columns; ++n) {
      float want = 1;
      for (int k = 0; k < 2 * depth; ++k) want += a_value(m, k) * b_value(n, k);
      const float got = out[m * format.columns + n];
      require(got == want, "wgmma N=" + std::to_string(format.columns) + " format " +
                               std::to_string(static_cast<int>(format.element)) +
                               (format.transposed ? " transposed" : "") + ": element " + std::to_string(m) +
                               ", " + std::to_string(n) + " is " + std::to_string(got));
    }
  }
}

void test_every_wgmma(uint64_t seed) {
  for (Element element : {Element::kBf16, Element::kF16}) {
    for (int columns : {128, 256}) {
      for (bool transposed : {false, true}) test_wgmma(seed, {element, columns, transposed});
    }
  }
  test_wgmma(seed, {Element::kE4m3, 128, false});
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  test_bugs_of_the_ring_are_caught();
  const int seeds = seeds_from(argc, argv, 4);
  for (int seed = 1; seed <= seeds; ++seed) {
    test_a_ring_multiplies(seed);
    test_boxes<uint16_t>(seed, 128);
    test_boxes<uint8_t>(seed, 128);
    test_boxes<uint16_t>(seed, 0);
    test_every_wgmma(seed);
  }
  std::printf("engines: %d seeds ok\n", seeds);
}
