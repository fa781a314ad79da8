// A wgmma operand in shared memory: where the bits of its descriptor say that its elements lie, and what they are as
// fp32.
#pragma once

#include <cstdint>

#include "emu/number.h"
#include "emu/shared_memory.h"

namespace interlace::emu {

enum class Element : uint8_t { kBf16, kF16, kE4m3 };

constexpr int kOperandBytes = 32;  // of one row along K, in every format
constexpr int kMaxDepth = 32;  // elements of it

// The fields of a descriptor (PTX ISA, "Matrix Descriptor Format"). Swizzle: 0 none, 1 128 bytes, 2 64, 3 32.
struct Operand {
  uint32_t start, leading, stride;  // bytes
  uint32_t swizzle;
  bool transposed;  // M or N contiguous in place of K
  Element element;

  INTERLACE_EMU_HIDDEN static Operand decode(uint64_t descriptor, bool transposed, Element element) {
    constexpr uint64_t kReserved = 0x3ff1'c000'c000'c000u | 0x000e'0000'0000'0000u;
    if ((descriptor & kReserved) != 0) {
      misuse("wgmma: descriptor %016llx: reserved bits or a base offset",
             static_cast<unsigned long long>(descriptor));
    }
    Operand operand;
    operand.start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
    operand.leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
    operand.stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
    operand.swizzle = static_cast<uint32_t>(descriptor >> 62);
    operand.transposed = transposed;
    operand.element = element;
    if (transposed && (operand.swizzle != 1 || element == Element::kE4m3)) {
      misuse("wgmma: a transposed operand needs 16-bit elements and, here, the 128-byte swizzle");
    }
    return operand;
  }

  INTERLACE_EMU_HIDDEN_INLINE uint32_t swizzled(uint32_t address) const {
    constexpr uint32_t kMask[4] = {0, 7, 3, 1};
    return address ^ ((address / 128 & kMask[swizzle]) * 16);
  }
  // 16 bytes of row `row`: the first or second half of its 32 bytes along K.
  INTERLACE_EMU_HIDDEN_INLINE uint32_t along_depth(uint32_t row, uint32_t half) const {
    constexpr uint32_t kRowBytes[4] = {16, 128, 64, 32};
    const uint32_t across = swizzle == 0 ? leading : 16;
    return swizzled(start + row / 8 * stride + row % 8 * kRowBytes[swizzle] + half * across);
  }
  // 16 bytes of depth k, transposed: rows 8 * piece to 8 * piece + 7.
  INTERLACE_EMU_HIDDEN_INLINE uint32_t along_rows(uint32_t k, uint32_t piece) const {
    return swizzled(start + piece / 8 * leading + piece % 8 * 16 + k % 8 * 128 + k / 8 * stride);
  }
};

// Eight or sixteen elements.
class ElementReader {
 public:
  ElementReader() : half_(float16_table()), eighth_(e4m3_table()) {}

  INTERLACE_EMU_HIDDEN_INLINE int read(const char* from, Element element, float* to) const {
    if (element == Element::kE4m3) {
      for (int i = 0; i < 16; ++i) to[i] = eighth_[static_cast<uint8_t>(from[i])];
      return 16;
    }
    uint16_t bits[8];
    __builtin_memcpy(bits, from, 16);
    for (int i = 0; i < 8; ++i) {
      to[i] = element == Element::kF16 ? half_[bits[i]]
                                       : __builtin_bit_cast(float, static_cast<uint32_t>(bits[i]) << 16);
    }
    return 8;
  }

 private:
  const float* const half_;
  const float* const eighth_;
};

// Rows [first, first + rows) as matrix[k][row - first].
INTERLACE_EMU_HIDDEN inline void read_operand(const SharedMemory& shared, const ElementReader& reader,
                                              const Operand& operand, uint32_t first, uint32_t rows,
                                              float (*matrix)[256]) {
  constexpr const char* kWhat = "wgmma operand";
  float elements[16];
  if (operand.transposed) {
    for (uint32_t k = 0; k < 16; ++k) {
      for (uint32_t piece = 0; piece < rows / 8; ++piece) {
        reader.read(shared.at(operand.along_rows(k, first / 8 + piece), 16, 16, kWhat), operand.element,
                    &matrix[k][piece * 8]);
      }
    }
    return;
  }
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t half = 0; half < 2; ++half) {
      const char* from = shared.at(operand.along_depth(first + row, half), 16, 16, kWhat);
      const int count = reader.read(from, operand.element, elements);
      for (int i = 0; i < count; ++i) matrix[half * static_cast<uint32_t>(count) + i][row] = elements[i];
    }
  }
}

// The current identity reads those rows.
INTERLACE_EMU_HIDDEN inline void note_operand(const SharedMemory& shared, const Operand& operand,
                                              uint32_t first, uint32_t rows) {
  if (!INTERLACE_EMU_TSAN) return;
  const uint32_t count = operand.transposed ? 16 * rows / 16 : rows;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t address = operand.transposed ? operand.along_rows(i % 16, first / 8 + i / 16 * 2)
                                                : operand.along_depth(first + i, 0);
    note_read(shared.at(address & ~(kSectorBytes - 1), kSectorBytes, kSectorBytes, "wgmma operand"), 8);
  }
}

}  // namespace interlace::emu
