// The kernels for any processor: what the compiler's baseline gives (SSE2 on x86-64, NEON on AArch64).
#include "core/signal.h"
#include "cpu/isa.h"

namespace interlace {
namespace isa_generic_kernels {

constexpr int kWidth = 4;
#include "cpu/isa_kernels.inl"

void stream_tile(Dtype wire, void* out, const float* tile, int64_t n) {
  store_tile(wire, out, n, tile, 1, n, nullptr);
}
void stream_fence() {}

}  // namespace isa_generic_kernels

const Isa& isa_generic() {
  using namespace isa_generic_kernels;
  static const Isa table{"generic",        sum,        sum_rows,
                         add_tile,         store_tile, stream_tile,
                         stream_fence,     widen,      transpose_words_plain,
                         interleave_pairs, dot_tile,   panel_tile};
  return table;
}

}  // namespace interlace
