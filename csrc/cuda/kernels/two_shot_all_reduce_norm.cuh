// two_shot_all_reduce_norm: of every row each rank sums one share, adds bias and residual and shows the result to all;
// every rank normalises all rows. Two epochs, one signal per block and peer in each.
#pragma once

#include "cuda/kernels/row_norm.cuh"
#include "cuda/kernels/wire.cuh"

namespace interlace {

// See row_arguments.h. Needs two_shot_half_bytes(rows, columns). A row belongs to the same block on every rank, whoever
// sums it, so a block needs only the signals of its namesakes. Bits equal those of one_shot_all_reduce_norm on the same
// grid, unless the switch sums.
template <typename T, int kBound, bool kAligned>
INTERLACE_KERNEL(kRowThreads)
two_shot_all_reduce_norm_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                                INTERLACE_PARAMETER RowArguments arguments) {
  using Link = Wire<T, kBound>;
  const int rank = own_rank(group), played = rank - group.first_rank;
  const int64_t rows = arguments.rows.total(), columns = arguments.columns;
  const int64_t share = share_of(columns, sizeof(T), group.world_size), padded = group.world_size * share;
  const int64_t packs = packs_of(columns, sizeof(T));  // the last share may end before, or be empty
  const int64_t own_share = packs - rank * share < share ? packs - rank * share : share;
  const Team team(rows);

  const Entry entry = enter_epoch(group, Op::kAllReduce);
  const uint32_t reduce = entry.epoch, gather = entry.epoch + 1;
  const Link wire{group, rank, reduce, rows * share};
  bool open = entry.open;
  if (open) {
    for (int64_t row = team.first; row < rows; row += team.stride) {
      const Row<const T, kAligned> input(static_cast<const T*>(arguments.inputs[played]), row, columns);
      copy_for_owners<Link::kRanks, T>(
          team.stripe, share, rank, group.world_size,
          [&](int owner, int64_t i) {
            return owner * share + i < packs ? input.load(owner * share + i) : Words<T>{};
          },
          [&](int owner, int64_t i, const Words<T>& pack) { wire.show(owner, row * share + i, pack); });
    }
    open = meet_peers(group, Op::kAllReduce, reduce);
  }
  if (open) {
    wire.acquire();
    for (int64_t row = team.first; row < rows; row += team.stride) {
      const Addends<T, kAligned> addends(arguments, played, row);
      for (int64_t i = team.stripe.first; i < own_share; i += team.stripe.stride) {
        Totals<T> totals;
        wire.sum(row * share + i, totals);
        wire.publish(row * padded + rank * share + i, addends.add_to(totals, rank * share + i), gather);
      }
    }
    open = meet_peers(group, Op::kAllReduce, gather);
  }
  if (open) {
    wire.acquire();
    uint32_t turn = 0;
    for (int64_t row = team.first; row < rows; row += team.stride) {
      const auto* const sums = reinterpret_cast<const Words<T>*>(half_of(group, rank, gather)) + row * padded;
      finish_row<T, kAligned>(arguments, played, row, team, turn++, [&](int64_t i) { return sums[i]; });
    }
  }
  leave_epoch(group, gather);
}

}  // namespace interlace
