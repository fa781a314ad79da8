// A mainloop with hooks that wait for rows and publish tiles: everything in its order.
#pragma once

#include "emu/gemm_problem.h"

namespace interlace::emu {

// Rows of x come late, one tile's after the other's; a reader takes what is published.
struct Mailbox {
  uint32_t arrived = 0;  // row blocks of x that are there
  uint32_t cut_short = ~0u;  // from this tile on, ready says false
  uint32_t published[16] = {};
};

template <class Tile> struct MailHooks : PlainHooks<Tile> {
  static constexpr bool kWaits = true;
  static constexpr bool kPublishes = true;

  Mailbox& mailbox;

  INTERLACE_DEVICE bool ready(const TileWork& work) const {
    const uint32_t block = static_cast<uint32_t>(work.row / kGemmBlockRows);
    if (block >= mailbox.cut_short) return false;
    while (!reached(ptx::ld_acquire_sys_u32(&mailbox.arrived), block + 1)) ptx::nanosleep_u32(20);
    return true;
  }
  INTERLACE_DEVICE void stored(const TileWork& work) const {
    ptx::st_release_sys_u32(&mailbox.published[work.row / kGemmBlockRows], 1);
  }
};

// Loop::Tile, kThreads, kSharedBytes; Loop::run(problem, hooks, shared) is the mainloop.
template <class Loop> void mail_kernel(const Problem<typename Loop::Tile>& problem, Mailbox& mailbox) {
  INTERLACE_DYNAMIC_SHARED(shared);
  MailHooks<typename Loop::Tile> hooks{{problem.arguments}, mailbox};
  Loop::run(problem, hooks, shared);
}

// Rank 0 multiplies. Rank 1 brings the rows, and reads results as soon as they are published, with ordinary accesses:
// without acquire, proxy fence, barrier and release in the right places they race.
template <class Loop> void test_hooks_wait_and_publish(uint64_t seed) {
  const Case test{.rows = 300, .products = {{40, 100}}};
  World world(seed);
  Problem<typename Loop::Tile> problem(test);
  auto brought = problem.x[0];
  for (auto& pack : problem.x[0].storage) pack = {};
  Mailbox mailbox;
  auto* const x = problem.x[0].data();
  const int64_t stride = problem.x[0].stride, out_stride = 40 + kGuardColumns;
  float sums[3] = {};
  // not by the thread that publishes
  const auto last_row_of = [&](int64_t block) {
    return std::min((block + 1) * kGemmBlockRows, test.rows) - 1;
  };
  const auto peer = [&] {
    for (uint32_t block = 0; block < 3; ++block) {
      const int64_t first = block * kGemmBlockRows,
                    end = std::min<int64_t>(first + kGemmBlockRows, test.rows);
      for (int64_t i = first * stride; i < end * stride; ++i) x[i] = brought.data()[i];
      ptx::st_release_sys_u32(&mailbox.arrived, block + 1);
    }
    for (uint32_t block = 0; block < 3; ++block) {
      while (ptx::ld_acquire_sys_u32(&mailbox.published[block]) == 0) ptx::nanosleep_u32(20);
      const auto* const row = &problem.outs[0][last_row_of(block) * out_stride];
      for (int64_t n = 0; n < 40; ++n) {
        const BFloat16 element = row[n];  // a load of its own: see emu/sanitizer.h
        sums[block] += to_float(element);
      }
    }
  };
  std::thread other([&] { Device(world, 1, {1, 1, 0}).launch(peer); });
  const uint32_t blocks = seed % 2 == 0 ? 4 : 2;  // of 3 tiles: one may get none
  Device device(world, 0, {blocks, Loop::kThreads, Loop::kSharedBytes});
  device.launch([&] { mail_kernel<Loop>(problem, mailbox); });
  other.join();
  require_finished(world);
  problem.check();
  for (uint32_t block = 0; block < 3; ++block) {
    float want = 0;
    for (int64_t n = 0; n < 40; ++n) want += problem.expected(0, last_row_of(block), n);
    require(sums[block] == want, "published before it was stored: row block " + std::to_string(block));
  }
}

// A wait that is cut short does not stop the others, and its tile is never published.
template <class Loop> void test_a_tile_cut_short_is_not_published(uint64_t seed) {
  const Case test{.rows = 400, .products = {{20, 700}}};
  World world(seed);
  Problem<typename Loop::Tile> problem(test);
  Mailbox mailbox{.arrived = 4, .cut_short = 2};
  Device device(world, 0, {1, Loop::kThreads, Loop::kSharedBytes});
  device.launch([&] { mail_kernel<Loop>(problem, mailbox); });
  require_finished(world);
  for (uint32_t block = 0; block < 4; ++block) {
    require(mailbox.published[block] == (block < 2),
            "row block " + std::to_string(block) + " was published, or not");
  }
}

}  // namespace interlace::emu
