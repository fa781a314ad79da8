// Instructions one by one: cp.async, ldmatrix, mma, multimem, setmaxnreg, named barriers; right uses give what the device
// gives, wrong ones are caught.
#include <sys/mman.h>

#include "cuda/kernels/device_sm80.cuh"
#include "cuda/kernels/device_sm90.cuh"
#include "emu/misuse_testing.h"

namespace interlace::emu {
namespace {

// Runs `kernel` on one block; ends the program when it hangs.
void run_block(uint64_t seed, Shape shape, const std::function<void()>& kernel) {
  World world(seed, {}, /*idle_rounds=*/1000);
  Device(world, 0, shape).launch(kernel);
  require_finished(world);
}

// What the pipeline of copies below forgets.
enum class Bug { kNone, kNoWait, kNoBarrier, kOverwritten, kLeftRunning };

// Each thread copies one 16-byte piece per round, two rounds ahead; its neighbour reads it.
void run_pipeline(uint64_t seed, Bug bug) {
  constexpr int kRounds = 6;
  constexpr uint32_t kThreads = 64, kSlots = 3, kSlotBytes = kThreads * 16;
  std::vector<ptx::Vector16> source(kRounds * kThreads);
  for (size_t i = 0; i < source.size(); ++i) source[i] = {{static_cast<uint32_t>(i), 2, 3, 0x01020304}};
  std::vector<uint32_t> seen(kRounds * kThreads * 4);
  run_block(seed, {1, kThreads, kSlots * kSlotBytes}, [&] {
    INTERLACE_DYNAMIC_SHARED(memory);
    const uint32_t thread = ptx::tid_x(), other = (thread + 33) % kThreads;
    const auto copy = [&](int round) {
      const uint32_t to = ptx::shared_address(memory) + round % kSlots * kSlotBytes + thread * 16;
      // the last threads copy less than 16 bytes, and nothing: the rest is zero
      const uint32_t valid = thread == kThreads - 1 ? 0 : thread == kThreads - 2 ? 14 : 16;
      if (round < kRounds)
        ptx::cp_async_16(to, valid > 0 ? &source[round * kThreads + thread] : nullptr, valid);
      ptx::cp_async_commit_group();
    };
    copy(0);
    copy(1);
    for (int round = 0; round < kRounds; ++round) {
      if (bug != Bug::kNoWait) ptx::cp_async_wait_group<1>();
      if (bug != Bug::kNoBarrier) ptx::barrier_sync();
      // the barrier says: everybody has read the slot of the round before, which takes the copy of the round after next
      copy(round + (bug == Bug::kOverwritten ? 3 : 2));
      const auto* words =
          reinterpret_cast<const uint32_t*>(memory + round % kSlots * kSlotBytes + other * 16);
      for (int i = 0; i < 4; ++i) seen[(round * kThreads + thread) * 4 + i] = words[i];
    }
    if (bug != Bug::kLeftRunning) ptx::cp_async_wait_group<0>();
    if (bug == Bug::kLeftRunning) ptx::cp_async_16(ptx::shared_address(memory), source.data());
  });
  for (int i = 0; i < static_cast<int>(seen.size()); ++i) {
    const uint32_t round = i / 4 / kThreads, from = (i / 4 + 33) % kThreads;
    uint32_t want = source[round * kThreads + from].words[i % 4];
    if (from == kThreads - 1) want = 0;
    if (from == kThreads - 2 && i % 4 == 3) want &= 0xffff;
    require(seen[i] == want, "word " + std::to_string(i) + " is " + std::to_string(seen[i]));
  }
}

void test_bugs_of_the_pipeline_are_caught() {
  const auto pipeline = [](Bug bug) {
    return [bug] {
      for (uint64_t seed = 1; seed <= 4; ++seed) run_pipeline(seed, bug);
    };
  };
  require_success("the pipeline", pipeline(Bug::kNone));
  require_caught("no cp_async_wait_group", Shows::kRaceOrFailure, pipeline(Bug::kNoWait));
  require_caught("no barrier after the wait", Shows::kRaceOrFailure, pipeline(Bug::kNoBarrier));
  require_caught("a slot overwritten early", Shows::kRaceOrFailure, pipeline(Bug::kOverwritten));
  require_misuse("a copy left running", "a cp.async is still on the way", pipeline(Bug::kLeftRunning));
}

int a_value(int m, int k) { return (m * 3 + k * 5) % 11 - 5; }
int b_value(int k, int n) { return (k * 7 + n * 2) % 9 - 4; }

// a row by row; b once as [n][k], loaded as it is, and once as [k][n], loaded transposed. Three warps multiply the same.
void test_ldmatrix_and_mma(uint64_t seed, Element element, bool transposed) {
  constexpr uint32_t kThreads = 96;
  const auto encode = [&](int value) {
    return element == Element::kBf16 ? bfloat16_from_float(value) : float16_from_float(value);
  };
  std::vector<float> out(kThreads / 32 * 16 * 16);
  run_block(seed, {1, kThreads, 2 * 16 * 32}, [&] {
    INTERLACE_DYNAMIC_SHARED(memory);
    auto* const a = reinterpret_cast<uint16_t*>(memory);
    auto* const b = a + 16 * 16;
    for (int i = static_cast<int>(ptx::tid_x()); i < 256; i += kThreads) {
      a[i] = encode(a_value(i / 16, i % 16));
      b[i] = encode(transposed ? b_value(i / 16, i % 16) : b_value(i % 16, i / 16));
    }
    ptx::barrier_sync();
    const uint32_t lane = ptx::tid_x() % 32, row = lane % 16, half = lane / 16 * 16;
    uint32_t of_a[4], of_b[4];
    ptx::ldmatrix_x4(ptx::shared_address(a) + row * 32 + half, of_a);
    const uint32_t at = ptx::shared_address(b) + row * 32 + half;
    if (transposed) {
      ptx::ldmatrix_x4_trans(at, of_b);  // k 0..7, 8..15 of n 0..7, then of n 8..15
    } else {
      uint32_t loaded[4];
      ptx::ldmatrix_x4(at, loaded);  // n 0..7, 8..15 of k 0..7, then of k 8..15
      of_b[0] = loaded[0], of_b[1] = loaded[2], of_b[2] = loaded[1], of_b[3] = loaded[3];
    }
    for (uint32_t side = 0; side < 2; ++side) {
      float d[4] = {1, 1, 1, 1};
      if (element == Element::kBf16) {
        ptx::mma_m16n8k16_bf16(d, of_a, of_b[2 * side], of_b[2 * side + 1]);
      } else {
        ptx::mma_m16n8k16_f16(d, of_a, of_b[2 * side], of_b[2 * side + 1]);
      }
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t m = lane / 4 + i / 2 * 8, n = side * 8 + lane % 4 * 2 + i % 2;
        out[(ptx::tid_x() / 32 * 16 + m) * 16 + n] = d[i];
      }
    }
  });
  for (int i = 0; i < static_cast<int>(out.size()); ++i) {
    float want = 1;
    for (int k = 0; k < 16; ++k) want += static_cast<float>(a_value(i / 16 % 16, k) * b_value(k, i % 16));
    require(out[i] == want, "mma: element " + std::to_string(i) + " is " + std::to_string(out[i]));
  }
}

// Three ranks' memory behind one address.
void test_multimem(uint64_t seed) {
  constexpr size_t kBytes = 4096;
  constexpr uint32_t kThreads = 32;
  alignas(16) static char memory[3][kBytes];
  char* const multicast =
      static_cast<char*>(mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (int rank = 0; rank < 3; ++rank) {
    for (uint32_t i = 0; i < kThreads * 4; ++i) {
      const float value = static_cast<float>(i % 32 + rank);
      reinterpret_cast<float*>(memory[rank])[i] = value;
      reinterpret_cast<uint32_t*>(memory[rank] + 1024)[i] = ptx::cvt_rn_bf16x2_f32(value, -value);
      reinterpret_cast<uint32_t*>(memory[rank] + 2048)[i] = ptx::cvt_rn_f16x2_f32(value, 0.5f);
    }
  }
  World world(seed);
  world.bind_multicast(multicast, kBytes, {memory[0], memory[1], memory[2]});
  Device(world, 0, {1, kThreads}).launch([&] {
    char* const place = multicast + ptx::tid_x() * 16;
    const ptx::Vector16 f32 = ptx::multimem_ld_reduce_add_f32(place);
    const ptx::Vector16 bf16 = ptx::multimem_ld_reduce_add_bf16x2(place + 1024);
    const ptx::Vector16 f16 = ptx::multimem_ld_reduce_add_f16x2(place + 2048);
    ptx::multimem_st_v4(place, f32);
    ptx::multimem_st_v4(place + 1024, bf16);
    ptx::multimem_st_v4(place + 2048, f16);
  });
  require_finished(world);
  for (int rank = 0; rank < 3; ++rank) {
    for (uint32_t i = 0; i < kThreads * 4; ++i) {
      const float sum = static_cast<float>(i % 32 * 3 + 3);
      require(reinterpret_cast<float*>(memory[rank])[i] == sum, "multimem f32 " + std::to_string(i));
      require(reinterpret_cast<uint32_t*>(memory[rank] + 1024)[i] == ptx::cvt_rn_bf16x2_f32(sum, -sum),
              "multimem bf16x2 " + std::to_string(i));
      require(reinterpret_cast<uint32_t*>(memory[rank] + 2048)[i] == ptx::cvt_rn_f16x2_f32(sum, 1.5f),
              "multimem f16x2 " + std::to_string(i));
    }
  }
  munmap(multicast, kBytes);
}

// The consumers' registers come from the producer: they wait for them.
void run_registers(uint64_t seed, bool enough) {
  run_block(seed, {1, 384}, [enough] {
    if (ptx::tid_x() >= 256) {
      if (enough) ptx::setmaxnreg_dec<40>();
    } else {
      ptx::setmaxnreg_inc<232>();
    }
  });
}

// A wait that gives up lets the thread do something else, here: arrive itself.
void test_a_try_returns(uint64_t seed) {
  int tries = 0;
  run_block(seed, {1, 32, 64}, [&tries] {
    INTERLACE_DYNAMIC_SHARED(memory);
    const uint32_t barrier = ptx::shared_address(memory);
    if (ptx::elect_sync()) {
      ptx::mbarrier_init(barrier, 1);
      require(ptx::mbarrier_try_wait_parity(barrier, 1), "the phase before the first counts as complete");
      while (!ptx::mbarrier_try_wait_parity(barrier, 0)) {
        if (++tries == 3) ptx::mbarrier_arrive(barrier);
      }
    }
  });
  require(tries >= 3, "a try that waits for ever");
}

void test_copies_and_counters(uint64_t seed) {
  std::vector<ptx::Vector16> from(64), to(64);
  for (uint32_t i = 0; i < from.size(); ++i) from[i] = {{i, i + 1, i + 2, i + 3}};
  uint32_t counter = 0;
  run_block(seed, {1, 64}, [&] {
    const uint32_t i = ptx::tid_x();
    const ptx::Vector16 value = i % 2 == 0 ? ptx::ld_nc_v4_b32(&from[i]) : ptx::ld_v4_b32(&from[i]);
    if (i % 2 == 0) ptx::st_cs_v4_b32(&to[i], value);
    if (i % 2 == 1) ptx::st_v4_b32(&to[i], value);
    ptx::red_add_release_gpu_u32(&counter, 1);
    ptx::red_add_release_sys_u32(&counter, 1);
    ptx::atom_add_relaxed_gpu_u32(&counter, 2);
    while (ptx::ld_acquire_gpu_u32(&counter) != 256) ptx::nanosleep_u32(20);
    require(to[63 - i].words[0] == 63 - i, "what came before the signal is not there");
    require(ptx::shfl_idx_u32(i, 5) == i / 32 * 32 + 5, "shfl.idx");
  });
}

// Calls that the device forbids, and the words of the refusal.
struct Call {
  const char* words;
  Shape shape;
  std::function<void(char* memory)> kernel;
};

std::vector<Call> forbidden_calls() {
  static float global[64];
  static const TensorMap map = make_tensor_map(global, 16, 4, 16, 4, 16, 4, 0);
  static int on_the_host = 0;
  const Shape shape{1, 64, 4096};
  const auto at = [](char* memory, uint32_t offset) { return ptx::shared_address(memory) + offset; };
  const auto first = [](const std::function<void()>& call) {
    if (ptx::tid_x() == 0) call();
  };
  return {
      {"bar: 40 threads", shape, [](char*) { ptx::bar_sync(1, 40); }},
      {"bar: number 16", shape, [](char*) { ptx::bar_sync(16, 64); }},
      {"expects 32 threads, another 64", shape,
       [](char*) { ptx::tid_x() < 32 ? ptx::bar_sync(1, 64) : ptx::bar_sync(1, 32); }},
      {"has no shared address", shape, [](char*) { ptx::shared_address(&on_the_host); }},
      {"is not aligned to 16", shape, [=](char* memory) { ptx::cp_async_16(at(memory, 8), global); }},
      {"cp_async_16: global address", shape,
       [=](char* memory) { ptx::cp_async_16(at(memory, 0), reinterpret_cast<char*>(global) + 4); }},
      {"16 bytes at shared address 5120", shape,
       [=](char* memory) { ptx::cp_async_16(at(memory, 4096), global); }},
      {"no mbarrier was initialized", shape, [=](char* memory) { ptx::mbarrier_arrive(at(memory, 0)); }},
      {"exists already", shape,
       [=](char* memory) {
         first([&] { ptx::mbarrier_init(at(memory, 0), 1), ptx::mbarrier_init(at(memory, 0), 1); });
       }},
      {"copies are still on the way", shape,
       [=](char* memory) {
         first([&] {
           ptx::mbarrier_init(at(memory, 0), 1);
           ptx::fence_mbarrier_init();
           for (int i = 0; i < 40; ++i)
             ptx::cp_async_bulk_tensor_2d(at(memory, 128), map, 0, 0, at(memory, 0));
         });
       }},
      {"misaligned address", shape, [](char*) { ptx::ld_v4_b32(global + 1); }},
      {"is no multicast address", shape, [](char*) { ptx::multimem_ld_reduce_add_f32(global); }},
      {"setmaxnreg_dec: 28 registers", shape, [](char*) { ptx::setmaxnreg_dec<28>(); }},
      {"setmaxnreg_inc: from 248 to 240", shape, [](char*) { ptx::setmaxnreg_inc<240>(); }},
      {"no barrier since this thread's last setmaxnreg", shape,
       [](char*) {
         ptx::setmaxnreg_dec<40>();
         ptx::setmaxnreg_dec<24>();
       }},
      {"is in no whole warpgroup", shape,
       [=](char* memory) {
         float d[64] = {};
         ptx::wgmma_fence();
         ptx::wgmma_m64n128k16_bf16<0>(d, at(memory, 0) >> 4, at(memory, 0) >> 4, 0);
       }},
      {"stack overflow", shape,
       [](char*) {
         volatile char large[kStackBytes - kStackMarkPlace];
         for (volatile char& byte : large) byte = 1;
       }},
  };
}

void test_forbidden_calls_are_refused() {
  for (const Call& call : forbidden_calls()) {
    require_misuse(call.words, call.words, [&call] {
      run_block(1, call.shape, [&call] {
        INTERLACE_DYNAMIC_SHARED(memory);
        call.kernel(memory);
      });
    });
  }
  require_misuse("bad stride", "needs a multiple of 16", [] { make_tensor_map(nullptr, 9, 9, 9, 2, 64, 8); });
  require_misuse("bad box", "rows of 64 bytes with a swizzle of 128",
                 [] { make_tensor_map(nullptr, 64, 9, 64, 2, 32, 8); });
  require_misuse("registers that nobody gives back", "waits for 64 registers",
                 [] { run_registers(1, false); });
}

// An mbarrier that the others use before they may know of it.
void test_a_barrier_used_before_it_is_shown() {
  require_caught("no barrier after mbarrier_init", Shows::kRace, [] {
    run_block(1, {1, 64, 64}, [] {
      INTERLACE_DYNAMIC_SHARED(memory);
      static uint32_t ready;
      const uint32_t barrier = ptx::shared_address(memory);
      if (ptx::tid_x() == 0) ptx::mbarrier_init(barrier, 1);
      if (ptx::tid_x() == 0) ptx::st_relaxed_sys_u32(&ready, 1);
      while (ptx::ld_relaxed_sys_u32(&ready) == 0) ptx::nanosleep_u32(20);
      if (ptx::tid_x() == 63) ptx::mbarrier_arrive(barrier);
      ptx::mbarrier_wait(barrier, 0);
    });
  });
}

}  // namespace
}  // namespace interlace::emu

int main(int argc, char** argv) {
  using namespace interlace::emu;
  test_bugs_of_the_pipeline_are_caught();
  test_forbidden_calls_are_refused();
  test_a_barrier_used_before_it_is_shown();
  const int seeds = seeds_from(argc, argv, 4);
  for (int seed = 1; seed <= seeds; ++seed) {
    run_pipeline(seed, Bug::kNone);
    for (Element element : {Element::kBf16, Element::kF16}) {
      for (bool transposed : {false, true}) test_ldmatrix_and_mma(seed, element, transposed);
    }
    test_multimem(seed);
    run_registers(seed, true);
    test_a_try_returns(seed);
    test_copies_and_counters(seed);
  }
  std::printf("instructions: %d seeds ok\n", seeds);
}
