// Runs the threads of one CUDA block, a fiber for each, on one OS thread.
//
// 1. A thread runs until it has to wait, in __syncthreads or in a warp collective; then another takes its turn.
// 2. Bit masks, one bit a lane, say who has to wait, so that finding the next thread takes a few instructions.
// 3. A collective is finished by the last lane to come, for all lanes.
// 4. When threads are left and all of them wait, a collective was mis-used: the block ends with a message.
#pragma once
#include <stdio.h>
#include "host/context.h"

struct uint3 {
    unsigned int x, y, z;
};
using dim3 = uint3;

namespace gdn_on_cpu {

constexpr unsigned WARP_LANES = 32;
constexpr unsigned MAX_WARPS = 32;
constexpr unsigned MAX_THREADS = WARP_LANES * MAX_WARPS;
constexpr unsigned NO_THREAD = ~0u;
constexpr unsigned UNDEFINED = ~0u;  // a NaN as float32, -1 as an integer

struct Grid {
    void (*kernel)(void** arguments);
    void** arguments;
    unsigned num_blocks;
    unsigned threads_per_block;
    unsigned long long order_seed;  // 0: threads take turns in plain order
};

enum Collective : unsigned { SYNCWARP, SHFL, SHFL_XOR, SHFL_DOWN, BALLOT, ANY, REDUCE_MAX, TOGETHER };

inline const char* name_of(Collective collective) {
    constexpr const char* NAMES[] = {"__syncwarp",       "__shfl_sync",   "__shfl_xor_sync",
                                     "__shfl_down_sync", "__ballot_sync", "__any_sync",
                                     "__reduce_max_sync", "a product or load of matrices"};
    return NAMES[collective];
}

// Masks hold one bit, arrays one entry per lane.
struct Warp {
    unsigned present;        // lanes that the size of the block gives this warp
    unsigned alive;          // of those, the ones that have not returned
    unsigned at_barrier;     // of those, the ones that wait in __syncthreads
    unsigned in_collective;  // ... and in the collective that the arrays describe

    Collective collective[WARP_LANES];
    unsigned members[WARP_LANES];  // the mask that the lane passed
    unsigned value[WARP_LANES];
    unsigned source[WARP_LANES];  // the lane whose value it wants
    unsigned result[WARP_LANES];
    // What the lanes do TOGETHER, done by the last to come, and what each of them brings for it.
    void (*act)(void* const (&operands)[WARP_LANES]);
    void* operands[WARP_LANES];
};

// Copies that a thread has started and not yet waited for. They happen at the wait, so that a kernel which forgets it
// finds what was there before. In a seeded order about half of them happen at once instead, so that a kernel which
// starts them too early overwrites what others still read.
struct Copy {
    void* to;
    const void* from;
    size_t num_bytes;
};
constexpr unsigned MAX_COPIES = 256;
using Copies = Copy[MAX_COPIES];

GDN_BETWEEN_FIBERS unsigned ready_lanes(const Warp& warp) {
    return warp.alive & ~warp.at_barrier & ~warp.in_collective;
}

struct Block {
    const Grid* grid;
    unsigned block_idx;
    unsigned num_warps;
    unsigned num_alive;
    unsigned num_at_barrier;
    unsigned num_barriers;  // that have opened
    char meeting_points[2];  // of barriers with an even and an odd number; addresses that ThreadSanitizer is told
    unsigned long long random;  // counts the draws of this block
    unsigned held_warp;  // in a seeded order: the warp that runs only when no other can; from num_warps on, none
    Warp warps[MAX_WARPS];
    char error[256];  // empty while all is well

    Context os_thread;
    Context fibers[MAX_THREADS];
    // Numbers apart from what they count, so that memory for copies that nobody starts is never touched.
    unsigned num_copies[MAX_THREADS];
    unsigned num_bulk_copies;  // of the whole block; one round of them is under way at a time
    Copies copies[MAX_THREADS];
    Copies bulk_copies;
    char* stacks;
    unsigned num_stacks;
    Block* next_idle;
};

// What the built-in variables read. It is all that the headers keep in thread_local memory; the rest is the
// kernel's __shared__ variables.
struct Here {
    Block* block;
    uint3 thread_idx;
    uint3 block_idx;
    dim3 block_dim;
    dim3 grid_dim;
};
inline thread_local Here here;

// splitmix64: neighbouring numbers give unrelated ones.
inline unsigned long long mix(unsigned long long number) {
    number += 0x9e3779b97f4a7c15ull;
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9ull;
    number = (number ^ (number >> 27)) * 0x94d049bb133111ebull;
    return number ^ (number >> 31);
}

// To visit the lanes of a mask: for (unsigned rest = mask; rest != 0; rest &= rest - 1) ... first_lane(rest) ...
constexpr unsigned first_lane(unsigned mask) { return static_cast<unsigned>(__builtin_ctz(mask)); }

// A thread of the warp that can run, the first from `start_lane` on, or NO_THREAD.
GDN_BETWEEN_FIBERS unsigned ready_thread(const Block& block, unsigned warp_idx, unsigned start_lane) {
    const unsigned ready = ready_lanes(block.warps[warp_idx]);
    if (ready == 0) return NO_THREAD;
    const unsigned from_start = ready >> start_lane << start_lane;
    return warp_idx * WARP_LANES + first_lane(from_start != 0 ? from_start : ready);
}

// A thread that can run, or NO_THREAD. Plain order stays in the warp of `last`, whose stacks are in the cache;
// a seeded order looks from a random thread on, and at the held warp last.
GDN_BETWEEN_FIBERS unsigned next_ready(Block& block, unsigned last) {
    unsigned start_warp = last / WARP_LANES;
    unsigned start_lane = (last + 1) % WARP_LANES;
    unsigned held_warp = block.num_warps;
    if (block.grid->order_seed != 0) {
        const unsigned long long drawn = mix(++block.random);
        start_warp = static_cast<unsigned>(drawn >> 32) % block.num_warps;
        start_lane = static_cast<unsigned>(drawn) % WARP_LANES;
        held_warp = block.held_warp;
    }
    for (unsigned i = 0; i < block.num_warps; ++i) {
        const unsigned warp_idx = (start_warp + i) % block.num_warps;
        if (warp_idx == held_warp) continue;
        const unsigned thread = ready_thread(block, warp_idx, start_lane);
        if (thread != NO_THREAD) return thread;
    }
    return held_warp < block.num_warps ? ready_thread(block, held_warp, start_lane) : NO_THREAD;
}

// Threads that take turns stay close together, but a missing barrier often shows only when one warp falls far
// behind. So a seeded order holds a warp back until the next barrier opens, about half of the time.
GDN_BETWEEN_FIBERS void draw_held_warp(Block& block) {
    if (block.grid->order_seed != 0) block.held_warp = static_cast<unsigned>(mix(++block.random) >> 32) % (2 * block.num_warps);
}

// Ends the block and leaves its fibers where they are: a kernel owns nothing that would have to be freed.
[[noreturn]] GDN_BETWEEN_FIBERS void end_block(Block& block) {
    switch_context(block.fibers[here.thread_idx.x], block.os_thread);
    __builtin_unreachable();
}

// Only a warp collective can stay incomplete for ever: a barrier opens when all that are alive wait at it.
GDN_BETWEEN_FIBERS void describe_deadlock(Block& block) {
    unsigned thread = 0;
    while (!(block.warps[thread / WARP_LANES].in_collective >> thread % WARP_LANES & 1)) ++thread;
    const Warp& warp = block.warps[thread / WARP_LANES];
    const Collective collective = warp.collective[thread % WARP_LANES];
    const unsigned members = warp.members[thread % WARP_LANES];
    unsigned missing = members & warp.present;
    for (unsigned rest = warp.in_collective; rest != 0; rest &= rest - 1) {
        const unsigned lane = first_lane(rest);
        if (warp.collective[lane] == collective && warp.members[lane] == members) missing &= ~(1u << lane);
    }
    snprintf(block.error, sizeof block.error,
             "block %u cannot go on: thread %u waits in %s with mask 0x%08x for lanes 0x%08x of its warp, of which "
             "0x%08x have returned; %u threads wait in __syncthreads",
             block.block_idx, thread, name_of(collective), members, missing, missing & ~warp.alive,
             block.num_at_barrier);
}

// Lets other threads run until this one can go on.
GDN_BETWEEN_FIBERS void wait() {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    const unsigned next = next_ready(block, self);
    if (next == NO_THREAD) {
        describe_deadlock(block);
        end_block(block);
    }
    if (next == self) return;
    here.thread_idx.x = next;
    switch_context(block.fibers[self], block.fibers[next]);
}

// In a seeded order others may overtake even a thread that could go on.
GDN_BETWEEN_FIBERS void wait_unless(bool can_go_on) {
    if (!can_go_on || here.block->grid->order_seed != 0) wait();
}

// Opens the barrier if every thread that has not returned waits at it.
GDN_BETWEEN_FIBERS bool try_open_barrier(Block& block) {
    if (block.num_at_barrier == 0 || block.num_at_barrier < block.num_alive) return false;
    block.num_at_barrier = 0;
    ++block.num_barriers;
    for (unsigned i = 0; i < block.num_warps; ++i) block.warps[i].at_barrier = 0;
    draw_held_warp(block);
    return true;
}

__attribute__((noinline)) GDN_BETWEEN_FIBERS void block_barrier() {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    // A thread may come to the next barrier before another has left this one, so two of them share nothing.
    char* const meeting_point = &block.meeting_points[block.num_barriers % 2];
    happens_before(meeting_point);
    block.warps[self / WARP_LANES].at_barrier |= 1u << self % WARP_LANES;
    ++block.num_at_barrier;
    wait_unless(try_open_barrier(block));
    happens_after(meeting_point);
}

// Finishes the collective that `lane` waits in if every lane that it names has come to the same one. Every lane
// gets a result of its own, so that none can overwrite what another has yet to read.
GDN_BETWEEN_FIBERS bool try_finish_collective(Warp& warp, unsigned lane) {
    const Collective collective = warp.collective[lane];
    const unsigned members = warp.members[lane];
    // As in CUDA, __syncwarp does not wait for lanes that have returned. Others need their value, so they do.
    const unsigned expected = members & (collective == SYNCWARP ? warp.alive : warp.present);
    if ((warp.in_collective & expected) != expected) return false;
    unsigned differing = 0;
    for (unsigned other = 0; other < WARP_LANES; ++other) {
        const bool differs = warp.members[other] != members || warp.collective[other] != collective;
        differing |= static_cast<unsigned>(differs) << other;
    }
    if ((differing & expected) != 0) return false;
    if (collective == BALLOT || collective == ANY) {
        unsigned votes = 0;
        for (unsigned rest = expected; rest != 0; rest &= rest - 1)
            votes |= warp.value[first_lane(rest)] << first_lane(rest);  // others may bring more than a bit elsewhere
        for (unsigned rest = expected; rest != 0; rest &= rest - 1) warp.result[first_lane(rest)] = votes;
    } else if (collective == REDUCE_MAX) {
        unsigned largest = 0;
        for (unsigned rest = expected; rest != 0; rest &= rest - 1)
            if (warp.value[first_lane(rest)] > largest) largest = warp.value[first_lane(rest)];
        for (unsigned rest = expected; rest != 0; rest &= rest - 1) warp.result[first_lane(rest)] = largest;
    } else if (collective == TOGETHER) {
        happens_after(&warp.operands);
        warp.act(warp.operands);
        happens_before(&warp.operands);
    } else {
        for (unsigned rest = expected; rest != 0; rest &= rest - 1) {
            const unsigned source = warp.source[first_lane(rest)];
            warp.result[first_lane(rest)] = expected >> source & 1 ? warp.value[source] : UNDEFINED;
        }
    }
    warp.in_collective &= ~expected;
    return true;
}

// Meets the lanes named in `members`. Returns the value of lane `source`, the votes, 0 or 1, of all lanes, or their
// largest value.
__attribute__((noinline)) GDN_BETWEEN_FIBERS unsigned warp_collective(
    Collective collective, unsigned members, unsigned value, unsigned source) {
    Block& block = *here.block;
    const unsigned lane = here.thread_idx.x % WARP_LANES;
    Warp& warp = block.warps[here.thread_idx.x / WARP_LANES];
    if (!(members >> lane & 1)) {
        snprintf(block.error, sizeof block.error, "block %u: thread %u calls %s with mask 0x%08x, without its own lane",
                 block.block_idx, here.thread_idx.x, name_of(collective), members);
        end_block(block);
    }
    if (collective == SYNCWARP) happens_before(&warp);  // a shuffle or vote does not order memory
    warp.collective[lane] = collective;
    warp.members[lane] = members;
    warp.value[lane] = value;
    warp.source[lane] = source;
    warp.in_collective |= 1u << lane;
    wait_unless(try_finish_collective(warp, lane));
    if (collective == SYNCWARP) happens_after(&warp);
    return warp.result[lane];
}

[[noreturn]] inline void refuse(const char* what) {
    Block& block = *here.block;
    snprintf(block.error, sizeof block.error, "block %u: thread %u %s", block.block_idx, here.thread_idx.x, what);
    end_block(block);
}

// All lanes of a warp do something at once with what each of them brings.
__attribute__((noinline)) GDN_BETWEEN_FIBERS void together(
    void (*act)(void* const (&operands)[WARP_LANES]), void* operand) {
    Warp& warp = here.block->warps[here.thread_idx.x / WARP_LANES];
    if (warp.present != ~0u) refuse("multiplies matrices in a warp that is not whole");
    if (warp.in_collective != 0 && warp.act != act) refuse("does not do with matrices what its warp does");
    warp.act = act;
    warp.operands[here.thread_idx.x % WARP_LANES] = operand;
    happens_before(&warp.operands);
    warp_collective(TOGETHER, ~0u, 0, 0);
    happens_after(&warp.operands);
}

// `unit`: of which both addresses must be multiples.
inline void start_copy_into(Copies& started, unsigned& num_started, const Copy& copy, size_t unit) {
    const size_t bits = reinterpret_cast<size_t>(copy.to) | reinterpret_cast<size_t>(copy.from) | copy.num_bytes;
    if (bits % unit != 0) refuse("starts a copy that is not aligned");
    if (num_started == MAX_COPIES) refuse("has too many copies under way");
    Block& block = *here.block;
    if (block.grid->order_seed != 0 && (mix(++block.random) >> 32) % 2 != 0) {
        memcpy(copy.to, copy.from, copy.num_bytes);
    } else {
        started[num_started++] = copy;
    }
}

inline void finish_copies_of(const Copies& started, unsigned& num_started) {
    for (unsigned i = 0; i < num_started; ++i) memcpy(started[i].to, started[i].from, started[i].num_bytes);
    num_started = 0;
}

inline void start_copy(void* to, const void* from, size_t num_bytes) {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    start_copy_into(block.copies[self], block.num_copies[self], {to, from, num_bytes}, num_bytes);
}
inline void finish_copies() {
    finish_copies_of(here.block->copies[here.thread_idx.x], here.block->num_copies[here.thread_idx.x]);
}

// A thread that waits for bulk copies sees them, whoever started them and whoever waited first.
inline void start_bulk_copy(void* to, const void* from, size_t num_bytes) {
    start_copy_into(here.block->bulk_copies, here.block->num_bulk_copies, {to, from, num_bytes}, 16);
    happens_before(&here.block->bulk_copies);
}
inline void finish_bulk_copies() {
    happens_after(&here.block->bulk_copies);
    finish_copies_of(here.block->bulk_copies, here.block->num_bulk_copies);
    happens_before(&here.block->bulk_copies);
}

// The last act of a thread: nobody waits for it any longer.
[[noreturn]] GDN_BETWEEN_FIBERS void thread_returned() {
    Block& block = *here.block;
    const unsigned self = here.thread_idx.x;
    Warp& warp = block.warps[self / WARP_LANES];
    happens_before(&block.os_thread);
    warp.alive &= ~(1u << self % WARP_LANES);
    --block.num_alive;
    if (block.num_alive == 0) end_block(block);
    try_open_barrier(block);
    for (unsigned rest = warp.in_collective; rest != 0; rest &= rest - 1) {
        const unsigned lane = first_lane(rest);
        if (warp.in_collective >> lane & 1) try_finish_collective(warp, lane);
    }
    wait();
    __builtin_unreachable();
}

GDN_BETWEEN_FIBERS void fiber_main() {
    Block& block = *here.block;
    arrived_on(block.fibers[here.thread_idx.x]);
    happens_after(&block.fibers);
    block.grid->kernel(block.grid->arguments);
    thread_returned();
}

GDN_BETWEEN_FIBERS void reset(Block& block, const Grid& grid, unsigned block_idx) {
    block.grid = &grid;
    block.block_idx = block_idx;
    block.num_warps = (grid.threads_per_block + WARP_LANES - 1) / WARP_LANES;
    block.num_alive = grid.threads_per_block;
    block.num_at_barrier = 0;
    block.num_barriers = 0;
    block.random = mix(mix(grid.order_seed) + block_idx);
    block.error[0] = '\0';
    block.num_bulk_copies = 0;
    draw_held_warp(block);
    for (unsigned i = 0; i < block.num_warps; ++i) {
        const unsigned num_lanes = grid.threads_per_block - i * WARP_LANES;
        Warp& warp = block.warps[i];
        warp.present = num_lanes >= WARP_LANES ? ~0u : (1u << num_lanes) - 1;
        warp.alive = warp.present;
        warp.at_barrier = 0;
        warp.in_collective = 0;
    }
    for (unsigned i = 0; i < grid.threads_per_block; ++i) {
        block.num_copies[i] = 0;
        prepare(block.fibers[i], block.stacks + i * STACK_STRIDE, fiber_main);
    }
}

// Runs one block to its end; block.error says whether that was a good one.
GDN_BETWEEN_FIBERS void run_block(Block& block, const Grid& grid, unsigned block_idx) {
    reset(block, grid, block_idx);
    here = {&block, {0, 0, 0}, {block_idx, 0, 0}, {grid.threads_per_block, 1, 1}, {grid.num_blocks, 1, 1}};
    here.thread_idx.x = next_ready(block, WARP_LANES - 1);
    happens_before(&block.fibers);
    switch_context(block.os_thread, block.fibers[here.thread_idx.x]);
    happens_after(&block.os_thread);
}

}  // namespace gdn_on_cpu
