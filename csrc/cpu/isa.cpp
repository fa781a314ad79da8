#include "cpu/isa.h"

#include <atomic>
#include <cstring>

namespace interlace {
namespace {

const Isa* best(const char* cap) {
#if !defined(INTERLACE_NO_X86)
  const bool generic_only = std::strcmp(cap, "generic") == 0;
  const bool at_most_avx2 = std::strcmp(cap, "avx2") == 0;
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !generic_only && !at_most_avx2) return &isa_avx512();
  if (has_avx2 && !generic_only) return &isa_avx2();
#endif
  (void)cap;
  return &isa_generic();
}

std::atomic<const Isa*> chosen{nullptr};

}  // namespace

const Isa& isa() {
  const Isa* table = chosen.load(std::memory_order_relaxed);
  if (table == nullptr) chosen.store(table = best(""), std::memory_order_relaxed);
  return *table;
}

void cap_isa(const char* name) { chosen.store(best(name), std::memory_order_relaxed); }

}  // namespace interlace
