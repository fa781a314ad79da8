// Matrix descriptors of wgmma: how it finds a tile in shared memory. One text for the device and the emulator, which
// decodes the bits.
#pragma once

#include <cstdint>

#include "core/qualifiers.h"

namespace interlace {

// Tiles are written by TMA with the 128-byte swizzle: rows of 128 bytes, eight rows (1024 bytes, aligned) repeat the
// pattern, and the 16-byte chunk c of row r lies at place c ^ (r % 8).
constexpr uint32_t kSwizzleRowBytes = 128;
constexpr uint32_t kSwizzleAtomBytes = 1024;

// Bits 0..13 start / 16, 16..29 leading offset / 16, 32..45 stride offset / 16, 49..51 base offset (0: atoms are
// aligned), 62..63 swizzle (1: 128 bytes). PTX ISA, "Matrix descriptor format" of wgmma.
INTERLACE_HD constexpr uint64_t matrix_descriptor(uint32_t start, uint32_t leading_bytes,
                                                  uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return static_cast<uint64_t>((start & 0x3ffff) >> 4) | static_cast<uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | kSwizzle128;
}

// K-major: a row is 128 bytes of K. The stride offset leads from eight rows to the next eight; the leading offset is
// not used with this swizzle (1 by convention). The next 32 bytes of K: start + 32, since the swizzle is applied to
// addresses, not to offsets.
INTERLACE_HD constexpr uint64_t k_major_descriptor(uint32_t start) {
  return matrix_descriptor(start, 16, kSwizzleAtomBytes);
}

// MN-major, 2-byte elements: a row is 64 columns of one k. The stride offset leads from eight k to the next eight, the
// leading offset from 64 columns to the next 64, which TMA wrote as a box of its own. The next 16 k: start + 2048.
INTERLACE_HD constexpr uint64_t mn_major_descriptor(uint32_t start, uint32_t box_bytes) {
  return matrix_descriptor(start, box_bytes, kSwizzleAtomBytes);
}

// What to add to a descriptor so that it starts `bytes` later.
INTERLACE_HD constexpr uint64_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

static_assert(k_major_descriptor(0x400) == (0x4000004000010000ull | 0x40));

}  // namespace interlace
