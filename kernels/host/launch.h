// Runs the blocks of a launch on OS threads, and exports the kernel to Python.
#pragma once
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>
#include <type_traits>
#include <utility>
#include "host/fibers.h"

namespace gdn_on_cpu {

// Blocks not in use, kept with their stacks: touching fresh stacks would cost more than most launches.
inline Block* idle_blocks = nullptr;
inline pthread_mutex_t idle_blocks_lock = PTHREAD_MUTEX_INITIALIZER;

inline bool allocate_stacks(Block& block, unsigned num_stacks) {
    if (block.num_stacks >= num_stacks) return true;
    if (block.stacks != nullptr) munmap(block.stacks, block.num_stacks * STACK_STRIDE);
    block.num_stacks = 0;
    void* stacks = mmap(nullptr, num_stacks * STACK_STRIDE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    block.stacks = stacks == MAP_FAILED ? nullptr : static_cast<char*>(stacks);
    if (block.stacks != nullptr) block.num_stacks = num_stacks;
    return block.stacks != nullptr;
}

inline void release_block(Block* block) {
    pthread_mutex_lock(&idle_blocks_lock);
    block->next_idle = idle_blocks;
    idle_blocks = block;
    pthread_mutex_unlock(&idle_blocks_lock);
}

// A block with `num_threads` stacks, or null when memory is out.
inline Block* acquire_block(unsigned num_threads) {
    pthread_mutex_lock(&idle_blocks_lock);
    Block* block = idle_blocks;
    if (block != nullptr) idle_blocks = block->next_idle;
    pthread_mutex_unlock(&idle_blocks_lock);
    if (block == nullptr) {
        block = static_cast<Block*>(calloc(1, sizeof(Block)));
        if (block == nullptr) return nullptr;
#ifdef __SANITIZE_THREAD__
        for (Context& fiber : block->fibers) fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
    }
    if (!allocate_stacks(*block, num_threads)) {
        release_block(block);
        return nullptr;
    }
#ifdef __SANITIZE_THREAD__
    block->outside.tsan_fiber = __tsan_get_current_fiber();
#endif
    return block;
}

// The memory in which this OS thread keeps the thread_local variables of this library: the shared memory of
// the kernel, and `here`.
struct SharedMemory {
    char* first;
    size_t num_bytes;
};

inline SharedMemory find_shared_memory() {
    SharedMemory found = {reinterpret_cast<char*>(&here), 0};
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* result) {
            auto& memory = *static_cast<SharedMemory*>(result);
            auto* first = static_cast<char*>(library->dlpi_tls_data);
            if (first == nullptr || memory.first < first) return 0;
            for (int i = 0; i < library->dlpi_phnum; ++i) {
                const auto& segment = library->dlpi_phdr[i];
                if (segment.p_type != PT_TLS || memory.first >= first + segment.p_memsz) continue;
                memory = {first, segment.p_memsz};
                return 1;
            }
            return 0;
        },
        &found);
    return found;
}

// A block on a GPU finds leftovers in its shared memory; here it finds NaN, so that reading them shows.
inline void poison(const SharedMemory& memory) {
    const Here kept = here;
    memset(memory.first, 0xff, memory.num_bytes);
    here = kept;
}

// What the OS threads of one launch share.
struct Launch {
    Grid grid;
    unsigned num_started;  // blocks
    unsigned stride;       // order of the blocks: block i of the order is block_idx i * stride mod num_blocks
    pthread_mutex_t lock;
    char* message;  // empty while all is well
    size_t message_bytes;
};

inline void fail(Launch& launch, const char* message) {
    pthread_mutex_lock(&launch.lock);
    if (launch.message[0] == '\0') snprintf(launch.message, launch.message_bytes, "%s", message);
    pthread_mutex_unlock(&launch.lock);
    __atomic_store_n(&launch.num_started, launch.grid.num_blocks, __ATOMIC_RELAXED);
}

// Runs blocks until `max_blocks` are done or none is left.
inline void run_blocks(Launch& launch, unsigned max_blocks) {
    Block* block = acquire_block(launch.grid.threads_per_block);
    if (block == nullptr) return fail(launch, "out of memory for the stacks of a block");
    const SharedMemory shared = find_shared_memory();
    for (unsigned i = 0; i < max_blocks; ++i) {
        unsigned long long turn = __atomic_fetch_add(&launch.num_started, 1, __ATOMIC_RELAXED);
        if (turn >= launch.grid.num_blocks) break;
        poison(shared);
        const auto block_idx = static_cast<unsigned>(turn * launch.stride % launch.grid.num_blocks);
        if (!run_block(*block, launch.grid, block_idx)) fail(launch, block->error);
    }
    release_block(block);
}

inline void* help(void* launch) {
    run_blocks(*static_cast<Launch*>(launch), ~0u);
    return nullptr;
}

inline double now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

// A number without a common divisor with `num_blocks`, so that its multiples visit every block once.
inline unsigned block_stride(unsigned long long seed, unsigned num_blocks) {
    for (unsigned long long stride = mix(seed) >> 33;; ++stride) {
        unsigned long long a = stride, b = num_blocks;
        while (b != 0) {
            const unsigned long long rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) return static_cast<unsigned>(stride);
    }
}

inline void run_launch(Launch& launch, unsigned max_os_threads) {
    constexpr double WORTH_A_THREAD_US = 100;  // starting and joining one costs about a quarter of this
    constexpr unsigned MAX_HELPERS = 255;
    // The first block tells whether the others are worth more OS threads.
    const double start_us = now_us();
    run_blocks(launch, 1);
    const double remaining_us = (now_us() - start_us) * (launch.grid.num_blocks - 1);
    const double worthwhile = remaining_us / WORTH_A_THREAD_US;

    pthread_t helpers[MAX_HELPERS];
    unsigned num_helpers = 0;
    while (num_helpers < MAX_HELPERS && num_helpers + 1 < max_os_threads && num_helpers + 2 < launch.grid.num_blocks &&
           num_helpers + 1 <= worthwhile && pthread_create(&helpers[num_helpers], nullptr, help, &launch) == 0) {
        ++num_helpers;
    }
    run_blocks(launch, ~0u);
    for (unsigned i = 0; i < num_helpers; ++i) pthread_join(helpers[i], nullptr);
}

// The name that gdn/backends/launch.py gives to a kind of parameter.
template <typename Parameter>
constexpr const char* parameter_kind() {
    if (std::is_pointer_v<Parameter>) return "pointer";
    if (std::is_same_v<Parameter, long long>) return "int64";
    if (std::is_same_v<Parameter, unsigned int>) return "uint32";
    return "a type that gdn does not pass";
}

template <auto KERNEL, typename Signature = decltype(KERNEL)>
struct Entry;

template <auto KERNEL, typename... Parameters>
struct Entry<KERNEL, void (*)(Parameters...)> {
    // Takes the parameters by address, as cuLaunchKernel does.
    static void call(void** arguments) { unpack(arguments, std::index_sequence_for<Parameters...>()); }

    static const char* kind(unsigned index) {
        static constexpr const char* KINDS[] = {parameter_kind<Parameters>()..., nullptr};
        return index < sizeof...(Parameters) ? KINDS[index] : nullptr;
    }

private:
    template <size_t... INDEX>
    static void unpack(void** arguments, std::index_sequence<INDEX...>) {
        KERNEL(*static_cast<Parameters*>(arguments[INDEX])...);
    }
};

inline int launch(const Grid& grid, unsigned max_os_threads, char* message, size_t message_bytes) {
    message[0] = '\0';
    if (grid.threads_per_block < 1 || grid.threads_per_block > MAX_THREADS) {
        snprintf(message, message_bytes, "threads_per_block: expected 1 to %u, got %u", MAX_THREADS,
                 grid.threads_per_block);
        return 1;
    }
    Launch launch = {grid, 0, 1, PTHREAD_MUTEX_INITIALIZER, message, message_bytes};
    if (grid.order_seed != 0) launch.stride = block_stride(grid.order_seed, grid.num_blocks);
    run_launch(launch, max_os_threads);
    return message[0] != '\0';
}

}  // namespace gdn_on_cpu

// What gdn/backends/host.py calls. gdn_launch returns 0, or 1 with the reason in `message`; gdn_parameter_kind
// names the kind of one parameter, null behind the last.
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
