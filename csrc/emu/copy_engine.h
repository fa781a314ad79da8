// Bulk copies of boxes of a matrix into shared memory. They complete later, in an order drawn from the block's seed; until
// then their destination holds rubbish.
#pragma once

#include <cstdint>

#include "emu/mbarrier.h"
#include "emu/random.h"

namespace interlace::emu {

// What a CUtensorMap of a matrix says. swizzle_bytes 128: 16-byte piece p of a 128-byte row lies at p ^ (row % 8), where
// row counts from a multiple of 1024 bytes; 0: rows lie one after the other.
struct TensorMap {
  const char* base;
  int64_t columns, rows;  // elements; what lies outside reads as zero
  int64_t row_bytes;  // from one row to the next
  int32_t element_bytes;
  int32_t box_columns, box_rows;
  int32_t swizzle_bytes;

  INTERLACE_EMU_HIDDEN_INLINE uint32_t box_row_bytes() const {
    return static_cast<uint32_t>(box_columns * element_bytes);
  }
  INTERLACE_EMU_HIDDEN_INLINE uint32_t box_bytes() const {
    return box_row_bytes() * static_cast<uint32_t>(box_rows);
  }
};

// With the limits that the driver checks when it encodes one.
inline TensorMap make_tensor_map(const void* base, int64_t columns, int64_t rows, int64_t stride,
                                 int element_bytes, int box_columns, int box_rows, int swizzle_bytes = 128) {
  const TensorMap map{static_cast<const char*>(base),
                      columns,
                      rows,
                      stride * element_bytes,
                      element_bytes,
                      box_columns,
                      box_rows,
                      swizzle_bytes};
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0) misuse("tensor map: base %p is not aligned to 16", base);
  if (map.row_bytes % 16 != 0 || map.row_bytes <= 0 || map.row_bytes >= int64_t{1} << 40) {
    misuse("tensor map: %lld bytes between rows; needs a multiple of 16",
           static_cast<long long>(map.row_bytes));
  }
  constexpr int64_t kLimit = int64_t{1} << 32;
  if (columns < 1 || rows < 1 || columns > kLimit || rows > kLimit) {
    misuse("tensor map: %lld x %lld", static_cast<long long>(rows), static_cast<long long>(columns));
  }
  if (box_columns < 1 || box_rows < 1 || box_columns > 256 || box_rows > 256) {
    misuse("tensor map: box of %d x %d; a side has at most 256", box_rows, box_columns);
  }
  const int row = box_columns * element_bytes;
  if (row % 16 != 0 || (swizzle_bytes != 0 && row != swizzle_bytes) ||
      (swizzle_bytes != 0 && swizzle_bytes != 128)) {
    misuse("tensor map: rows of %d bytes with a swizzle of %d", row, swizzle_bytes);
  }
  return map;
}

class CopyEngine {
 public:
  CopyEngine(const SharedMemory& shared, Barriers& barriers)
      : shared_(shared), barriers_(barriers), lanes_(zeroed<Lane>(kLanes)), lane_(lanes_.get()) {}

  // Identities are made for the first kernel that copies.
  void take_identities() {
    if (reader_ != nullptr || !INTERLACE_EMU_TSAN) return;
    reader_ = Identities::take();
    for (uint32_t i = 0; i < kLanes; ++i) lane_[i].identity = Identities::take();
  }
  // By identity `self`, which thereby knows all that the engine did.
  void give_back_identities(void* self) {
    if (reader_ == nullptr) return;
    for (uint32_t i = 0; i <= kLanes; ++i) {
      void* identity = i < kLanes ? lane_[i].identity : reader_;
      become(identity);
      release_tag(&end_tag_);
      become(self);
      acquire_tag(&end_tag_);
      Identities::give_back(identity);
    }
  }
  // What was before the launch is visible to its copies without a fence.
  void begin(void* launch_tag, void* self) {
    if (reader_ == nullptr) return;
    become(reader_);
    acquire_tag(launch_tag);
    become(self);
  }

  // By the identity `self` of the issuing thread, whose last proxy fence released to `fenced_tag`.
  INTERLACE_EMU_HIDDEN void issue(uint32_t address, const TensorMap& map, int32_t column, int32_t row,
                                  Barrier& barrier, void* fenced_tag, void* self, Random& random) {
    constexpr const char* kWhat = "cp_async_bulk_tensor_2d";
    if (!barrier.shown) misuse("%s: no fence_mbarrier_init after the mbarrier's mbarrier_init", kWhat);
    char* const destination = shared_.at(address, map.box_bytes(), 128, kWhat);
    for (uint32_t i = 0; i < map.box_bytes(); ++i) destination[i] = static_cast<char>(kPoison);
    // the reads, as the asynchronous proxy is allowed to see memory: as of the last fence
    if (reader_ != nullptr) {
      become(reader_);
      acquire_tag(fenced_tag);
      note_global_reads(map, column, row);
      become(self);
    }
    Lane& lane = lane_[random.below(kLanes)];
    if (lane.count == kDepth) misuse("%s: more than %u copies on the way", kWhat, kDepth);
    Copy& copy = lane.copies[(lane.first + lane.count++) % kDepth];
    ++pending_;
    copy.address = address;
    copy.map = map;
    copy.column = column;
    copy.row = row;
    copy.barrier = &barrier;
    release_tag(&copy.tag);
  }

  INTERLACE_EMU_HIDDEN uint32_t pending() const { return pending_; }

  // One copy arrives. True when that completes a phase of its barrier. Returns as identity `self`.
  INTERLACE_EMU_HIDDEN bool step(void* self, Random& random) {
    uint32_t chosen = random.below(kLanes);
    while (lane_[chosen].count == 0) chosen = (chosen + 1) % kLanes;
    Lane& lane = lane_[chosen];
    Copy& copy = lane.copies[lane.first];
    lane.first = (lane.first + 1) % kDepth;
    --lane.count;
    --pending_;
    move(copy);
    if (reader_ == nullptr) return barriers_.receive(*copy.barrier, copy.map.box_bytes());
    become(reader_);
    release_tag(&copy.barrier->tag[copy.barrier->phase & 1]);
    become(lane.identity);
    acquire_tag(&copy.tag);
    note_global_reads(copy.map, copy.column, copy.row);
    note_shared_writes(copy);
    const bool completed = barriers_.receive(*copy.barrier, copy.map.box_bytes());
    become(self);
    return completed;
  }

 private:
  static constexpr uint32_t kLanes = 3;  // each in order, all side by side
  static constexpr uint32_t kDepth = 64;

  struct Copy {
    uint32_t address;
    TensorMap map;
    int32_t column, row;
    Barrier* barrier;
    char tag;  // orders the issuing thread before the copy
  };
  struct Lane {
    Copy copies[kDepth];
    uint32_t first, count;
    void* identity;
  };

  INTERLACE_EMU_HIDDEN static void note_global_reads(const TensorMap& map, int32_t column, int32_t row) {
    const int64_t first = column < 0 ? 0 : column;
    const int64_t end = column + map.box_columns < map.columns ? column + map.box_columns : map.columns;
    for (int32_t r = 0; r < map.box_rows; ++r) {
      if (row + r < 0 || row + r >= map.rows || first >= end) continue;
      note_read(map.base + (row + r) * map.row_bytes + first * map.element_bytes,
                static_cast<size_t>((end - first) * map.element_bytes));
    }
  }
  INTERLACE_EMU_HIDDEN void note_shared_writes(const Copy& copy) const {
    char* const destination = shared_.start() + (copy.address - kFirstAddress);
    const uint32_t bytes = copy.map.box_bytes();
    for (uint32_t i = 0; i < bytes; i += kSectorBytes) note_write(destination + i, 8);
  }
  INTERLACE_EMU_HIDDEN void move(const Copy& copy) const {
    const TensorMap& map = copy.map;
    const uint32_t row_bytes = map.box_row_bytes();
    const int32_t piece_elements = 16 / map.element_bytes;
    for (int32_t r = 0; r < map.box_rows; ++r) {
      const int64_t row = copy.row + r;
      const char* const source = map.base + row * map.row_bytes;
      for (uint32_t piece = 0; piece < row_bytes / 16; ++piece) {
        uint32_t address = copy.address + static_cast<uint32_t>(r) * row_bytes + piece * 16;
        if (map.swizzle_bytes == 128) address ^= (address / 128 % 8) * 16;
        char* const to = shared_.start() + (address - kFirstAddress);
        const int64_t column = copy.column + static_cast<int32_t>(piece) * piece_elements;
        const bool inside = row >= 0 && row < map.rows;
        if (inside && column >= 0 && column + piece_elements <= map.columns) {
          __builtin_memcpy(to, source + column * map.element_bytes, 16);
          continue;
        }
        for (int32_t i = 0; i < 16; ++i) {
          const int64_t at = column + i / map.element_bytes;
          const bool valid = inside && at >= 0 && at < map.columns;
          to[i] = valid ? source[column * map.element_bytes + i] : 0;
        }
      }
    }
  }

  const SharedMemory& shared_;
  Barriers& barriers_;
  std::unique_ptr<Lane[], Free> lanes_;
  Lane* const lane_;
  void* reader_ = nullptr;
  uint32_t pending_ = 0;
  char end_tag_ = 0;
};

}  // namespace interlace::emu
