// Packs of 16 bytes over ranks and threads: whose they are, and their sums.
#pragma once

#include "core/staging.h"
#include "cuda/kernels/words.cuh"

namespace interlace {

static_assert(kPackBytes == kStagingPackBytes);

// Which packs of an array are a thread's.
struct Stripe {
  int64_t first;
  int64_t stride;
};

// Over all blocks of the rank. Pack i belongs to the same block on every rank, so a block needs only the signals of its
// namesakes.
INTERLACE_DEVICE Stripe grid_stripe() {
  return {static_cast<int64_t>(ptx::ctaid_x()) * ptx::ntid_x() + ptx::tid_x(),
          static_cast<int64_t>(ptx::nctaid_x()) * ptx::ntid_x()};
}

// totals = sum of the first `world_size` packs, in rank order: all ranks get the same bits.
template <typename T, int kBound>
INTERLACE_DEVICE void sum_in_rank_order(const Words<T> (&shown)[kBound], int world_size, Totals<T>& totals) {
  unpack(shown[0], totals);
  INTERLACE_UNROLL
  for (int peer = 1; peer < kBound; ++peer) {
    if (peer < world_size) add<T>(shown[peer], totals);
  }
}

constexpr int kCopyBatch = 4;

// store(i, load(i)) for every pack i of the stripe below `packs`, several loads in flight.
template <typename T, typename Load, typename Store>
INTERLACE_DEVICE void copy_packs(const Stripe& stripe, int64_t packs, Load load, Store store) {
  for (int64_t first = stripe.first; first < packs; first += kCopyBatch * stripe.stride) {
    Words<T> batch[kCopyBatch];
    INTERLACE_UNROLL
    for (int k = 0; k < kCopyBatch; ++k) {
      if (first + k * stripe.stride < packs) batch[k] = load(first + k * stripe.stride);
    }
    INTERLACE_UNROLL
    for (int k = 0; k < kCopyBatch; ++k) {
      if (first + k * stripe.stride < packs) store(first + k * stripe.stride, batch[k]);
    }
  }
}

// For every pack of the stripe below `packs` and every owner, own last: visit(owner, pack number). First all `load`s,
// then all `store`s: the loads of one pack number are in flight together, and no two ranks start on the same owner.
template <int kBound, typename T, typename Load, typename Store>
INTERLACE_DEVICE void copy_for_owners(const Stripe& stripe, int64_t packs, int rank, int world_size,
                                      Load load, Store store) {
  for (int64_t i = stripe.first; i < packs; i += stripe.stride) {
    Words<T> batch[kBound];
    INTERLACE_UNROLL
    for (int k = 0; k < kBound; ++k) {
      if (k < world_size) batch[k] = load((rank + 1 + k) % world_size, i);
    }
    INTERLACE_UNROLL
    for (int k = 0; k < kBound; ++k) {
      if (k < world_size) store((rank + 1 + k) % world_size, i, batch[k]);
    }
  }
}

}  // namespace interlace
