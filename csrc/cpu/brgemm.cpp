#include "cpu/brgemm.h"

#include <dlfcn.h>

#include <cstring>
#include <exception>

#include "cpu/isa.h"

namespace interlace {
namespace {

// The mangled names are those of torch 2.11 to 2.14; the types behind the pointers do not matter to the call.
using BrgemmFunction = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, const void*,
                                const void*, float*, bool);
using ReleaseFunction = void (*)(bool);

struct Functions {
  BrgemmFunction float32 = nullptr;
  BrgemmFunction bfloat16 = nullptr;
  ReleaseFunction release = nullptr;
  Engine engine;
};

// Does a product of ones come out right? Throws or returns nonsense where the processor lacks the instructions.
template <class T> bool works(BrgemmFunction function, T one, bool pairs) {
  constexpr int64_t kRows = 2, kDepth = 4;
  T a[kRows * kDepth];
  T b[kDepth * kTileColumns];
  float c[kRows * kTileColumns] = {};
  for (T& value : a) value = one;
  for (T& value : b) value = one;
  try {
    function(kRows, kTileColumns, kDepth, kDepth, kTileColumns, kTileColumns, false, a, b, c, pairs);
  } catch (const std::exception&) {
    return false;
  }
  for (float value : c) {
    if (value != static_cast<float>(kDepth)) return false;
  }
  return true;
}

Functions look_up() {
  Functions found;
  void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return found;
  auto symbol = [library](const char* name) { return dlsym(library, name); };
  found.float32 = reinterpret_cast<BrgemmFunction>(symbol("_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"));
  found.bfloat16 =
      reinterpret_cast<BrgemmFunction>(symbol("_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"));
  found.release = reinterpret_cast<ReleaseFunction>(symbol("_ZN2at6native7cpublas14brgemm_releaseEb"));
  if (found.release == nullptr) return found;
  found.engine.float32_tiles = found.float32 != nullptr && works(found.float32, 1.0f, false);
  found.engine.bfloat16_tiles = found.bfloat16 != nullptr && works(found.bfloat16, uint16_t{0x3f80}, true);
  found.release(true);
  return found;
}

const Functions& functions() {
  static const Functions found = look_up();
  return found;
}

}  // namespace

Engine engine() {
  // the microkernels are AVX-512 code: a cap below that (INTERLACE_ISA) must show what such a machine would do
  return std::strcmp(isa().name, "avx512") == 0 ? functions().engine : Engine{};
}

void brgemm(Dtype dtype, int64_t rows, int64_t depth, int64_t ld_a, int64_t ld_c, bool accumulate,
            const void* a, const void* b, float* c) {
  const bool pairs = dtype == Dtype::kBFloat16;
  const auto function = pairs ? functions().bfloat16 : functions().float32;
  function(rows, kTileColumns, depth, ld_a, kTileColumns, ld_c, accumulate, a, b, c, pairs);
}

void brgemm_release() {
  if (functions().release != nullptr) functions().release(true);
}

}  // namespace interlace
