// torch's batch-reduce GEMM microkernels (oneDNN underneath), found at load by name: they are exported and have an
// installed header, but are not part of the stable ABI. When they are gone, the library path takes over.
#pragma once

#include <cstdint>

#include "core/call.h"
#include "core/heuristics.h"

namespace interlace {

Engine engine();  // looked up and tried out once

// c[rows][ld_c] (+)= a[rows][depth] * b[depth][kTileColumns]; bf16: b holds pairs of rows interleaved.
void brgemm(Dtype dtype, int64_t rows, int64_t depth, int64_t ld_a, int64_t ld_c, bool accumulate,
            const void* a, const void* b, float* c);
void brgemm_release();  // gives the AMX tile state back; after the last call of an op on each thread

}  // namespace interlace
