// reduce_scatter: every rank shows each owner its shard; the owner sums. One signal per block and peer.
#pragma once

#include "cuda/kernels/shard.cuh"
#include "cuda/kernels/wire.cuh"

namespace interlace {

// out = sum over ranks of this rank's shard of their inputs, rounded once from fp32. Shards of any length, none too. Needs
// slots_half_bytes(1, largest shard). All ranks launch the same grid.
template <typename T, int kBound>
INTERLACE_KERNEL(kShardThreads)
reduce_scatter_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                      INTERLACE_PARAMETER ShardArguments arguments) {
  using Link = Wire<T, kBound>;
  const int rank = own_rank(group), played = rank - group.first_rank;
  const Stripe stripe = grid_stripe();
  const int64_t slot = packs_of(largest_of(arguments.elements), sizeof(T));
  const T* const input = static_cast<const T*>(arguments.inputs[played]);

  const Entry entry = enter_epoch(group, Op::kReduceScatter);
  const Link wire{group, rank, entry.epoch, slot};
  bool open = entry.open;
  if (open) {
    copy_for_owners<Link::kRanks, T>(
        stripe, slot, rank, group.world_size,
        [&](int owner, int64_t i) { return Shard<const T>(input, arguments.elements, owner).load(i); },
        [&](int owner, int64_t i, const Words<T>& pack) { wire.show(owner, i, pack); });
    open = meet_peers(group, Op::kReduceScatter, entry.epoch);
  }
  if (open) {
    wire.acquire();
    T* const out = static_cast<T*>(arguments.outs[played]);
    const int64_t count = arguments.elements.rows(rank), packs = packs_of(count, sizeof(T));
    const bool wide = aligned_to_pack(out);
    for (int64_t i = stripe.first; i < packs; i += stripe.stride) {
      Totals<T> totals;
      wire.sum(i, totals);
      store_words(out, i, count, wide, rounded<T>(totals));
    }
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
