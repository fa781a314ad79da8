// Switching between stacks. The C library's swapcontext enters the kernel each time to save the signal mask; emulated
// threads switch a million times in a test.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emu/sanitizer.h"

#if defined(__x86_64__)
// Saves the registers that a call must keep, then the stack pointer in *rdi; goes on from the stack in rsi.
asm(R"(
.text
.weak interlace_emu_switch
.type interlace_emu_switch, @function
interlace_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size interlace_emu_switch, .-interlace_emu_switch
)");
extern "C" void interlace_emu_switch(void** from, void* to);
#else
#include <ucontext.h>
#endif

namespace interlace::emu {

// A place to go on from: a stack, and the registers on it.
struct Context {
#if defined(__x86_64__)
  void* stack_pointer = nullptr;

  // The first switch to it calls `entry`, which never returns.
  void prepare(char* stack, size_t bytes, void (*entry)()) {
    constexpr int kSavedRegisters = 6;
    const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15};
    void** slots = reinterpret_cast<void**>(top);
    *--slots = nullptr;  // no return address; keeps the alignment that a call leaves
    *--slots = reinterpret_cast<void*>(entry);
    for (int i = 0; i < kSavedRegisters; ++i) *--slots = nullptr;
    stack_pointer = slots;
  }
  INTERLACE_EMU_HIDDEN void switch_to(Context& other) {
    interlace_emu_switch(&stack_pointer, other.stack_pointer);
  }
#else
  ucontext_t state;

  void prepare(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = bytes;
    state.uc_link = nullptr;
    makecontext(&state, entry, 0);
  }
  INTERLACE_EMU_HIDDEN void switch_to(Context& other) { swapcontext(&state, &other.state); }
#endif
};

}  // namespace interlace::emu
