// all_to_all: every rank stores a piece of its input at every peer. One signal per block and peer.
#pragma once

#include "cuda/kernels/shard.cuh"
#include "cuda/kernels/wire.cuh"

namespace interlace {

// Piece p of out = piece `rank` of the input of rank p. T: an unsigned integer as wide as an element. Pieces of any
// length, none too. Needs slots_half_bytes(1, largest piece). All ranks launch the same grid. out must not overlap the
// input.
template <typename T, int kBound>
INTERLACE_KERNEL(kShardThreads)
all_to_all_kernel(INTERLACE_PARAMETER SymmetricGroup group, INTERLACE_PARAMETER AllToAllArguments arguments) {
  const int rank = own_rank(group), played = rank - group.first_rank;
  const Stripe stripe = grid_stripe();
  const int64_t slot = packs_of(arguments.largest, sizeof(T));

  const Entry entry = enter_epoch(group, Op::kAllToAll);
  const Wire<T, kBound> wire{group, rank, entry.epoch, slot};
  bool open = entry.open;
  if (open) {
    const T* const input = static_cast<const T*>(arguments.inputs[played]);
    const Shards& sent = arguments.sent[played];
    copy_for_owners<kBound, T>(
        stripe, slot, rank, group.world_size,
        [&](int owner, int64_t i) { return Shard<const T>(input, sent, owner).load(i); },
        [&](int owner, int64_t i, const Words<T>& pack) { wire.show(owner, i, pack); });
    open = meet_peers(group, Op::kAllToAll, entry.epoch);
  }
  if (open) {
    T* const out = static_cast<T*>(arguments.outs[played]);
    const Shards& received = arguments.received[played];
    const auto* const slots = reinterpret_cast<const Words<T>*>(half_of(group, rank, entry.epoch));
    copy_for_owners<kBound, T>(
        stripe, slot, rank, group.world_size, [&](int peer, int64_t i) { return slots[peer * slot + i]; },
        [&](int peer, int64_t i, const Words<T>& pack) { Shard<T>(out, received, peer).store(i, pack); });
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
