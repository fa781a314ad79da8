// Element types of the kernels, and packs of 16 bytes: the widest load of a thread.
#pragma once

#include <cstdint>

#include "cuda/kernels/device.cuh"

namespace interlace {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8E4m3 {  // operand of products only
  uint8_t bits;
};

INTERLACE_DEVICE float to_float(float value) { return value; }
INTERLACE_DEVICE float to_float(BFloat16 value) {
  return ptx::mov_b32_f32(static_cast<uint32_t>(value.bits) << 16);
}
INTERLACE_DEVICE float to_float(Float16 value) { return ptx::cvt_f32_f16(value.bits); }

INTERLACE_DEVICE void from_float(float value, float& out) { out = value; }
INTERLACE_DEVICE void from_float(float value, BFloat16& out) { out.bits = ptx::cvt_rn_bf16_f32(value); }
INTERLACE_DEVICE void from_float(float value, Float16& out) { out.bits = ptx::cvt_rn_f16_f32(value); }

constexpr int kPackBytes = 16;

template <typename T> struct alignas(kPackBytes) Pack {
  static constexpr int kElements = kPackBytes / sizeof(T);
  T elements[kElements];
};

// Pack number `index` of an array of `count` elements. `wide`: the array is aligned to 16 bytes. Elements beyond the
// end read as zero.
template <typename T>
INTERLACE_DEVICE Pack<T> load_pack(const T* array, int64_t index, int64_t count, bool wide) {
  constexpr int kElements = Pack<T>::kElements;
  const int64_t first = index * kElements;
  if (wide && first + kElements <= count) return *reinterpret_cast<const Pack<T>*>(array + first);
  Pack<T> pack{};
  INTERLACE_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (first + i < count) pack.elements[i] = array[first + i];
  }
  return pack;
}

template <typename T>
INTERLACE_DEVICE void store_pack(T* array, int64_t index, int64_t count, bool wide, const Pack<T>& pack) {
  constexpr int kElements = Pack<T>::kElements;
  const int64_t first = index * kElements;
  if (wide && first + kElements <= count) {
    *reinterpret_cast<Pack<T>*>(array + first) = pack;
    return;
  }
  INTERLACE_UNROLL
  for (int i = 0; i < kElements; ++i) {
    if (first + i < count) array[first + i] = pack.elements[i];
  }
}

INTERLACE_DEVICE bool aligned_to_pack(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kPackBytes == 0;
}

}  // namespace interlace
