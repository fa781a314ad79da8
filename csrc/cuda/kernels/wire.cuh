// How packs travel between ranks: stores into the peers' slots, or through the switch that adds and copies (NVLS).
//
// A wire of one call: in epoch e every rank shows the owner of a part its values, the owner sums them; in epoch e + 1
// the owner publishes the sums to all. Between the two stands meet_peers.
#pragma once

#include "cuda/kernels/packs.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

constexpr int kThroughSwitch = 0;  // in place of the bound on the number of ranks: see switch_wire.cuh

// At most kBound ranks; half(e) of an owner holds one slot of `slot` packs per rank.
template <typename T, int kBound> struct Wire {
  static constexpr int kRanks = kBound;
  const SymmetricGroup& group;
  const int rank;
  const uint32_t epoch;
  const int64_t slot;

  INTERLACE_DEVICE Words<T>* half(int of, uint32_t in) const {
    return reinterpret_cast<Words<T>*>(half_of(group, of, in));
  }
  INTERLACE_DEVICE void show(int owner, int64_t place, const Words<T>& pack) const {
    half(owner, epoch)[rank * slot + place] = pack;
  }
  // After meet_peers, by every thread that reads then.
  INTERLACE_DEVICE void acquire() const {}
  // After meet_peers(epoch). fp32, in rank order; all loads before the first sum.
  INTERLACE_DEVICE void sum(int64_t place, Totals<T>& totals) const {
    Words<T> shown[kBound];
    const Words<T>* const slots = half(rank, epoch) + place;
    INTERLACE_UNROLL
    for (int peer = 0; peer < kBound; ++peer) {
      if (peer < group.world_size) shown[peer] = slots[peer * slot];
    }
    sum_in_rank_order<T, kBound>(shown, group.world_size, totals);
  }
  INTERLACE_DEVICE void publish(int64_t place, const Words<T>& pack, uint32_t in) const {
    INTERLACE_UNROLL
    for (int k = 0; k < kBound; ++k) {
      if (k < group.world_size) half((rank + 1 + k) % group.world_size, in)[place] = pack;
    }
  }
};

}  // namespace interlace
