// wgmma: products that run on while the threads do. A product is done when the threads wait for its group, warp by warp;
// until then its accumulators hold rubbish, and what becomes of its operands counts.
#pragma once

#include <cstdint>

#include "emu/operand.h"

namespace interlace::emu {

constexpr uint32_t kWarpThreads = 32;
constexpr uint32_t kWarpgroupThreads = 128;

// One instruction, as every warp of a warpgroup issues it.
struct Product {
  uint64_t a, b;  // descriptors
  uint32_t columns;
  uint32_t group;  // number of commits before it
  Element element;
  bool transposed;  // b
  bool accumulate;

  INTERLACE_EMU_HIDDEN bool same_as(const Product& other) const {
    return a == other.a && b == other.b && columns == other.columns && group == other.group &&
           element == other.element && transposed == other.transposed && accumulate == other.accumulate;
  }
};

// tile[m, n] (+)= sum over k of a[k, m] * b[k, n] for 16 rows m.
#define INTERLACE_EMU_FAST __attribute__((no_sanitize_thread, optimize("O3")))
using Vector = float __attribute__((vector_size(32)));
__attribute__((always_inline)) INTERLACE_EMU_FAST inline void multiply(const float (*a)[256],
                                                                       const float (*b)[256], int depth,
                                                                       uint32_t columns, float (*tile)[256]) {
  constexpr uint32_t kLanes = 8, kRows = 4;
  for (uint32_t n = 0; n < columns; n += 2 * kLanes) {
    for (uint32_t m = 0; m < 16; m += kRows) {
      Vector sums[kRows][2];
      for (uint32_t i = 0; i < kRows; ++i) __builtin_memcpy(sums[i], &tile[m + i][n], sizeof(sums[i]));
      for (int k = 0; k < depth; ++k) {
        Vector row[2];
        __builtin_memcpy(row, &b[k][n], sizeof(row));
        for (uint32_t i = 0; i < kRows; ++i) {
          sums[i][0] += a[k][m + i] * row[0];
          sums[i][1] += a[k][m + i] * row[1];
        }
      }
      for (uint32_t i = 0; i < kRows; ++i) __builtin_memcpy(&tile[m + i][n], sums[i], sizeof(sums[i]));
    }
  }
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"), noinline)) INTERLACE_EMU_FAST inline void multiply_avx2(
    const float (*a)[256], const float (*b)[256], int depth, uint32_t columns, float (*tile)[256]) {
  multiply(a, b, depth, columns, tile);
}
#endif
__attribute__((noinline)) INTERLACE_EMU_FAST inline void multiply_portable(const float (*a)[256],
                                                                           const float (*b)[256], int depth,
                                                                           uint32_t columns,
                                                                           float (*tile)[256]) {
  multiply(a, b, depth, columns, tile);
}
using Multiply = void (*)(const float (*)[256], const float (*)[256], int, uint32_t, float (*)[256]);
inline Multiply fastest_multiply() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_avx2;
#endif
  return multiply_portable;
}

class TensorCores {
 public:
  TensorCores(const SharedMemory& shared, uint32_t threads)
      : shared_(shared),
        warps_(zeroed<Warp>((threads + kWarpThreads - 1) / kWarpThreads)),
        warp_(warps_.get()),
        groups_(zeroed<Group>((threads + kWarpgroupThreads - 1) / kWarpgroupThreads)),
        group_(groups_.get()),
        multiply_(fastest_multiply()) {}

  INTERLACE_EMU_HIDDEN void fence(uint32_t thread) { lane_of(thread).fenced = true; }
  INTERLACE_EMU_HIDDEN void commit(uint32_t thread) { ++lane_of(thread).groups; }

  // One thread issues a product into its `columns` / 2 registers d.
  INTERLACE_EMU_HIDDEN void issue(uint32_t thread, uint32_t threads, float* d, Product product) {
    Warp& warp = warp_[thread / kWarpThreads];
    const uint32_t lane = thread % kWarpThreads;
    Lane& own = warp.lanes[lane];
    product.group = own.groups;
    const uint64_t number = own.issued++;
    if (number == warp.issued) {  // the first lane to come
      if (thread / kWarpgroupThreads * kWarpgroupThreads + kWarpgroupThreads > threads) {
        misuse("wgmma: thread %u is in no whole warpgroup of 128 threads", thread);
      }
      if (number - warp.done == kDepth) misuse("wgmma: more than %u products without a wait", kDepth);
      check_group(thread, number, product);
      warp.queue[number % kDepth] = {product, accumulator_for(warp, lane, d)};
      ++warp.issued;
      note_reads(product, thread / kWarpThreads % 4);
    }
    Entry& entry = warp.queue[number % kDepth];
    if (!entry.product.same_as(product)) misuse("wgmma: the lanes of a warp issue different products");
    join(warp, lane, warp.accumulators[entry.accumulator], d, product.columns);
  }

  // All lanes of the thread's warp have come: finish all groups but the latest `keep`.
  INTERLACE_EMU_HIDDEN void finish(uint32_t thread, uint32_t keep) {
    Warp& warp = warp_[thread / kWarpThreads];
    const uint32_t committed = warp.lanes[thread % kWarpThreads].groups;
    while (warp.done < warp.issued) {
      const Entry& entry = warp.queue[warp.done % kDepth];
      if (entry.product.group + keep >= committed) break;
      run(entry, thread / kWarpThreads % 4, warp.accumulators[entry.accumulator]);
      ++warp.done;
    }
    for (uint32_t slot = 0; slot < kAccumulators; ++slot) {
      bool running = false;
      for (uint64_t i = warp.done; i < warp.issued; ++i) {
        running = running || warp.queue[i % kDepth].accumulator == slot;
      }
      if (!running && warp.accumulators[slot].columns != 0) write_back(warp, warp.accumulators[slot]);
    }
  }

  INTERLACE_EMU_HIDDEN void end(uint32_t thread) const {
    const Warp& warp = warp_[thread / kWarpThreads];
    if (warp.done != warp.issued)
      misuse("end of the kernel: a wgmma is still running; wgmma_wait_group<0> is missing");
  }

 private:
  static constexpr uint32_t kDepth = 64;
  static constexpr uint32_t kAccumulators = 4;

  struct Lane {
    uint64_t issued;  // products
    uint32_t groups;  // commits
    bool fenced;  // since its registers were its own last
  };
  // Sixteen rows of accumulators while products run on them.
  struct Accumulator {
    uint32_t columns;  // 0: not in use
    float* registers[kWarpThreads];
    float tile[16][256];
  };
  struct Entry {
    Product product;
    uint32_t accumulator;
  };
  struct Warp {
    uint64_t issued, done;
    Lane lanes[kWarpThreads];
    Entry queue[kDepth];
    Accumulator accumulators[kAccumulators];
  };
  struct Group {
    uint64_t issued;
    Product latest[kDepth];
  };

  INTERLACE_EMU_HIDDEN Lane& lane_of(uint32_t thread) {
    return warp_[thread / kWarpThreads].lanes[thread % kWarpThreads];
  }
  INTERLACE_EMU_HIDDEN void check_group(uint32_t thread, uint64_t number, const Product& product) {
    Group& group = group_[thread / kWarpgroupThreads];
    if (number == group.issued) {
      group.latest[group.issued++ % kDepth] = product;
    } else if (group.issued - number <= kDepth && !group.latest[number % kDepth].same_as(product)) {
      misuse("wgmma: the warps of a warpgroup issue different products");
    }
  }
  INTERLACE_EMU_HIDDEN static uint32_t accumulator_for(Warp& warp, uint32_t lane, const float* d) {
    uint32_t free = kAccumulators;
    for (uint32_t slot = 0; slot < kAccumulators; ++slot) {
      const Accumulator& accumulator = warp.accumulators[slot];
      if (accumulator.columns != 0 && accumulator.registers[lane] == d) return slot;
      if (accumulator.columns == 0) free = slot;
    }
    if (free == kAccumulators) misuse("wgmma: more than %u accumulators in use at once", kAccumulators);
    return free;
  }
  // The registers become the tensor core's.
  INTERLACE_EMU_HIDDEN static void join(Warp& warp, uint32_t lane, Accumulator& accumulator, float* d,
                                        uint32_t columns) {
    if (accumulator.columns != 0 && accumulator.columns != columns) {
      misuse("wgmma: products of different shapes on the same registers without a wait");
    }
    accumulator.columns = columns;
    if (accumulator.registers[lane] == d) return;
    if (accumulator.registers[lane] != nullptr) misuse("wgmma: the lanes of a warp use different registers");
    if (!warp.lanes[lane].fenced) misuse("wgmma: no wgmma_fence since the registers were last used");
    accumulator.registers[lane] = d;
    move_registers(accumulator, lane, true);
  }
  INTERLACE_EMU_HIDDEN static void move_registers(Accumulator& accumulator, uint32_t lane, bool in) {
    float* const d = accumulator.registers[lane];
    for (uint32_t i = 0; i < accumulator.columns / 2; ++i) {
      float& element = accumulator.tile[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
      if (in) {
        element = d[i];
        d[i] = __builtin_nanf("");
      } else {
        d[i] = element;
      }
    }
  }
  INTERLACE_EMU_HIDDEN static void write_back(Warp& warp, Accumulator& accumulator) {
    for (uint32_t lane = 0; lane < kWarpThreads; ++lane) {
      if (accumulator.registers[lane] == nullptr) misuse("wgmma: lane %u did not take part", lane);
      move_registers(accumulator, lane, false);
      accumulator.registers[lane] = nullptr;
      warp.lanes[lane].fenced = false;
    }
    accumulator.columns = 0;
  }

  INTERLACE_EMU_HIDDEN void note_reads(const Product& product, uint32_t part) const {
    if (!INTERLACE_EMU_TSAN) return;
    note_operand(shared_, Operand::decode(product.a, false, product.element), 16 * part, 16);
    note_operand(shared_, Operand::decode(product.b, product.transposed, product.element), 0,
                 product.columns);
  }
  INTERLACE_EMU_HIDDEN void run(const Entry& entry, uint32_t part, Accumulator& accumulator) {
    const Product& product = entry.product;
    note_reads(product, part);
    read_operand(shared_, reader_, Operand::decode(product.a, false, product.element), 16 * part, 16, a_);
    read_operand(shared_, reader_, Operand::decode(product.b, product.transposed, product.element), 0,
                 product.columns, b_);
    if (!product.accumulate) {
      for (auto& row : accumulator.tile) {
        for (float& element : row) element = 0;
      }
    }
    multiply_(a_, b_, product.element == Element::kE4m3 ? 32 : 16, product.columns, accumulator.tile);
  }

  const SharedMemory& shared_;
  std::unique_ptr<Warp[], Free> warps_;
  Warp* const warp_;
  std::unique_ptr<Group[], Free> groups_;
  Group* const group_;
  const Multiply multiply_;
  const ElementReader reader_;
  float a_[kMaxDepth][256], b_[kMaxDepth][256];  // [k][row]
};

}  // namespace interlace::emu
