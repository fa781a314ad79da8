// Elements of operands as numbers.
#pragma once

#include <cmath>

#include "cuda/kernels/element.cuh"
#include "emu/number.h"

namespace interlace::emu {

inline float value_of(BFloat16 element) { return to_float(element); }
inline float value_of(Float16 element) { return to_float(element); }
inline float value_of(Float8E4m3 element) { return float_from_e4m3(element.bits); }

inline void set_value(float value, BFloat16& out) { from_float(value, out); }
inline void set_value(float value, Float16& out) { from_float(value, out); }
inline void set_value(float value, Float8E4m3& out) { out.bits = e4m3_from_float(value); }

}  // namespace interlace::emu
