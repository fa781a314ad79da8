// device.cuh, and the matrix instructions that every GPU since sm_80 has: cp.async, ldmatrix, mma.
#pragma once

#include "cuda/kernels/device.cuh"

#if defined(__CUDACC__)
#include "cuda/kernels/ptx_sm80.cuh"
#else
#include "emu/ptx_sm80.h"
#endif
