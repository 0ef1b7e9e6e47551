// CUDA's built-ins for a C++17 compiler and a CPU, so that the kernels of this folder's parent run unchanged.
//
// gdn/backends/host.py puts this text in front of a kernel's own and GDN_EXPORT_KERNEL behind it. What differs
// from a GPU: float32 subnormals are kept, only one-dimensional grids and blocks exist, a shuffle or vote that names
// a returned lane is refused, and threads of a block take turns instead of running at once (so a loop that waits
// for another thread's store, without a barrier, never ends).
#pragma once
// The C headers as they are: what libstdc++ wraps around them takes a seventh of the time of a build.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS 1
#include <math.h>
#include "host/launch.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static thread_local
#define __launch_bounds__(...)

#define threadIdx (gdn_on_cpu::here.thread_idx)
#define blockIdx (gdn_on_cpu::here.block_idx)
#define blockDim (gdn_on_cpu::here.block_dim)
#define gridDim (gdn_on_cpu::here.grid_dim)
constexpr int warpSize = 32;

// ---- Vector types ----

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

// ---- Meeting other threads ----

inline void __syncthreads() { gdn_on_cpu::block_barrier(); }
inline void __syncwarp(unsigned int mask = 0xffffffffu) {
    gdn_on_cpu::warp_collective(gdn_on_cpu::SYNCWARP, mask, 0, 0);
}

namespace gdn_on_cpu {

inline unsigned lane() { return here.thread_idx.x % WARP_LANES; }

template <typename Value>
Value shuffle(Collective collective, unsigned mask, Value value, unsigned source) {
    static_assert(sizeof(Value) == sizeof(unsigned), "shuffles on the CPU carry 32 bits");
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    bits = warp_collective(collective, mask, bits, source);
    memcpy(&value, &bits, sizeof bits);
    return value;
}

}  // namespace gdn_on_cpu

// A warp splits into segments of `width` lanes, a power of two. A lane that would read beyond its segment keeps
// its own value.
template <typename Value>
Value __shfl_sync(unsigned int mask, Value value, int source_lane, int width = warpSize) {
    const unsigned first = gdn_on_cpu::lane() & ~(width - 1u);
    return gdn_on_cpu::shuffle(gdn_on_cpu::SHFL, mask, value, first + (source_lane & (width - 1u)));
}
template <typename Value>
Value __shfl_xor_sync(unsigned int mask, Value value, int lane_mask, int width = warpSize) {
    const unsigned lane = gdn_on_cpu::lane(), source = lane ^ static_cast<unsigned>(lane_mask);
    return gdn_on_cpu::shuffle(gdn_on_cpu::SHFL_XOR, mask, value, source <= (lane | (width - 1u)) ? source : lane);
}
template <typename Value>
Value __shfl_down_sync(unsigned int mask, Value value, unsigned int delta, int width = warpSize) {
    const unsigned lane = gdn_on_cpu::lane(), source = lane + delta;
    return gdn_on_cpu::shuffle(gdn_on_cpu::SHFL_DOWN, mask, value, source <= (lane | (width - 1u)) ? source : lane);
}
inline unsigned int __ballot_sync(unsigned int mask, int predicate) {
    return gdn_on_cpu::warp_collective(gdn_on_cpu::BALLOT, mask, predicate != 0, 0);
}
inline int __any_sync(unsigned int mask, int predicate) {
    return gdn_on_cpu::warp_collective(gdn_on_cpu::ANY, mask, predicate != 0, 0) != 0;
}

inline unsigned int __reduce_max_sync(unsigned int mask, unsigned int value) {
    return gdn_on_cpu::warp_collective(gdn_on_cpu::REDUCE_MAX, mask, value, 0);
}

inline unsigned int atomicAdd(unsigned int* address, unsigned int value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned int atomicOr(unsigned int* address, unsigned int value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}

// ---- Memory accesses with a cache hint ----

template <typename Value>
Value __ldg(const Value* address) {
    return *address;
}
template <typename Value>
Value __ldcs(const Value* address) {
    return *address;
}
template <typename Value>
void __stcs(Value* address, const Value& value) {
    *address = value;
}

// ---- Arithmetic. The build forbids contraction, so these round once each, as on a GPU ----

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }

// Of mixed types the wider or unsigned one is meant, as in CUDA; a NaN loses against a number.
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
    using Common = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<Common>) return fmin(static_cast<Common>(a), static_cast<Common>(b));
    return static_cast<Common>(a) < static_cast<Common>(b) ? static_cast<Common>(a) : static_cast<Common>(b);
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
    using Common = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<Common>) return fmax(static_cast<Common>(a), static_cast<Common>(b));
    return static_cast<Common>(a) > static_cast<Common>(b) ? static_cast<Common>(a) : static_cast<Common>(b);
}

// ---- Bits ----

inline unsigned int __float_as_uint(float value) {
    unsigned int bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned int bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(value)); }
inline int __popc(unsigned int value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }

// ---- intrinsics.cuh ----

inline float reciprocal_square_root(float value) { return 1.0f / sqrtf(value); }

inline void hold(float&) {}
template <typename Value>
void hold_in_turn(Value&, int) {}
template <typename Value>
void hold_pointer(Value*&) {}

inline float sigmoid(float value) { return 1.0f / (1.0f + expf(-value)); }

inline void load_if(bool is_wanted, const unsigned int* address, unsigned int& value) {
    if (is_wanted) value = *address;
}

// Between two strips that AddressSanitizer guards, as it does not by itself in thread_local memory.
template <int BYTES>
unsigned char* launch_shared_memory() {
    constexpr int GUARD_BYTES = 256;
    alignas(16) static thread_local unsigned char memory[GUARD_BYTES + BYTES + GUARD_BYTES];
    gdn_on_cpu::forbid_access(memory, GUARD_BYTES);
    gdn_on_cpu::forbid_access(memory + GUARD_BYTES + BYTES, GUARD_BYTES);
    return memory + GUARD_BYTES;
}

template <int SHARED_OFFSET, int GLOBAL_OFFSET>
void start_copy_16(void* shared, const void* global) {
    gdn_on_cpu::start_copy(static_cast<char*>(shared) + SHARED_OFFSET,
                           static_cast<const char*>(global) + GLOBAL_OFFSET, 16);
}
inline void start_copy_4(void* shared, const void* global) { gdn_on_cpu::start_copy(shared, global, 4); }
inline void wait_for_copies() { gdn_on_cpu::finish_copies(); }

constexpr bool HAS_BULK_COPIES = true;

// Bytes that are expected and not yet asked for, and rounds that are over.
struct CopyBarrier {
    int num_missing;
    unsigned int num_rounds;
};
inline void prepare_barrier(CopyBarrier& barrier) { barrier = {0, 0}; }
inline void expect_bytes(CopyBarrier& barrier, int num_bytes) { barrier.num_missing += num_bytes; }
inline void start_bulk_copy(void* shared, const void* global, int num_bytes, CopyBarrier& barrier, bool = false) {
    gdn_on_cpu::start_bulk_copy(shared, global, static_cast<size_t>(num_bytes));
    barrier.num_missing -= num_bytes;
    if (barrier.num_missing == 0) ++barrier.num_rounds;
}
// Kernels begin a round, meet, and then wait for it, so here it has begun when a thread waits.
inline void wait_for_round(CopyBarrier& barrier, unsigned int parity) {
    if (barrier.num_rounds % 2 == parity) gdn_on_cpu::refuse("waits for a round of copies that nobody began");
    gdn_on_cpu::finish_bulk_copies();
}

// Conversions: to nearest even, every NaN becomes 0x7fff, as on a GPU ----

inline float float16_bits_to_float(unsigned short bits) {
    // The exponent and mantissa moved into place are the value times 2^-112; a subnormal float16 becomes a
    // subnormal float32 on the way, and the product is exact.
    const unsigned int magnitude = (bits & 0x7fffu) << 13;
    const unsigned int sign = (bits & 0x8000u) << 16;
    const bool finite = magnitude < 0x0f800000u;
    const unsigned int scaled = __float_as_uint(__uint_as_float(magnitude) * 0x1p112f);
    return __uint_as_float(sign | (finite ? scaled : magnitude | 0x7f800000u));
}

inline unsigned short float_to_float16_bits(float value) {
    const unsigned int sign = __float_as_uint(value) >> 16 & 0x8000u;
    const unsigned int magnitude = __float_as_uint(value) & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
    if (magnitude >= 0x477ff000u) return static_cast<unsigned short>(sign | 0x7c00u);  // 65520 and above
    if (magnitude < 0x38800000u) {
        // Below 2^-14: adding 0.5 leaves the subnormal float16, rounded, in the lowest bits.
        const unsigned int rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - __float_as_uint(0.5f);
        return static_cast<unsigned short>(sign | rounded);
    }
    const unsigned int to_even = 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<unsigned short>(sign | ((magnitude - 0x38000000u + to_even) >> 13));
}

inline unsigned short float_to_bfloat16_bits(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#include "host/tensor_core.h"
