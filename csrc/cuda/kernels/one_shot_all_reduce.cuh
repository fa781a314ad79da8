// one_shot_all_reduce: every rank shows its input to all, every rank sums all inputs. One signal per block and peer.
#pragma once

#include "cuda/kernels/all_reduce_arguments.h"
#include "cuda/kernels/element.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

constexpr int kAllReduceThreads = 256;

// out = sum over ranks of input, in fp32 and in rank order: all ranks hold the same bits. When the launch is cut short
// out is partly written.
//
// All ranks launch the same grid. Pack i belongs to the same block on every rank, whatever the alignment there, so a
// block needs only the signals of its namesakes.
template <typename T, int kWorldSize>
INTERLACE_KERNEL(kAllReduceThreads)
one_shot_all_reduce_kernel(INTERLACE_PARAMETER SymmetricGroup group,
                           INTERLACE_PARAMETER AllReduceArguments arguments) {
  const int rank = own_rank(group);
  const int64_t count = arguments.count;
  const int64_t packs = (count + Pack<T>::kElements - 1) / Pack<T>::kElements;
  const int64_t first = static_cast<int64_t>(ptx::ctaid_x()) * ptx::ntid_x() + ptx::tid_x();
  const int64_t stride = static_cast<int64_t>(ptx::nctaid_x()) * ptx::ntid_x();
  const T* const input = static_cast<const T*>(arguments.inputs[rank - group.first_rank]);
  T* const out = static_cast<T*>(arguments.outs[rank - group.first_rank]);

  const Entry entry = enter_epoch(group, Op::kAllReduce);
  bool open = entry.open;
  if (open) {
    auto* const staging = reinterpret_cast<Pack<T>*>(half_of(group, rank, entry.epoch));
    const bool wide = aligned_to_pack(input);
    for (int64_t i = first; i < packs; i += stride) {
      const Pack<T> pack = load_pack(input, i, count, wide);  // see emu/sanitizer.h: a store of its own
      staging[i] = pack;
    }
    open = meet_peers(group, Op::kAllReduce, entry.epoch);
  }
  if (open) {
    const bool wide = aligned_to_pack(out);
    for (int64_t i = first; i < packs; i += stride) {
      Pack<T> shown[kWorldSize];  // all loads before the first sum: the links work on all peers at once
      INTERLACE_UNROLL
      for (int peer = 0; peer < kWorldSize; ++peer) {
        shown[peer] = reinterpret_cast<const Pack<T>*>(half_of(group, peer, entry.epoch))[i];
      }
      Pack<T> sum;
      INTERLACE_UNROLL
      for (int element = 0; element < Pack<T>::kElements; ++element) {
        float total = to_float(shown[0].elements[element]);
        INTERLACE_UNROLL
        for (int peer = 1; peer < kWorldSize; ++peer) total += to_float(shown[peer].elements[element]);
        from_float(total, sum.elements[element]);
      }
      store_pack(out, i, count, wide, sum);
    }
  }
  leave_epoch(group, entry.epoch);
}

}  // namespace interlace
