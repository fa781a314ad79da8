// reduce_scatter_norm: every rank shows each owner its rows; the owner sums them, adds bias and residual and normalises.
// One signal per block and peer.
#pragma once

#include "cuda/kernels/row_norm.cuh"
#include "cuda/kernels/wire.cuh"

namespace interlace {

// See row_arguments.h; rows of any number per rank, none too. Needs slots_half_bytes(largest number of rows, columns).
// Row i of an owner belongs to the same block on every rank, so a block needs only the signals of its namesakes.
template <typename T, int kBound, bool kAligned>
INTERLACE_KERNEL(kRowThreads)
reduce_scatter_norm_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                           INTERLACE_PARAMETER RowArguments arguments) {
  const int rank = own_rank(group), played = rank - group.first_rank;
  const int64_t columns = arguments.columns, packs = packs_of(columns, sizeof(T));
  const int64_t most = largest_of(arguments.rows);
  const Team team(most);

  const Entry entry = enter_epoch(group, Op::kReduceScatter);
  const Wire<T, kBound> wire{group, rank, entry.epoch, most * packs};
  bool open = entry.open;
  if (open) {
    const T* const inputs = static_cast<const T*>(arguments.inputs[played]);
    for (int64_t row = team.first; row < most; row += team.stride) {
      for (int k = 1; k <= group.world_size; ++k) {  // own rows last: no two ranks start on the same owner
        const int owner = (rank + k) % group.world_size;
        if (row >= arguments.rows.rows(owner)) continue;
        const Row<const T, kAligned> input(inputs, arguments.rows.begin(owner) + row, columns);
        copy_packs<T>(
            team.stripe, packs, [&](int64_t i) { return input.load(i); },
            [&](int64_t i, const Words<T>& pack) { wire.show(owner, row * packs + i, pack); });
      }
    }
    open = meet_peers(group, Op::kReduceScatter, entry.epoch);
  }
  if (open) {
    wire.acquire();
    uint32_t turn = 0;
    for (int64_t row = team.first; row < arguments.rows.rows(rank); row += team.stride) {
      const Addends<T, kAligned> addends(arguments, played, row);
      finish_row<T, kAligned>(arguments, played, row, team, turn++, [&](int64_t i) {
        Totals<T> totals;
        wire.sum(row * packs + i, totals);
        return addends.add_to(totals, i);
      });
    }
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
