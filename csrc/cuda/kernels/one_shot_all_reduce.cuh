// one_shot_all_reduce: every rank shows its input to all, every rank sums all inputs. One signal per block and peer.
#pragma once

#include "cuda/kernels/all_reduce_arguments.h"
#include "cuda/kernels/packs.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

constexpr int kAllReduceThreads = 256;

// out = sum over ranks of input, in fp32 and in rank order: all ranks hold the same bits. When the launch is cut short
// out is partly written.
//
// All ranks launch the same grid. Pack i belongs to the same block on every rank, whatever the alignment there, so a
// block needs only the signals of its namesakes.
template <typename T, int kBound>
INTERLACE_KERNEL(kAllReduceThreads)
one_shot_all_reduce_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                           INTERLACE_PARAMETER AllReduceArguments arguments) {
  const int rank = own_rank(group);
  const int64_t count = arguments.count, packs = packs_of(count, sizeof(T));
  const Stripe stripe = grid_stripe();
  const T* const input = static_cast<const T*>(arguments.inputs[rank - group.first_rank]);
  T* const out = static_cast<T*>(arguments.outs[rank - group.first_rank]);

  const Entry entry = enter_epoch(group, Op::kAllReduce);
  const auto shown_by = [&](int peer) {
    return reinterpret_cast<Words<T>*>(half_of(group, peer, entry.epoch));
  };
  bool open = entry.open;
  if (open) {
    Words<T>* const staging = shown_by(rank);
    const bool wide = aligned_to_pack(input);
    copy_packs<T>(
        stripe, packs, [&](int64_t i) { return load_words(input, i, count, wide); },
        [&](int64_t i, const Words<T>& pack) { staging[i] = pack; });
    open = meet_peers(group, Op::kAllReduce, entry.epoch);
  }
  if (open) {
    const bool wide = aligned_to_pack(out);
    for (int64_t i = stripe.first; i < packs; i += stripe.stride) {
      Words<T> shown[kBound];  // all loads before the first sum: the links work on all peers at once
      INTERLACE_UNROLL
      for (int peer = 0; peer < kBound; ++peer) {
        if (peer < group.world_size) shown[peer] = shown_by(peer)[i];
      }
      Totals<T> totals;
      sum_in_rank_order<T, kBound>(shown, group.world_size, totals);
      store_words(out, i, count, wide, rounded<T>(totals));
    }
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
