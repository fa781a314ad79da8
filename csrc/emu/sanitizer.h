// ThreadSanitizer's fiber interface, or nothing when it is off.
//
// ThreadSanitizer sees identities: one per CUDA thread in small blocks, one per warp in large ones (an identity costs
// milliseconds), one per asynchronous engine. It is told that switching between them orders nothing: two threads of one
// block race unless a barrier or a release/acquire pair stands between them, as on the device.
//
// What it cannot see: a struct that a function returns straight into shared memory. GCC takes such a return slot for
// local memory. Kernels receive the value first and store it in a statement of its own. The same holds for a struct in
// memory that is passed to a function by value: it is loaded in a statement of its own first.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#if defined(__SANITIZE_THREAD__)
#define INTERLACE_EMU_TSAN 1
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, long bytes);
void __tsan_write_range(void* address, long bytes);
}
#else
#define INTERLACE_EMU_TSAN 0
#endif

// The emulator's own state is shared by all fibers of a block without any order that ThreadSanitizer could see.
// Functions that touch it carry this mark, and keep to plain arrays: a call of an instrumented function would report.
#define INTERLACE_EMU_HIDDEN __attribute__((no_sanitize_thread, noinline))
// The same for small functions that hidden ones call in loops.
#define INTERLACE_EMU_HIDDEN_INLINE __attribute__((no_sanitize_thread, always_inline)) inline

namespace interlace::emu {

#if INTERLACE_EMU_TSAN
INTERLACE_EMU_HIDDEN inline void* current_identity() { return __tsan_get_current_fiber(); }
INTERLACE_EMU_HIDDEN inline void* create_identity() { return __tsan_create_fiber(0); }
// From here on the caller is `identity`. Between threads it must stand directly before the switch of stacks. The switch
// orders nothing.
INTERLACE_EMU_HIDDEN inline void become(void* identity) {
  constexpr unsigned kNoOrder = 1;
  __tsan_switch_to_fiber(identity, kNoOrder);
}
// What this identity did so far becomes visible to whoever acquires the tag later.
INTERLACE_EMU_HIDDEN inline void release_tag(void* tag) { __tsan_release(tag); }
INTERLACE_EMU_HIDDEN inline void acquire_tag(void* tag) { __tsan_acquire(tag); }
// Accesses that hidden code does for the current identity.
INTERLACE_EMU_HIDDEN inline void note_read(const void* address, size_t bytes) {
  __tsan_read_range(const_cast<void*>(address), static_cast<long>(bytes));
}
INTERLACE_EMU_HIDDEN inline void note_write(void* address, size_t bytes) {
  __tsan_write_range(address, static_cast<long>(bytes));
}
#else
inline void* current_identity() { return nullptr; }
inline void* create_identity() { return nullptr; }
inline void become(void*) {}
inline void release_tag(void*) {}
inline void acquire_tag(void*) {}
inline void note_read(const void*, size_t) {}
inline void note_write(void*, size_t) {}
#endif

// Identities are used again: whoever gives one back has been joined by then, so what an identity still knows of its
// former life is known to everybody.
class Identities {
 public:
  static void* take() {
    const std::lock_guard lock(mutex());
    if (free().empty()) return create_identity();
    void* identity = free().back();
    free().pop_back();
    return identity;
  }
  static void give_back(void* identity) {
    const std::lock_guard lock(mutex());
    free().push_back(identity);
  }

 private:
  static std::mutex& mutex() {
    static std::mutex the_mutex;
    return the_mutex;
  }
  static std::vector<void*>& free() {
    static std::vector<void*> identities;
    return identities;
  }
};

}  // namespace interlace::emu
