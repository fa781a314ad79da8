// two_shot_all_reduce: every rank sums one share of the array and shows the sum to all. Two epochs, one signal per
// block and peer in each.
#pragma once

#include "cuda/kernels/all_reduce_arguments.h"
#include "cuda/kernels/wire.cuh"

namespace interlace {

constexpr int kTwoShotThreads = 256;

// out = sum over ranks of input, rounded once from fp32; all ranks hold the same bits. Needs two_shot_half_bytes(1,
// count). When the launch is cut short out is partly written. All ranks launch the same grid.
template <typename T, int kBound>
INTERLACE_KERNEL(kTwoShotThreads)
two_shot_all_reduce_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                           INTERLACE_PARAMETER AllReduceArguments arguments) {
  using Link = Wire<T, kBound>;
  const int rank = own_rank(group);
  const int64_t count = arguments.count;
  const int64_t share = share_of(count, sizeof(T), group.world_size);
  const Stripe stripe = grid_stripe();
  const T* const input = static_cast<const T*>(arguments.inputs[rank - group.first_rank]);
  T* const out = static_cast<T*>(arguments.outs[rank - group.first_rank]);

  const Entry entry = enter_epoch(group, Op::kAllReduce);
  const uint32_t reduce = entry.epoch, gather = entry.epoch + 1;
  const Link wire{group, rank, reduce, share};
  bool open = entry.open;
  if (open) {
    const bool wide = aligned_to_pack(input);
    copy_for_owners<Link::kRanks, T>(
        stripe, share, rank, group.world_size,
        [&](int owner, int64_t i) { return load_words(input, owner * share + i, count, wide); },
        [&](int owner, int64_t i, const Words<T>& pack) { wire.show(owner, i, pack); });
    open = meet_peers(group, Op::kAllReduce, reduce);
  }
  if (open) {
    wire.acquire();
    for (int64_t i = stripe.first; i < share; i += stripe.stride) {
      Totals<T> totals;
      wire.sum(i, totals);
      wire.publish(rank * share + i, rounded<T>(totals), gather);
    }
    open = meet_peers(group, Op::kAllReduce, gather);
  }
  if (open) {
    wire.acquire();
    const bool wide = aligned_to_pack(out);
    const auto* const sums = reinterpret_cast<const Words<T>*>(half_of(group, rank, gather));
    copy_for_owners<Link::kRanks, T>(
        stripe, share, rank, group.world_size, [&](int owner, int64_t i) { return sums[owner * share + i]; },
        [&](int owner, int64_t i, const Words<T>& pack) {
          store_words(out, owner * share + i, count, wide, pack);
        });
  }
  leave_epoch(group, gather);
}

}  // namespace interlace
