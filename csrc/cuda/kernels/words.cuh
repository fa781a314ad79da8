// 16 bytes of a tensor in four registers: what travels between ranks, whatever the elements are. A Pack<T> would hold
// each 16-bit element in a register of its own.
#pragma once

#include <cstdint>

#include "cuda/kernels/element.cuh"

namespace interlace {

// may_alias: tensors are read and written through it.
template <typename T> struct __attribute__((may_alias, aligned(kPackBytes))) Words {
  static constexpr int kElements = Pack<T>::kElements;
  uint32_t words[4];
};

template <typename T> using Totals = float[Pack<T>::kElements];

INTERLACE_DEVICE void unpack(const Words<float>& packed, Totals<float>& values) {
  INTERLACE_UNROLL
  for (int i = 0; i < 4; ++i) values[i] = ptx::mov_b32_f32(packed.words[i]);
}
INTERLACE_DEVICE void unpack(const Words<BFloat16>& packed, Totals<BFloat16>& values) {
  INTERLACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = ptx::mov_b32_f32(packed.words[i] << 16);
    values[2 * i + 1] = ptx::mov_b32_f32(packed.words[i] & 0xffff0000u);
  }
}
INTERLACE_DEVICE void unpack(const Words<Float16>& packed, Totals<Float16>& values) {
  INTERLACE_UNROLL
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = ptx::cvt_f32_f16(static_cast<uint16_t>(packed.words[i]));
    values[2 * i + 1] = ptx::cvt_f32_f16(static_cast<uint16_t>(packed.words[i] >> 16));
  }
}

INTERLACE_DEVICE void round_into(const Totals<float>& values, Words<float>& packed) {
  INTERLACE_UNROLL
  for (int i = 0; i < 4; ++i) packed.words[i] = ptx::mov_f32_b32(values[i]);
}
INTERLACE_DEVICE void round_into(const Totals<BFloat16>& values, Words<BFloat16>& packed) {
  INTERLACE_UNROLL
  for (int i = 0; i < 4; ++i) packed.words[i] = ptx::cvt_rn_bf16x2_f32(values[2 * i], values[2 * i + 1]);
}
INTERLACE_DEVICE void round_into(const Totals<Float16>& values, Words<Float16>& packed) {
  INTERLACE_UNROLL
  for (int i = 0; i < 4; ++i) packed.words[i] = ptx::cvt_rn_f16x2_f32(values[2 * i], values[2 * i + 1]);
}

template <typename T> INTERLACE_DEVICE Words<T> rounded(const Totals<T>& values) {
  Words<T> packed;
  round_into(values, packed);
  return packed;
}

template <typename T> INTERLACE_DEVICE void add(const Words<T>& packed, Totals<T>& totals) {
  Totals<T> values;
  unpack(packed, values);
  INTERLACE_UNROLL
  for (int i = 0; i < Words<T>::kElements; ++i) totals[i] += values[i];
}

// The bits of an element, for those who only carry it.
template <typename T> struct BitsOf {
  using Type = T;
};
template <> struct BitsOf<float> {
  using Type = uint32_t;
};
template <> struct BitsOf<BFloat16> {
  using Type = uint16_t;
};
template <> struct BitsOf<Float16> {
  using Type = uint16_t;
};

// Words number `index` of an array of `count` elements. `wide`: the array is aligned to 16 bytes. Elements beyond the end
// read as zero.
template <typename T>
INTERLACE_DEVICE Words<T> load_words(const T* array, int64_t index, int64_t count, bool wide) {
  constexpr int kElements = Words<T>::kElements;
  const int64_t first = index * kElements;
  if (wide && first + kElements <= count) return *reinterpret_cast<const Words<T>*>(array + first);
  using Bits = typename BitsOf<T>::Type;
  typedef Bits __attribute__((may_alias)) AliasedBits;
  const auto* const bits = reinterpret_cast<const AliasedBits*>(array + first);
  Words<T> packed{};
  INTERLACE_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (first + i >= count) continue;
    const uint64_t element = bits[i];
    const int at = i * static_cast<int>(sizeof(T));
    packed.words[at / 4] |= static_cast<uint32_t>(element << (at % 4 * 8));
    if constexpr (sizeof(T) == 8) packed.words[at / 4 + 1] = static_cast<uint32_t>(element >> 32);
  }
  return packed;
}

template <typename T>
INTERLACE_DEVICE void store_words(T* array, int64_t index, int64_t count, bool wide, const Words<T>& packed) {
  constexpr int kElements = Words<T>::kElements;
  const int64_t first = index * kElements;
  if (wide && first + kElements <= count) {
    *reinterpret_cast<Words<T>*>(array + first) = packed;
    return;
  }
  using Bits = typename BitsOf<T>::Type;
  typedef Bits __attribute__((may_alias)) AliasedBits;
  auto* const bits = reinterpret_cast<AliasedBits*>(array + first);
  INTERLACE_UNROLL
  for (int i = 0; i < kElements; ++i) {
    const int at = i * static_cast<int>(sizeof(T));
    uint64_t element = packed.words[at / 4] >> (at % 4 * 8);
    if constexpr (sizeof(T) == 8) element |= static_cast<uint64_t>(packed.words[at / 4 + 1]) << 32;
    if (first + i < count) bits[i] = static_cast<Bits>(element);
  }
}

}  // namespace interlace
