// The end of a row: sum over ranks + bias + residual, and its RMS norm while the row is still in registers.
#pragma once

#include <type_traits>

#include "cuda/kernels/packs.cuh"
#include "cuda/kernels/row_arguments.h"

namespace interlace {

constexpr int kRowThreads = 256;
constexpr uint32_t kMaxTeams = 4;  // rows that a block works on at once
constexpr uint32_t kLanes = 32;
// Packs of a row that a thread keeps in registers; those of longer rows are read again.
constexpr int held_packs(bool aligned) { return aligned ? 4 : 1; }

// A block takes rows block, block + blocks, ...; its threads split into teams that take them in turn, fewer and larger
// teams when there are few rows. Everything depends on the grid and the rows alone, so it is the same on every rank.
struct Team {
  uint32_t number;
  uint32_t threads;
  Stripe stripe;  // packs of a row
  int64_t first, stride;  // rows

  INTERLACE_DEVICE explicit Team(int64_t rows) {
    const int64_t blocks = ptx::nctaid_x(), block = ptx::ctaid_x();
    const int64_t rows_of_block = (rows + blocks - 1) / blocks;
    uint32_t teams = 1;
    while (teams < kMaxTeams && 2 * teams <= rows_of_block && ptx::ntid_x() / teams % (2 * kLanes) == 0) {
      teams *= 2;
    }
    threads = ptx::ntid_x() / teams;
    number = ptx::tid_x() / threads;
    stripe = {ptx::tid_x() % threads, threads};
    first = block + number * blocks;
    stride = teams * blocks;
  }

  // Sum over the threads of the team, the same bits in all of them. `turn` alternates, so that one barrier is enough:
  // who is a turn ahead writes elsewhere.
  INTERLACE_DEVICE float sum(float value, uint32_t turn) const {
    INTERLACE_SHARED float partials[2][kMaxTeams][kRowThreads / kLanes];
    for (uint32_t mask = kLanes / 2; mask > 0; mask /= 2) value += ptx::shfl_bfly_f32(value, mask);
    float* const mine = partials[turn % 2][number];
    if (ptx::tid_x() % kLanes == 0) mine[ptx::tid_x() % threads / kLanes] = value;
    ptx::bar_sync(1 + number, threads);
    float total = 0;
    for (uint32_t warp = 0; warp < threads / kLanes; ++warp) total += mine[warp];
    return total;
  }
};

// A dense row of a tensor; null when the tensor is. kAligned: see rows_are_aligned; otherwise element by element.
template <typename T, bool kAligned> struct Row {
  T* elements;
  int64_t columns;

  INTERLACE_DEVICE Row(T* tensor, int64_t row, int64_t columns)
      : elements(tensor == nullptr ? nullptr : tensor + row * columns), columns(columns) {}
  INTERLACE_DEVICE explicit operator bool() const { return elements != nullptr; }
  INTERLACE_DEVICE Words<std::remove_const_t<T>> load(int64_t i) const {
    using Packed = Words<std::remove_const_t<T>>;
    if constexpr (kAligned) return reinterpret_cast<const Packed*>(elements)[i];
    return load_words<std::remove_const_t<T>>(elements, i, columns, false);
  }
  INTERLACE_DEVICE void store(int64_t i, const Words<T>& pack) const {
    if constexpr (kAligned) {
      reinterpret_cast<Words<T>*>(elements)[i] = pack;
    } else {
      store_words(elements, i, columns, false, pack);
    }
  }
};

// What is added to a sum before it is rounded.
template <typename T, bool kAligned> struct Addends {
  Row<const T, kAligned> bias, residual;

  INTERLACE_DEVICE Addends(const RowArguments& arguments, int played, int64_t row)
      : bias(static_cast<const T*>(arguments.bias), 0, arguments.columns),
        residual(static_cast<const T*>(arguments.residuals[played]), row, arguments.columns) {}
  INTERLACE_DEVICE Words<T> add_to(Totals<T>& totals, int64_t i) const {
    if (bias) add<T>(bias.load(i), totals);
    if (residual) add<T>(residual.load(i), totals);
    return rounded<T>(totals);
  }
};

template <typename T> INTERLACE_DEVICE float sum_of_squares(const Words<T>& packed, float total) {
  Totals<T> values;
  unpack(packed, values);
  INTERLACE_UNROLL
  for (int i = 0; i < Words<T>::kElements; ++i) total = ptx::fma_rn_f32(values[i], values[i], total);
  return total;
}

// The threads of a team call it for the same row: store the sums, and their norm. sums_at(i): pack i of the rounded sums,
// zero beyond the columns.
template <typename T, bool kAligned, typename SumsAt>
INTERLACE_DEVICE void finish_row(const RowArguments& arguments, int played, int64_t row, const Team& team,
                                 uint32_t turn, SumsAt sums_at) {
  const int64_t columns = arguments.columns, packs = packs_of(columns, sizeof(T));
  const Row<T, kAligned> sums(static_cast<T*>(arguments.sums[played]), row, columns);
  const Row<T, kAligned> out(static_cast<T*>(arguments.outs[played]), row, columns);
  constexpr int kHeld = held_packs(kAligned);
  const int64_t rest = team.stripe.first + kHeld * team.stripe.stride;
  Words<T> held[kHeld];
  float squares = 0;
  INTERLACE_UNROLL
  for (int k = 0; k < kHeld; ++k) {
    const int64_t i = team.stripe.first + k * team.stripe.stride;
    if (i < packs) held[k] = sums_at(i);
  }
  INTERLACE_UNROLL
  for (int k = 0; k < kHeld; ++k) {
    const int64_t i = team.stripe.first + k * team.stripe.stride;
    if (i < packs) squares = sum_of_squares(held[k], squares);
    if (i < packs && sums) sums.store(i, held[k]);
  }
  for (int64_t i = rest; i < packs; i += team.stripe.stride) {
    const Words<T> pack = sums_at(i);
    squares = sum_of_squares(pack, squares);
    if (sums) sums.store(i, pack);
  }
  if (!out) return;
  const float mean = team.sum(squares, turn) / static_cast<float>(columns);
  const float scale = 1.0f / ptx::sqrt_rn_f32(mean + arguments.eps);
  const Row<const T, kAligned> weight(static_cast<const T*>(arguments.norm_weight), 0, columns);
  const auto normalise = [&](int64_t i, const Words<T>& pack) {
    Totals<T> scaled;
    unpack(pack, scaled);
    INTERLACE_UNROLL
    for (int element = 0; element < Words<T>::kElements; ++element) scaled[element] *= scale;
    if (weight) {
      Totals<T> factors;
      unpack(weight.load(i), factors);
      INTERLACE_UNROLL
      for (int element = 0; element < Words<T>::kElements; ++element) scaled[element] *= factors[element];
    }
    out.store(i, rounded<T>(scaled));
  };
  INTERLACE_UNROLL
  for (int k = 0; k < kHeld; ++k) {
    const int64_t i = team.stripe.first + k * team.stripe.stride;
    if (i < packs) normalise(i, held[k]);
  }
  // the sums may have taken the place of the residual: then only they are still there
  for (int64_t i = rest; i < packs; i += team.stripe.stride) normalise(i, sums ? sums.load(i) : sums_at(i));
}

}  // namespace interlace
