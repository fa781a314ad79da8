// all_gather: every rank publishes its shard to all. One signal per block and peer.
#pragma once

#include "cuda/kernels/shard.cuh"
#include "cuda/kernels/wire.cuh"

namespace interlace {

// out = the shards of all ranks, in rank order. T: an unsigned integer as wide as an element. Shards of any length, none
// too. Needs slots_half_bytes(1, largest shard). All ranks launch the same grid. The input may be its place in out.
template <typename T, int kBound>
INTERLACE_KERNEL(kShardThreads)
all_gather_kernel(INTERLACE_PARAMETER SymmetricGroup group, INTERLACE_PARAMETER ShardArguments arguments) {
  using Link = Wire<T, kBound>;
  const int rank = own_rank(group), played = rank - group.first_rank;
  const Stripe stripe = grid_stripe();
  const int64_t slot = packs_of(largest_of(arguments.elements), sizeof(T));

  const Entry entry = enter_epoch(group, Op::kAllGather);
  const Link wire{group, rank, entry.epoch, slot};
  bool open = entry.open;
  if (open) {
    const T* const input = static_cast<const T*>(arguments.inputs[played]);
    const int64_t count = arguments.elements.rows(rank);
    const bool wide = aligned_to_pack(input);
    copy_packs<T>(
        stripe, packs_of(count, sizeof(T)), [&](int64_t i) { return load_words(input, i, count, wide); },
        [&](int64_t i, const Words<T>& pack) { wire.publish(rank * slot + i, pack, entry.epoch); });
    open = meet_peers(group, Op::kAllGather, entry.epoch);
  }
  if (open) {
    wire.acquire();
    T* const out = static_cast<T*>(arguments.outs[played]);
    const auto* const gathered = reinterpret_cast<const Words<T>*>(half_of(group, rank, entry.epoch));
    copy_for_owners<Link::kRanks, T>(
        stripe, slot, rank, group.world_size,
        [&](int owner, int64_t i) { return gathered[owner * slot + i]; },
        [&](int owner, int64_t i, const Words<T>& pack) {
          Shard<T>(out, arguments.elements, owner).store(i, pack);
        });
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
