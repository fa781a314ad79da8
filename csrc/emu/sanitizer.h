// ThreadSanitizer's fiber interface, or nothing when it is off.
//
// Every CUDA thread is a fiber, and ThreadSanitizer is told that switching between fibers orders nothing: two threads
// of one block race unless a barrier or a release/acquire pair stands between them, as on the device.
//
// What it cannot see: a struct that a function returns straight into shared memory. GCC takes such a return slot for
// local memory. Kernels receive the value first and store it in a statement of its own.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define INTERLACE_EMU_TSAN 1
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
#define INTERLACE_EMU_TSAN 0
#endif

// The emulator's own state is shared by all fibers of a block without any order that ThreadSanitizer could see.
// Functions that touch it carry this mark, and keep to plain arrays: a call of an instrumented function would report.
#define INTERLACE_EMU_HIDDEN __attribute__((no_sanitize_thread, noinline))

namespace interlace::emu {

#if INTERLACE_EMU_TSAN
inline void* current_fiber_id() { return __tsan_get_current_fiber(); }
inline void* create_fiber_id() { return __tsan_create_fiber(0); }
// Must stand directly before the switch of stacks. The switch orders nothing.
inline void announce_switch(void* id) {
  constexpr unsigned kNoOrder = 1;
  __tsan_switch_to_fiber(id, kNoOrder);
}
// What the fiber did is ordered before what the caller, fiber `self`, does next; the fiber is gone.
inline void join_fiber(void* id, void* self) {
  announce_switch(id);
  __tsan_switch_to_fiber(self, 0);
  __tsan_destroy_fiber(id);
}
// What this fiber did so far becomes visible to whoever acquires the tag later.
inline void release_tag(void* tag) { __tsan_release(tag); }
inline void acquire_tag(void* tag) { __tsan_acquire(tag); }
#else
inline void* current_fiber_id() { return nullptr; }
inline void* create_fiber_id() { return nullptr; }
inline void announce_switch(void*) {}
inline void join_fiber(void*, void*) {}
inline void release_tag(void*) {}
inline void acquire_tag(void*) {}
#endif

}  // namespace interlace::emu
