// Runs the threads of a CUDA block on one OS thread: a fiber for each, and the waiting between them.
//
// 1. A fiber runs until it has to wait in a barrier or a warp collective, then switches to a fiber that can go on.
// 2. Who can go on is kept in bit masks, one bit per lane, so a switch costs a few instructions.
// 3. When threads are left but none can go on, a collective was mis-used: the block ends with a message.
// 4. Blocks are independent and are shared out over OS threads (launch.h).
//
// Only C headers and compiler built-ins: this text is compiled again with every kernel, and <thread>, <mutex>
// and <vector> would triple the time it takes. `static thread_local` stands for CUDA's __shared__, so a fiber
// never changes its OS thread.
#pragma once
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__has_feature)
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
// The scheduler's own data is touched by every fiber and would be reported as a race.
#define GDN_SCHEDULER __attribute__((no_sanitize("thread"))) inline
#else
#define GDN_SCHEDULER inline
#endif
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

struct uint3 {
    unsigned int x, y, z;
};
using dim3 = uint3;

namespace gdn_on_cpu {

constexpr unsigned WARP_SIZE = 32;
constexpr unsigned MAX_WARPS = 32;
constexpr unsigned MAX_THREADS = WARP_SIZE * MAX_WARPS;
constexpr unsigned NO_THREAD = ~0u;
constexpr unsigned POISON = ~0u;  // a NaN as float32, -1 as an integer

#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 * 1024;
#else
constexpr size_t STACK_BYTES = 64 * 1024;
#endif
// Not a power of two: the live ends of all stacks would fall into the same few cache sets.
constexpr size_t STACK_STRIDE = STACK_BYTES + 11 * 64;

// ---- Contexts: where a fiber (or the OS thread that runs the block) goes on ----

struct Context {
#if defined(__x86_64__) || defined(__aarch64__)
    void* stack_pointer;
#else
    ucontext_t registers;
#endif
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

// Saves the callee-saved registers on the running stack, notes its end in *saved, and goes on at `next`.
#if defined(__x86_64__)
extern "C" void gdn_switch_stack(void** saved, void* next);
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
#elif defined(__aarch64__)
extern "C" void gdn_switch_stack(void** saved, void* next);
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

namespace gdn_on_cpu {

// Makes `context` start in `entry` on an empty stack when it is switched to. `entry` must not return.
inline void prepare(Context& context, char* stack, void (*entry)()) {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack, STACK_BYTES);  // an abandoned fiber leaves its red zones behind
    context.fake_stack = nullptr;
    context.stack = stack;
    context.stack_bytes = STACK_BYTES;
#endif
#if defined(__x86_64__)
    // From the top: a zero as return address of `entry`, `entry` for `ret`, six registers.
    void** top = reinterpret_cast<void**>((reinterpret_cast<size_t>(stack) + STACK_BYTES) & ~size_t{15});
    memset(top - 8, 0, 8 * sizeof(void*));
    top[-2] = reinterpret_cast<void*>(entry);
    context.stack_pointer = top - 8;
#elif defined(__aarch64__)
    // Twenty saved registers; x30, the return address, is the twelfth.
    void** top = reinterpret_cast<void**>((reinterpret_cast<size_t>(stack) + STACK_BYTES) & ~size_t{15});
    memset(top - 20, 0, 20 * sizeof(void*));
    top[-20 + 11] = reinterpret_cast<void*>(entry);
    context.stack_pointer = top - 20;
#else
    getcontext(&context.registers);
    context.registers.uc_stack.ss_sp = stack;
    context.registers.uc_stack.ss_size = STACK_BYTES;
    context.registers.uc_link = nullptr;
    makecontext(&context.registers, entry, 0);
#endif
}

// ---- A block: its warps, its barrier, its fibers ----

enum Collective : unsigned { SYNCWARP, SHFL, SHFL_XOR, SHFL_DOWN, BALLOT, ANY };

inline const char* collective_name(Collective collective) {
    constexpr const char* NAMES[] = {"__syncwarp",       "__shfl_sync",   "__shfl_xor_sync",
                                     "__shfl_down_sync", "__ballot_sync", "__any_sync"};
    return NAMES[collective];
}

// One bit or one entry per lane.
struct Warp {
    unsigned present;        // lanes that the size of the block gives this warp
    unsigned alive;          // ... and that have not returned from the kernel
    unsigned at_barrier;     // wait in __syncthreads
    unsigned in_collective;  // wait in a warp collective, described by the arrays below

    Collective collective[WARP_SIZE];
    unsigned members[WARP_SIZE];  // the mask that the lane passed
    unsigned value[WARP_SIZE];
    unsigned source[WARP_SIZE];  // the lane whose value it asks for
    unsigned result[WARP_SIZE];

    unsigned ready() const { return alive & ~at_barrier & ~in_collective; }
};

struct Grid {
    void (*kernel)(void** arguments);
    void** arguments;
    unsigned num_blocks;
    unsigned threads_per_block;
    unsigned long long order_seed;  // 0: threads take turns in plain order
};

struct Block {
    const Grid* grid;
    unsigned block_idx;
    unsigned num_warps;
    unsigned num_alive;
    unsigned num_at_barrier;
    unsigned long long random;  // state of the generator; 0 in plain order
    Warp warps[MAX_WARPS];

    char* stacks;
    unsigned num_stacks;
    Context fibers[MAX_THREADS];
    Context outside;           // the OS thread, in run_block
    const Context* switched_from;
    char error[256];           // empty while all is well
    Block* next_idle;
};

// What the built-in variables read. One struct, so that poisoning shared memory can step around it.
struct Here {
    Block* block;
    uint3 thread_idx;
    uint3 block_idx;
    dim3 block_dim;
    dim3 grid_dim;
};
inline thread_local Here here;

inline Warp& warp_of(unsigned thread) { return here.block->warps[thread / WARP_SIZE]; }

// First act on a stack that was switched to.
GDN_SCHEDULER void arrived_on(Context& context) {
#ifdef __SANITIZE_ADDRESS__
    auto* from = const_cast<Context*>(here.block->switched_from);
    __sanitizer_finish_switch_fiber(context.fake_stack, &from->stack, &from->stack_bytes);
#endif
    (void)context;
}

GDN_SCHEDULER void switch_context(Context& from, Context& to) {
    here.block->switched_from = &from;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#endif
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(to.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(__x86_64__) || defined(__aarch64__)
    gdn_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.registers, &to.registers);
#endif
    arrived_on(from);
}

// ThreadSanitizer learns an order between threads only from these two.
inline void happens_before(void* meeting_point) {
#ifdef __SANITIZE_THREAD__
    __tsan_release(meeting_point);
#endif
    (void)meeting_point;
}

inline void happens_after(void* meeting_point) {
#ifdef __SANITIZE_THREAD__
    __tsan_acquire(meeting_point);
#endif
    (void)meeting_point;
}

// splitmix64: every state, 0 too, gives a good next one.
inline unsigned long long mix(unsigned long long state) {
    state += 0x9e3779b97f4a7c15ull;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ull;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebull;
    return state ^ (state >> 31);
}

// A thread that can go on, or NO_THREAD. Plain order stays in the warp of `last`, whose stacks are in the cache;
// random order starts looking anywhere.
GDN_SCHEDULER unsigned next_ready(Block& block, unsigned last) {
    unsigned first_warp = last / WARP_SIZE;
    unsigned first_lane = (last + 1) % WARP_SIZE;
    if (block.random != 0) {
        const unsigned long long drawn = mix(++block.random);
        first_warp = static_cast<unsigned>(drawn >> 32) % block.num_warps;
        first_lane = static_cast<unsigned>(drawn) % WARP_SIZE;
    }
    for (unsigned i = 0; i < block.num_warps; ++i) {
        const unsigned warp_idx = (first_warp + i) % block.num_warps;
        const unsigned ready = block.warps[warp_idx].ready();
        if (ready == 0) continue;
        const unsigned from_first = (ready >> first_lane) << first_lane;
        return warp_idx * WARP_SIZE + static_cast<unsigned>(__builtin_ctz(from_first != 0 ? from_first : ready));
    }
    return NO_THREAD;
}

// Ends the block: its fibers are abandoned where they stand (kernels own nothing that would have to be freed).
[[noreturn]] GDN_SCHEDULER void abandon_block() {
    Block& block = *here.block;
    switch_context(block.fibers[here.thread_idx.x], block.outside);
    __builtin_unreachable();
}

GDN_SCHEDULER void report_deadlock(Block& block) {
    unsigned num_returned = block.grid->threads_per_block - block.num_alive;
    int length = snprintf(block.error, sizeof block.error,
                          "block %u: its threads wait for each other: %u in __syncthreads, %u have returned",
                          block.block_idx, block.num_at_barrier, num_returned);
    for (unsigned thread = 0; thread < block.grid->threads_per_block; ++thread) {
        const Warp& warp = block.warps[thread / WARP_SIZE];
        const unsigned lane = thread % WARP_SIZE;
        if (!(warp.in_collective >> lane & 1)) continue;
        unsigned missing = warp.members[lane] & warp.present;
        for (unsigned other = 0; other < WARP_SIZE; ++other) {
            const bool joined = (warp.in_collective >> other & 1) && warp.members[other] == warp.members[lane] &&
                                warp.collective[other] == warp.collective[lane];
            if (joined) missing &= ~(1u << other);
        }
        snprintf(block.error + length, sizeof block.error - static_cast<size_t>(length),
                 ", and thread %u in %s, mask 0x%08x, for lanes 0x%08x of its warp", thread,
                 collective_name(warp.collective[lane]), warp.members[lane], missing);
        return;
    }
}

// Lets other threads run until this one can go on.
GDN_SCHEDULER void wait() {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    const unsigned next = next_ready(block, self);
    if (next == NO_THREAD) {
        report_deadlock(block);
        abandon_block();
    }
    if (next == self) return;
    here.thread_idx.x = next;
    switch_context(block.fibers[self], block.fibers[next]);
}

// Opens the barrier once every thread that is still alive waits at it.
GDN_SCHEDULER bool try_open_barrier(Block& block) {
    if (block.num_at_barrier == 0 || block.num_at_barrier < block.num_alive) return false;
    block.num_at_barrier = 0;
    for (unsigned i = 0; i < block.num_warps; ++i) block.warps[i].at_barrier = 0;
    return true;
}

__attribute__((noinline)) GDN_SCHEDULER void block_barrier() {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    happens_before(&block.num_at_barrier);
    warp_of(self).at_barrier |= 1u << self % WARP_SIZE;
    ++block.num_at_barrier;
    if (!try_open_barrier(block) || block.random != 0) wait();
    happens_after(&block.num_at_barrier);
}

template <typename Function>
void for_each_lane(unsigned lanes, Function function) {
    for (; lanes != 0; lanes &= lanes - 1) function(static_cast<unsigned>(__builtin_ctz(lanes)));
}

// Finishes the collective that `lane` waits in, once every lane that its mask names has come to it too. Each
// lane's result is put down for it, so that no lane can overwrite what another has yet to read.
GDN_SCHEDULER bool try_finish_collective(Warp& warp, unsigned lane) {
    const Collective collective = warp.collective[lane];
    const unsigned members = warp.members[lane];
    // Lanes that returned count as arrived in __syncwarp, as in CUDA. Elsewhere their values would be undefined.
    const unsigned expected = members & (collective == SYNCWARP ? warp.alive : warp.present);
    if ((warp.in_collective & expected) != expected) return false;
    unsigned differ = 0;
    for (unsigned other = 0; other < WARP_SIZE; ++other) {
        const bool differs = warp.members[other] != members || warp.collective[other] != collective;
        differ |= static_cast<unsigned>(differs) << other;
    }
    if ((differ & expected) != 0) return false;
    if (collective == BALLOT || collective == ANY) {
        unsigned votes = 0;
        for (unsigned other = 0; other < WARP_SIZE; ++other) votes |= warp.value[other] << other;
        for_each_lane(expected, [&](unsigned other) { warp.result[other] = votes & expected; });
    } else if (collective != SYNCWARP) {
        for_each_lane(expected, [&](unsigned other) {
            const unsigned source = warp.source[other];
            warp.result[other] = expected >> source & 1 ? warp.value[source] : POISON;
        });
    }
    warp.in_collective &= ~expected;
    return true;
}

// Meets the lanes named in `members`. Returns the value of lane `source`, or the votes of all lanes.
__attribute__((noinline)) GDN_SCHEDULER unsigned warp_collective(Collective collective, unsigned members, unsigned value,
                                              unsigned source) {
    const unsigned self = here.thread_idx.x;
    const unsigned lane = self % WARP_SIZE;
    Block& block = *here.block;
    Warp& warp = warp_of(self);
    if (!(members >> lane & 1)) {
        snprintf(block.error, sizeof block.error, "block %u: thread %u calls %s with mask 0x%08x, without its own lane",
                 block.block_idx, self, collective_name(collective), members);
        abandon_block();
    }
    warp.collective[lane] = collective;
    warp.members[lane] = members;
    warp.value[lane] = value;
    warp.source[lane] = source;
    warp.in_collective |= 1u << lane;
    // Only __syncwarp orders memory; a shuffle does not.
    if (collective == SYNCWARP) happens_before(&warp);
    if (!try_finish_collective(warp, lane) || block.random != 0) wait();
    if (collective == SYNCWARP) happens_after(&warp);
    return warp.result[lane];
}

// Takes the running thread, which is done with the kernel, out of all that others wait for.
[[noreturn]] GDN_SCHEDULER void thread_returned() {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    Warp& warp = warp_of(self);
    happens_before(&block);
    warp.alive &= ~(1u << self % WARP_SIZE);
    --block.num_alive;
    try_open_barrier(block);
    for_each_lane(warp.in_collective, [&](unsigned lane) {
        if (warp.in_collective >> lane & 1) try_finish_collective(warp, lane);
    });
    if (block.num_alive == 0) abandon_block();
    wait();
    __builtin_unreachable();
}

inline void fiber_main() {
    arrived_on(here.block->fibers[here.thread_idx.x]);
    happens_after(here.block);
    here.block->grid->kernel(here.block->grid->arguments);
    thread_returned();
}

GDN_SCHEDULER void reset_block(Block& block, const Grid& grid, unsigned block_idx) {
    block.grid = &grid;
    block.block_idx = block_idx;
    block.num_warps = (grid.threads_per_block + WARP_SIZE - 1) / WARP_SIZE;
    block.num_alive = grid.threads_per_block;
    block.num_at_barrier = 0;
    block.random = grid.order_seed == 0 ? 0 : mix(mix(grid.order_seed) + block_idx) | 1;
    block.error[0] = '\0';
    for (unsigned i = 0; i < block.num_warps; ++i) {
        const unsigned num_lanes = grid.threads_per_block - i * WARP_SIZE;
        block.warps[i].present = num_lanes >= WARP_SIZE ? ~0u : (1u << num_lanes) - 1;
        block.warps[i].alive = block.warps[i].present;
        block.warps[i].at_barrier = 0;
        block.warps[i].in_collective = 0;
    }
    for (unsigned i = 0; i < grid.threads_per_block; ++i) {
        prepare(block.fibers[i], block.stacks + i * STACK_STRIDE, fiber_main);
    }
}

// Runs one block to its end. False: it failed, and block.error says why.
GDN_SCHEDULER bool run_block(Block& block, const Grid& grid, unsigned block_idx) {
    reset_block(block, grid, block_idx);
    here = {&block, {0, 0, 0}, {block_idx, 0, 0}, {grid.threads_per_block, 1, 1}, {grid.num_blocks, 1, 1}};
    here.thread_idx.x = next_ready(block, WARP_SIZE - 1);
    happens_before(&block);
    switch_context(block.outside, block.fibers[here.thread_idx.x]);
    happens_after(&block);
    return block.error[0] == '\0';
}

}  // namespace gdn_on_cpu
