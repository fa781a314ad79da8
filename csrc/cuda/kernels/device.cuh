// The device as the kernels see it: instructions under nvcc, emulated threads (csrc/emu) under any other compiler.
// The one place that chooses.
#pragma once

#if defined(__CUDACC__)
#include "cuda/kernels/ptx.cuh"
#else
#include "emu/ptx.h"
#endif
