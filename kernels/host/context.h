// Fibers: stacks that one OS thread switches between. Knows nothing of CUDA.
//
// Like the other headers of this folder it uses C headers and compiler built-ins only: the text is compiled again
// with every kernel, and <thread>, <mutex> and <vector> would double the time of a build.
#pragma once
#include <stddef.h>
#include <string.h>

#if defined(__has_feature)  // clang's way of saying what GCC says by macro
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#if __has_feature(thread_sanitizer) && !defined(__SANITIZE_THREAD__)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
// What runs between the fibers belongs to none of them; ThreadSanitizer would call it a race.
#define GDN_BETWEEN_FIBERS __attribute__((no_sanitize("thread"))) inline
#else
#define GDN_BETWEEN_FIBERS inline
#endif

#if !defined(GDN_USE_UCONTEXT) && !defined(__x86_64__) && !defined(__aarch64__)
#define GDN_USE_UCONTEXT 1  // ten times slower than the switches below
#endif
#ifdef GDN_USE_UCONTEXT
#include <ucontext.h>
#endif

namespace gdn_on_cpu {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t STACK_BYTES = 256 * 1024;
#else
constexpr size_t STACK_BYTES = 64 * 1024;  // gdn/backends/host.py has the compiler refuse large frames
#endif
// Not a power of two, or the live ends of all stacks would fall into the same few cache sets.
constexpr size_t STACK_STRIDE = STACK_BYTES + 11 * 64;

// A stack, and where its code goes on when it is switched to.
struct Context {
#ifdef GDN_USE_UCONTEXT
    ucontext_t registers;
#else
    void* stack_pointer;
#endif
    Context* came_from;  // who switched here last
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack;
    const void* stack;
    size_t stack_bytes;
#endif
#ifdef __SANITIZE_THREAD__
    void* tsan_fiber;
#endif
};

}  // namespace gdn_on_cpu

// gdn_switch_stack saves the registers that a call must keep on the running stack, stores the end of that stack
// in *saved, and takes up the stack that ends at `next`.
#ifndef GDN_USE_UCONTEXT
extern "C" void gdn_switch_stack(void** saved, void* next);
#if defined(__x86_64__)
asm(R"(
    .text
    .globl gdn_switch_stack
    .hidden gdn_switch_stack
    .type gdn_switch_stack, @function
gdn_switch_stack:
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
    .size gdn_switch_stack, . - gdn_switch_stack
)");
#else
asm(R"(
    .text
    .globl gdn_switch_stack
    .hidden gdn_switch_stack
    .type gdn_switch_stack, %function
gdn_switch_stack:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size gdn_switch_stack, . - gdn_switch_stack
)");
#endif
#endif

namespace gdn_on_cpu {

// What gdn_switch_stack leaves on a stack, in words, and which of them it returns to.
#if defined(__x86_64__)
constexpr int SAVED_WORDS = 8;  // six registers, the return address, and one that keeps the stack aligned
constexpr int RETURN_ADDRESS = 6;
#else
constexpr int SAVED_WORDS = 20;
constexpr int RETURN_ADDRESS = 11;  // x30
#endif

// Makes `context` start in `entry` on an empty stack. `entry` begins with arrived_on and never returns.
inline void prepare(Context& context, char* stack, void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack, STACK_BYTES);  // an abandoned fiber leaves its red zones behind
    context.fake_stack = nullptr;
    context.stack = stack;
    context.stack_bytes = STACK_BYTES;
#endif
#ifdef GDN_USE_UCONTEXT
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = stack;
    context.registers.uc_stack.ss_size = STACK_BYTES;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
#else
    // What gdn_switch_stack would have left there, had `entry` been about to run.
    auto** end = reinterpret_cast<void**>((reinterpret_cast<size_t>(stack) + STACK_BYTES) & ~size_t{15});
    void** saved = end - SAVED_WORDS;
    memset(saved, 0, SAVED_WORDS * sizeof(void*));
    saved[RETURN_ADDRESS] = reinterpret_cast<void*>(entry);
    context.stack_pointer = saved;
#endif
}

// The first act after a switch, on the stack that was switched to.
GDN_BETWEEN_FIBERS void arrived_on(Context& context) {
#ifdef __SANITIZE_ADDRESS__
    Context& from = *context.came_from;
    __sanitizer_finish_switch_fiber(context.fake_stack, &from.stack, &from.stack_bytes);
#else
    (void)context;
#endif
}

// Goes on in `to`; returns when something switches back to `from`.
GDN_BETWEEN_FIBERS void switch_context(Context& from, Context& to) {
    to.came_from = &from;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef GDN_USE_UCONTEXT
    swapcontext(&from.registers, &to.registers);
#else
    gdn_switch_stack(&from.stack_pointer, to.stack_pointer);
#endif
    arrived_on(from);
}

// What AddressSanitizer takes for memory that nobody may touch, in pieces of 8 bytes.
inline void forbid_access(const void* begin, size_t num_bytes) {
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(begin, num_bytes);
#else
    (void)begin;
    (void)num_bytes;
#endif
}

inline void allow_access(const void* begin, size_t num_bytes) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(begin, num_bytes);
#else
    (void)begin;
    (void)num_bytes;
#endif
}

// The only two ways in which ThreadSanitizer learns of an order between fibers.
inline void happens_before(void* meeting_point) {
#ifdef __SANITIZE_THREAD__
    __tsan_release(meeting_point);
#else
    (void)meeting_point;
#endif
}

inline void happens_after(void* meeting_point) {
#ifdef __SANITIZE_THREAD__
    __tsan_acquire(meeting_point);
#else
    (void)meeting_point;
#endif
}

}  // namespace gdn_on_cpu
