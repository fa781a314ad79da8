// Who sums what the ranks have pushed. Blocks claim units (a few complete rows), wait for the row block that the unit
// lies in, sum the slots of all ranks in rank order, and finish the rows: bias, residual, RMSNorm. all-reduce: the sums
// go to every peer, and units of the peers are claimed and finished in the same way.
#pragma once

#include "cuda/kernels/fused_arguments.h"
#include "cuda/kernels/fused_group.cuh"
#include "cuda/kernels/scatter_hooks.cuh"
#include "cuda/kernels/switch_sum.cuh"

namespace interlace {

// The sum over all threads of the block, for each of them; always in the same order. `partial`: one float per warp, not
// touched again before the next barrier of the block.
INTERLACE_DEVICE float sum_over_block(float value, float* partial) {
  INTERLACE_UNROLL
  for (uint32_t mask = 16; mask > 0; mask /= 2) value += ptx::shfl_bfly_f32(value, mask);
  if (ptx::tid_x() % 32 == 0) partial[ptx::tid_x() / 32] = value;
  ptx::barrier_sync();  // the sums of all warps are there
  float sum = 0;
  for (uint32_t warp = 0; warp < ptx::ntid_x() / 32; ++warp) sum += partial[warp];
  return sum;
}

constexpr int kSlotsTogether =
    4;  // loads of a thread before its first sum: 24 KiB of a block are on their way

// One pack of a row, summed over the slots in rank order.
template <class Wire>
INTERLACE_DEVICE void sum_slots(const char* slot, int64_t slot_bytes, int world_size, float* sum) {
  INTERLACE_UNROLL
  for (int i = 0; i < Pack<Wire>::kElements; ++i) sum[i] = 0;
  INTERLACE_ROLLED
  for (int first = 0; first < world_size; first += kSlotsTogether) {
    Pack<Wire> shown[kSlotsTogether];
    INTERLACE_UNROLL
    for (int i = 0; i < kSlotsTogether; ++i) {
      if (first + i < world_size) shown[i] = *reinterpret_cast<const Pack<Wire>*>(slot + i * slot_bytes);
    }
    INTERLACE_UNROLL
    for (int i = 0; i < kSlotsTogether; ++i) {
      INTERLACE_UNROLL
      for (int element = 0; element < Pack<Wire>::kElements; ++element) {
        if (first + i < world_size) sum[element] += to_float(shown[i].elements[element]);
      }
    }
    slot += kSlotsTogether * slot_bytes;
  }
}

// `kSwitch`: the instance can let the switch sum (NVLS), if ReduceArguments::multicast says so.
template <class Out, bool kSwitch> struct Reducer {
  using Unit = ReduceSchedule::Unit;
  static constexpr uint32_t kMaxWarps = 32;

  const SymmetricGroup& group;
  const GemmArguments& arguments;
  const ReduceArguments& reduce;
  Op op;
  const uint32_t& epoch;  // in shared memory
  int64_t columns;
  uint32_t packs;  // of a row
  WireFormat<Out> wire;
  int64_t reduced_row_bytes;
  int64_t reduced_offset;  // of the finished sums in a half

  INTERLACE_DEVICE Reducer(const SymmetricGroup& of, const GemmArguments& product, const ReduceArguments& sum,
                           Op running, const uint32_t& now)
      : group(of),
        arguments(product),
        reduce(sum),
        op(running),
        epoch(now),
        columns(product.products[0].columns),
        packs(static_cast<uint32_t>((columns + kStoreColumns - 1) / kStoreColumns)),
        wire(sum, columns),
        reduced_row_bytes(ReduceSchedule::row_bytes(columns, sizeof(Out))),
        reduced_offset(sum.schedule.reduced_offset(sum.multicast, wire.row_bytes)) {}

  INTERLACE_DEVICE bool by_switch() const { return kSwitch && reduce.multicast; }
  INTERLACE_DEVICE char* own_half() const { return half_of(group, reduce.schedule.rank, epoch); }
  INTERLACE_DEVICE char* half_of_all() const {
    return group.multicast + (own_half() - group.segments[reduce.schedule.rank]);
  }
  INTERLACE_DEVICE Pack<Out>* reduced(char* half, int64_t row, uint32_t pack) const {
    return reinterpret_cast<Pack<Out>*>(half + reduced_offset + row * reduced_row_bytes) + pack;
  }

  // One pack of this rank's sums, before bias and residual.
  INTERLACE_DEVICE void sum_pack(const Unit& unit, uint32_t row, uint32_t pack,
                                 float (&sum)[kStoreColumns]) const {
    const ReduceSchedule& schedule = reduce.schedule;
    const int rank = schedule.rank;
    if constexpr (kSwitch) {
      if (reduce.multicast) {
        const int64_t at_row = (schedule.scatter ? schedule.shards.begin(rank) : 0) + unit.row + row;
        const char* const from =
            half_of_all() + at_row * wire.row_bytes + wire.column_bytes(int64_t{pack} * 8);
        return sum_by_switch<Out>(from, wire.float32, sum);
      }
    }
    const char* const first =
        own_half() + (unit.owned_row + row) * wire.row_bytes + wire.column_bytes(int64_t{pack} * 8);
    const int64_t slot_bytes = schedule.slot_offset(rank, 1, wire.row_bytes);
    if (!wire.float32) return sum_slots<Out>(first, slot_bytes, schedule.world_size, sum);
    INTERLACE_UNROLL
    for (int half = 0; half < 2; ++half) {
      sum_slots<float>(first + half * kPackBytes, slot_bytes, schedule.world_size, sum + half * 4);
    }
  }

  // The finished pack: all-reduce shows it to the peers.
  INTERLACE_DEVICE Pack<Out> finish_pack(const Unit& unit, uint32_t row, uint32_t pack) const {
    const int64_t column = int64_t{pack} * kStoreColumns, at_row = unit.row + row;
    const int valid = static_cast<int>(columns - column < kStoreColumns ? columns - column : kStoreColumns);
    float sum[kStoreColumns];
    sum_pack(unit, row, pack, sum);
    if (const auto* const bias = static_cast<const Out*>(arguments.products[0].bias); bias != nullptr)
      add_columns(bias + column, valid, sum);
    if (const auto* const residual = static_cast<const Out*>(arguments.residual); residual != nullptr)
      add_columns(residual + at_row * arguments.residual_stride + column, valid, sum);
    Pack<Out> rounded;
    INTERLACE_UNROLL
    for (int i = 0; i < kStoreColumns; ++i) from_float(sum[i], rounded.elements[i]);
    if (!reduce.schedule.scatter) show(at_row, pack, rounded);
    return rounded;
  }
  INTERLACE_DEVICE void show(int64_t row, uint32_t pack, const Pack<Out>& rounded) const {
    if constexpr (kSwitch) {
      if (reduce.multicast) return store_by_switch(reduced(half_of_all(), row, pack), rounded);
    }
    INTERLACE_ROLLED
    for (int step = 1; step < group.world_size; ++step) {
      const int peer = source_at(reduce.schedule.rank, step, group.world_size);
      *reduced(half_of(group, peer, epoch), row, pack) = rounded;
    }
  }

  // Rows of out that a unit covers are counted as its rows are.
  INTERLACE_DEVICE Out* kept_row(int64_t row) const {
    const GemmProduct& product = arguments.products[0];
    if (product.out != nullptr) return static_cast<Out*>(product.out) + row * product.out_stride;
    return static_cast<Out*>(reduce.normalised) + row * reduce.normalised_stride;
  }

  INTERLACE_DEVICE static float* partial_sums(uint32_t buffer) {
    INTERLACE_SHARED float partial[2][kMaxWarps];
    return partial[buffer];
  }
  // All threads: the rows of a unit to out, and normalised. pack_of(row, pack): the finished pack.
  template <class PackOf> INTERLACE_DEVICE void finish_rows(const Unit& unit, PackOf pack_of) const {
    if (reduce.normalised == nullptr) {
      const uint32_t items = static_cast<uint32_t>(unit.rows) * packs;
      INTERLACE_ROLLED
      for (uint32_t i = ptx::tid_x(); i < items; i += ptx::ntid_x()) {
        const Pack<Out> pack = pack_of(i / packs, i % packs);
        Out* const to = kept_row(unit.row + i / packs);
        store_pack(to, i % packs, columns, aligned_to_pack(to), pack);
      }
      return;
    }
    INTERLACE_ROLLED
    for (uint32_t row = 0; row < unit.rows; ++row) {
      Out* const to = kept_row(unit.row + row);
      const bool wide = aligned_to_pack(to);
      float squares = 0;
      INTERLACE_ROLLED
      for (uint32_t i = ptx::tid_x(); i < packs; i += ptx::ntid_x()) {
        const Pack<Out> pack = pack_of(row, i);
        store_pack(to, i, columns, wide, pack);
        INTERLACE_UNROLL
        for (int element = 0; element < kStoreColumns; ++element) {
          if (int64_t{i} * kStoreColumns + element >= columns) continue;
          const float value = to_float(pack.elements[element]);
          squares += value * value;
        }
      }
      // two buffers: a fast warp may be a row ahead of a slow one, not two
      const float mean = sum_over_block(squares, partial_sums(row % 2)) / static_cast<float>(columns);
      normalise_row(unit.row + row, to, 1.0f / ptx::sqrt_rn_f32(mean + reduce.eps));
    }
  }

  // Each thread rereads the packs that it has stored itself.
  INTERLACE_DEVICE void normalise_row(int64_t row, const Out* from, float scale) const {
    Out* const to = static_cast<Out*>(reduce.normalised) + row * reduce.normalised_stride;
    const auto* const weight = static_cast<const Out*>(reduce.norm_weight);
    const bool wide_from = aligned_to_pack(from), wide_to = aligned_to_pack(to);
    INTERLACE_ROLLED
    for (uint32_t i = ptx::tid_x(); i < packs; i += ptx::ntid_x()) {
      Pack<Out> pack = load_pack(from, i, columns, wide_from), factors{};
      if (weight != nullptr) factors = load_pack(weight, i, columns, aligned_to_pack(weight));
      INTERLACE_UNROLL
      for (int element = 0; element < kStoreColumns; ++element) {
        const float factor = weight != nullptr ? to_float(factors.elements[element]) : 1.0f;
        from_float(to_float(pack.elements[element]) * scale * factor, pack.elements[element]);
      }
      store_pack(to, i, columns, wide_to, pack);
    }
  }

  // The next number of a counter, the same for all threads of the block.
  INTERLACE_DEVICE int64_t claim(int counter) const {
    INTERLACE_SHARED uint32_t claimed;
    ptx::barrier_sync();  // all threads have read the number before
    if (ptx::tid_x() == 0)
      claimed = ptx::atom_add_relaxed_gpu_u32(&control_of(group, reduce.schedule.rank).claims[counter], 1);
    ptx::barrier_sync();
    return claimed;
  }

  // All threads: sum the units of this rank that nobody else has claimed. False when a wait was cut short.
  INTERLACE_DEVICE bool reduce_units() const {
    const ReduceSchedule& schedule = reduce.schedule;
    const int64_t units = schedule.units(schedule.rank);
    const int thread = static_cast<int>(ptx::tid_x());
    for (int64_t index = claim(0); index < units; index = claim(0)) {
      const Unit unit = schedule.unit(schedule.rank, index);
      bool arrived = true;
      if (thread < schedule.world_size) {
        arrived = wait_for_tile(group, op, thread, unit.row_block, epoch);
        acquire_through_switch<kSwitch>(by_switch());
      }
      if (!ptx::barrier_red_and(arrived)) return false;
      finish_rows(unit, [&](uint32_t row, uint32_t pack) { return finish_pack(unit, row, pack); });
      if (schedule.scatter) continue;
      ptx::barrier_sync();  // the stores of all threads are ordered before the signals
      if (thread < schedule.world_size && thread != schedule.rank)
        signal_tile(group, thread, schedule.unit_signal(index), epoch);
    }
    return true;
  }

  // All threads, all-reduce: units that peers have summed.
  INTERLACE_DEVICE bool copy_units() const {
    const ReduceSchedule& schedule = reduce.schedule;
    const int peers = schedule.world_size - 1;
    const int64_t items = schedule.units(0) * peers;
    for (int64_t item = claim(1); item < items; item = claim(1)) {
      const int owner = source_at(schedule.rank, 1 + static_cast<int>(item % peers), schedule.world_size);
      const int64_t index = item / peers;
      if (index >= schedule.units(owner)) continue;
      bool arrived = true;
      if (ptx::tid_x() == 0) {
        arrived = wait_for_tile(group, op, owner, schedule.unit_signal(index), epoch);
        acquire_through_switch<kSwitch>(by_switch());
      }
      if (!ptx::barrier_red_and(arrived)) return false;
      const Unit unit = schedule.unit(owner, index);
      finish_rows(unit,
                  [&](uint32_t row, uint32_t pack) { return *reduced(own_half(), unit.row + row, pack); });
    }
    return true;
  }
};

}  // namespace interlace
