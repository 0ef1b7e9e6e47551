// Runs the blocks of a launch on OS threads, and exports a kernel to gdn/backends/host.py.
#pragma once
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <type_traits>
#include <utility>
#include "host/block.h"

namespace gdn_on_cpu {

// ---- Blocks, kept between launches: touching fresh stacks would take longer than most launches ----

inline Block* idle_blocks = nullptr;
inline pthread_mutex_t idle_blocks_lock = PTHREAD_MUTEX_INITIALIZER;

inline void put_back(Block* block) {
    pthread_mutex_lock(&idle_blocks_lock);
    block->next_idle = idle_blocks;
    idle_blocks = block;
    pthread_mutex_unlock(&idle_blocks_lock);
}

inline Block* take_idle() {
    pthread_mutex_lock(&idle_blocks_lock);
    Block* block = idle_blocks;
    if (block != nullptr) idle_blocks = block->next_idle;
    pthread_mutex_unlock(&idle_blocks_lock);
    return block;
}

inline bool provide_stacks(Block& block, unsigned num_stacks) {
    if (block.num_stacks >= num_stacks) return true;
    if (block.num_stacks > 0) munmap(block.stacks, block.num_stacks * STACK_STRIDE);
    void* stacks = mmap(nullptr, num_stacks * STACK_STRIDE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    block.num_stacks = stacks == MAP_FAILED ? 0 : num_stacks;
    block.stacks = static_cast<char*>(stacks);
    return block.num_stacks > 0;
}

// A block of `num_threads` fibers for the calling OS thread, or null when memory is out.
inline Block* take_block(unsigned num_threads) {
    Block* block = take_idle();
    if (block == nullptr) block = static_cast<Block*>(calloc(1, sizeof(Block)));
    if (block == nullptr) return nullptr;
    if (!provide_stacks(*block, num_threads)) {
        put_back(block);
        return nullptr;
    }
#ifdef __SANITIZE_THREAD__
    block->os_thread.tsan_fiber = __tsan_get_current_fiber();
    for (unsigned i = 0; i < num_threads; ++i) {
        void*& fiber = block->fibers[i].tsan_fiber;
        if (fiber == nullptr) fiber = __tsan_create_fiber(0);
    }
#endif
    return block;
}

// ---- Shared memory: the thread_local variables of this library, as far as one OS thread is concerned ----

struct SharedMemory {
    char* begin;
    size_t num_bytes;
};

// Looks for the library whose thread_local memory holds `here`.
inline SharedMemory find_shared_memory() {
    SharedMemory memory = {reinterpret_cast<char*>(&here), 0};
    const auto visit = [](dl_phdr_info* library, size_t, void* result) {
        auto& found = *static_cast<SharedMemory*>(result);
        auto* begin = static_cast<char*>(library->dlpi_tls_data);
        for (int i = 0; begin != nullptr && i < library->dlpi_phnum; ++i) {
            const auto& segment = library->dlpi_phdr[i];
            const bool holds_here = found.begin >= begin && found.begin < begin + segment.p_memsz;
            if (segment.p_type == PT_TLS && holds_here) {
                found = {begin, segment.p_memsz};
                return 1;
            }
        }
        return 0;
    };
    dl_iterate_phdr(visit, &memory);
    return memory;
}

// On a GPU a block finds leftovers in its shared memory. Here it finds NaN, so that relying on them shows. (A
// library has this memory to itself; linked into a static executable it would share it with the C library.)
inline void poison(const SharedMemory& memory) {
    const Here kept = here;
    allow_access(memory.begin, memory.num_bytes);
    memset(memory.begin, 0xff, memory.num_bytes);
    here = kept;
}

// ---- A launch ----

// What its OS threads share.
struct Launch {
    Grid grid;
    unsigned max_os_threads;  // at least 1
    unsigned num_started;   // blocks
    unsigned block_stride;  // the n-th block to start has block_idx n * block_stride mod num_blocks
    pthread_mutex_t lock;
    char* message;  // the first failure; empty while all is well
    size_t message_bytes;
};

inline void fail(Launch& launch, const char* message) {
    pthread_mutex_lock(&launch.lock);
    if (launch.message[0] == '\0') snprintf(launch.message, launch.message_bytes, "%s", message);
    pthread_mutex_unlock(&launch.lock);
    __atomic_store_n(&launch.num_started, launch.grid.num_blocks, __ATOMIC_RELAXED);
}

inline unsigned num_left(const Launch& launch) {
    const unsigned num_started = __atomic_load_n(&launch.num_started, __ATOMIC_RELAXED);
    return num_started < launch.grid.num_blocks ? launch.grid.num_blocks - num_started : 0;
}

// Runs blocks until none is left. `after_block` is called after each.
template <typename Function>
void run_blocks(Launch& launch, Function after_block) {
    Block* block = take_block(launch.grid.threads_per_block);
    if (block == nullptr) return fail(launch, "no memory for the stacks of a block");
    const SharedMemory shared = find_shared_memory();
    while (num_left(launch) > 0) {
        const unsigned long long turn = __atomic_fetch_add(&launch.num_started, 1, __ATOMIC_RELAXED);
        if (turn >= launch.grid.num_blocks) break;  // another thread took the last one
        poison(shared);
        run_block(*block, launch.grid, static_cast<unsigned>(turn * launch.block_stride % launch.grid.num_blocks));
        if (block->error[0] != '\0') fail(launch, block->error);
        after_block();
    }
    allow_access(shared.begin, shared.num_bytes);  // whoever has this memory next may use all of it
    put_back(block);
}

inline double now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

inline void* help(void* launch) {
    run_blocks(*static_cast<Launch*>(launch), [] {});
    return nullptr;
}

// Starts on the calling OS thread and lets others help as soon as the blocks so far say that it pays.
inline void run_launch(Launch& launch) {
    constexpr double WORTH_A_THREAD_US = 100;  // several times what it takes to start and join one
    constexpr unsigned MAX_HELPERS = 255;
    pthread_t helpers[MAX_HELPERS];
    unsigned num_helpers = 0;
    const unsigned max_helpers = launch.max_os_threads - 1 < MAX_HELPERS ? launch.max_os_threads - 1 : MAX_HELPERS;
    const double start_us = now_us();
    run_blocks(launch, [&] {
        const unsigned left = num_left(launch);
        const double per_block_us = (now_us() - start_us) / (launch.grid.num_blocks - left);
        while (num_helpers < max_helpers && num_helpers + 1 < left &&
               (num_helpers + 1) * WORTH_A_THREAD_US < left * per_block_us &&
               pthread_create(&helpers[num_helpers], nullptr, help, &launch) == 0) {
            ++num_helpers;
        }
    });
    for (unsigned i = 0; i < num_helpers; ++i) pthread_join(helpers[i], nullptr);
}

// A number that has no divisor in common with `num_blocks`, so that its multiples reach every block once.
inline unsigned coprime(unsigned long long seed, unsigned num_blocks) {
    for (unsigned candidate = static_cast<unsigned>(mix(seed) >> 33);; ++candidate) {
        unsigned divisor = candidate, rest = num_blocks;
        while (rest != 0) {
            const unsigned next = divisor % rest;
            divisor = rest;
            rest = next;
        }
        if (divisor == 1) return candidate;
    }
}

inline int launch(const Grid& grid, unsigned max_os_threads, char* message, size_t message_bytes) {
    message[0] = '\0';
    if (grid.threads_per_block < 1 || grid.threads_per_block > MAX_THREADS) {
        snprintf(message, message_bytes, "threads_per_block: expected 1 to %u, got %u", MAX_THREADS,
                 grid.threads_per_block);
        return 1;
    }
    const unsigned block_stride = grid.order_seed == 0 ? 1 : coprime(grid.order_seed, grid.num_blocks);
    Launch launch = {grid, max_os_threads, 0, block_stride, PTHREAD_MUTEX_INITIALIZER, message, message_bytes};
    run_launch(launch);
    return message[0] != '\0';
}

// ---- The kernel as Python sees it ----

// The word that gdn/backends/launch.py has for a parameter of this type.
template <typename Parameter>
constexpr const char* kind_of() {
    if (std::is_pointer_v<Parameter>) return "pointer";
    if (std::is_same_v<Parameter, long long>) return "int64";
    return "unknown";
}

template <auto KERNEL, typename Type = decltype(KERNEL)>
struct Entry;

template <auto KERNEL, typename... Parameters>
struct Entry<KERNEL, void (*)(Parameters...)> {
    static void call(void** arguments) { unpack(arguments, std::index_sequence_for<Parameters...>()); }

    static const char* kind(unsigned index) {
        constexpr const char* KINDS[] = {kind_of<Parameters>()..., nullptr};
        return index < sizeof...(Parameters) ? KINDS[index] : nullptr;
    }

private:
    template <size_t... INDEX>
    static void unpack([[maybe_unused]] void** arguments, std::index_sequence<INDEX...>) {
        KERNEL(*static_cast<Parameters*>(arguments[INDEX])...);
    }
};

}  // namespace gdn_on_cpu

// gdn_launch takes the address of each argument, as cuLaunchKernel does, and returns 0, or 1 with the reason in
// `message`. gdn_parameter_kind names the kind of one parameter; null behind the last.
#define GDN_EXPORT_KERNEL(kernel)                                                                                 \
    extern "C" __attribute__((visibility("default"))) int gdn_launch(                                             \
        unsigned num_blocks, unsigned threads_per_block, void** arguments, unsigned long long order_seed,         \
        unsigned max_os_threads, char* message, size_t message_bytes) {                                           \
        return gdn_on_cpu::launch(                                                                                \
            {gdn_on_cpu::Entry<kernel>::call, arguments, num_blocks, threads_per_block, order_seed},              \
            max_os_threads, message, message_bytes);                                                              \
    }                                                                                                             \
    extern "C" __attribute__((visibility("default"))) const char* gdn_parameter_kind(unsigned index) {            \
        return gdn_on_cpu::Entry<kernel>::kind(index);                                                            \
    }
