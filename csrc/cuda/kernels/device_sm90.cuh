// device.cuh, and what only sm_90a has: bulk tensor copies, mbarriers, warpgroup matrix products, multimem.
#pragma once

#include "cuda/kernels/device.cuh"

#if defined(__CUDACC__)
#include "cuda/kernels/ptx_sm90.cuh"
#else
#include "emu/ptx_sm90.h"
#endif
