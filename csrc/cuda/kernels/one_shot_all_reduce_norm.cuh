// one_shot_all_reduce_norm: every rank shows its rows to all; every rank sums all rows, adds bias and residual and
// normalises. One signal per block and peer.
#pragma once

#include "cuda/kernels/row_norm.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

// See row_arguments.h. Needs one_shot_half_bytes(rows, columns). All ranks launch the same grid and hold the same bits.
template <typename T, int kBound, bool kAligned>
INTERLACE_KERNEL(kRowThreads)
one_shot_all_reduce_norm_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                                INTERLACE_PARAMETER RowArguments arguments) {
  const int rank = own_rank(group), played = rank - group.first_rank;
  const int64_t rows = arguments.rows.total(), columns = arguments.columns,
                packs = packs_of(columns, sizeof(T));
  const Team team(rows);

  const Entry entry = enter_epoch(group, Op::kAllReduce);
  const auto shown_by = [&](int peer) {
    return reinterpret_cast<Words<T>*>(half_of(group, peer, entry.epoch));
  };
  bool open = entry.open;
  if (open) {
    for (int64_t row = team.first; row < rows; row += team.stride) {
      const Row<const T, kAligned> input(static_cast<const T*>(arguments.inputs[played]), row, columns);
      Words<T>* const staged = shown_by(rank) + row * packs;
      copy_packs<T>(
          team.stripe, packs, [&](int64_t i) { return input.load(i); },
          [&](int64_t i, const Words<T>& pack) { staged[i] = pack; });
    }
    open = meet_peers(group, Op::kAllReduce, entry.epoch);
  }
  if (open) {
    uint32_t turn = 0;
    for (int64_t row = team.first; row < rows; row += team.stride) {
      const Addends<T, kAligned> addends(arguments, played, row);
      finish_row<T, kAligned>(arguments, played, row, team, turn++, [&](int64_t i) {
        Words<T> shown[kBound];
        INTERLACE_UNROLL
        for (int peer = 0; peer < kBound; ++peer) {
          if (peer < group.world_size) shown[peer] = shown_by(peer)[row * packs + i];
        }
        Totals<T> totals;
        sum_in_rank_order<T, kBound>(shown, group.world_size, totals);
        return addends.add_to(totals, i);
      });
    }
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
