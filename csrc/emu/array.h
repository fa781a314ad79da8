// A tensor of a test: any alignment of its elements, a guard behind its end.
#pragma once

#include <string>
#include <vector>

#include "cuda/kernels/element.cuh"
#include "emu/testing.h"

namespace interlace::emu {

template <typename T> class Array {
 public:
  // `shift` elements into an aligned block. Filled with a value that no test expects.
  explicit Array(int64_t count, int64_t shift = 0) : count_(count), shift_(shift) {
    storage_.resize(static_cast<size_t>((count + shift) / Pack<T>::kElements + 2));
    for (int64_t i = -shift; i <= count; ++i) put(data()[i], kUntouched);
  }
  template <typename Value> Array(int64_t count, int64_t shift, Value value) : Array(count, shift) {
    for (int64_t i = 0; i < count; ++i) put(data()[i], value(i));
  }

  T* data() { return reinterpret_cast<T*>(storage_.data()) + shift_; }
  int64_t count() const { return count_; }
  float at(int64_t i) { return get(data()[i]); }

  // value(i) is what element i must be; nothing may be written before or behind.
  template <typename Value> void expect(const std::string& what, Value value) {
    for (int64_t i = 0; i < count_; ++i) {
      require(at(i) == value(i), what + ", element " + std::to_string(i) + ": " + std::to_string(at(i)) +
                                     " instead of " + std::to_string(value(i)));
    }
    expect_guarded(what);
  }
  void expect_guarded(const std::string& what) {
    require(at(count_) == kUntouched && (shift_ == 0 || at(-1) == kUntouched),
            what + ": written outside the array");
  }

 private:
  static constexpr float kUntouched = 77;  // exact in every format
  static void put(float& out, float value) { out = value; }
  static void put(BFloat16& out, float value) { from_float(value, out); }
  static void put(Float16& out, float value) { from_float(value, out); }
  template <typename Unsigned> static void put(Unsigned& out, float value) {
    out = static_cast<Unsigned>(value);
  }
  template <typename Any> static float get(Any value) {
    if constexpr (std::is_integral_v<Any>) {
      return static_cast<float>(value);
    } else {
      return to_float(value);
    }
  }

  int64_t count_;
  int64_t shift_;
  std::vector<Pack<T>> storage_;
};

}  // namespace interlace::emu
