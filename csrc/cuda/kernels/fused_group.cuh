// What the fused GEMM kernels do with their group besides tiles: keep words fresh, hear from everybody, copy rows.
#pragma once

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/signals.cuh"

namespace interlace {

// Threads of one block: refresh_words at every rank, the own one too. tiles_used(peer): words that this launch uses.
template <class TilesUsed>
INTERLACE_DEVICE void refresh_all(const SymmetricGroup& group, uint32_t epoch, TilesUsed tiles_used) {
  const int peer = static_cast<int>(ptx::tid_x());
  if (peer < group.world_size) refresh_words(group, peer, epoch, 0, tiles_used(peer));
}

// Threads of one block, at the end: every peer has begun this epoch, also one that had nothing to send. It is this that
// keeps the halves apart (segment.h). Every rank sends the signal with index 0 to every other.
INTERLACE_DEVICE bool hear_from_peers(const SymmetricGroup& group, Op op, uint32_t epoch) {
  const int peer = static_cast<int>(ptx::tid_x());
  if (peer >= group.world_size || peer == own_rank(group)) return true;
  return wait_for_tile(group, op, peer, 0, epoch);
}

constexpr int kPacksInFlight =
    4;  // loads of a thread before its first store: they hide the way to the memory

// All threads of the block: `rows` rows of `columns` elements. Strides in elements. A warp takes a row at a time.
template <class T>
INTERLACE_DEVICE void copy_rows(T* to, int64_t to_stride, const T* from, int64_t from_stride, int64_t rows,
                                int64_t columns) {
  constexpr int64_t kElements = Pack<T>::kElements;
  const bool wide_from = aligned_to_pack(from) && from_stride % kElements == 0;
  const bool wide_to = aligned_to_pack(to) && to_stride % kElements == 0;
  const int64_t packs = (columns + kElements - 1) / kElements;
  constexpr uint32_t kLanes = 32;
  const uint32_t lane = ptx::tid_x() % kLanes, warps = ptx::ntid_x() / kLanes;
  for (int64_t row = ptx::tid_x() / kLanes; row < rows; row += warps) {
    const T* const source = from + row * from_stride;
    T* const target = to + row * to_stride;
    for (int64_t first = lane; first < packs; first += kPacksInFlight * kLanes) {
      Pack<T> pack[kPacksInFlight];
      INTERLACE_UNROLL
      for (int i = 0; i < kPacksInFlight; ++i) {
        const int64_t index = first + i * kLanes;
        if (index < packs) pack[i] = load_pack(source, index, columns, wide_from);
      }
      INTERLACE_UNROLL
      for (int i = 0; i < kPacksInFlight; ++i) {
        const int64_t index = first + i * kLanes;
        if (index < packs) store_pack(target, index, columns, wide_to, pack[i]);
      }
    }
  }
}

}  // namespace interlace
