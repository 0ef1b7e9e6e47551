// The few machine instructions that CUDA C has no portable spelling for, one function each.
// The CPU build brings functions of the same names in host/cuda_on_cpu.h.
#pragma once
#ifndef GDN_ON_CPU

__device__ __forceinline__ float float16_bits_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Round to nearest even, as the two functions below.
__device__ __forceinline__ unsigned short float_to_float16_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ unsigned short float_to_bfloat16_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// 1 / sqrt(value), to within 2^-22 of itself.
__device__ __forceinline__ float reciprocal_square_root(float value) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// 1 / (1 + exp(-value)), to within 2^-20 of itself where value is above -16; below, what is wrong is less than 2^-42.
__device__ __forceinline__ float sigmoid(float value) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value * -1.44269504f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(power + 1.0f));
    return result;
}

// Hold a value as it is now. Without, the compiler keeps what it was made from and makes it again at every use.
__device__ __forceinline__ void hold(float& value) { asm volatile("" : "+f"(value)); }

// Hold a value in one turn of a loop, `turn` being a number of the loop's own, 0 or more. Without, the assembler makes all
// that depends on the value before the loop, and keeps it.
__device__ __forceinline__ void hold_in_turn(float& value, int turn) {
    asm volatile("{\n.reg .b32 zero;\nshr.s32 zero, %1, 31;\nor.b32 %0, %0, zero;\n}" : "+f"(value) : "r"(turn));
}
__device__ __forceinline__ void hold_in_turn(int& value, int turn) {
    asm volatile("{\n.reg .b32 zero;\nshr.s32 zero, %1, 31;\nor.b32 %0, %0, zero;\n}" : "+r"(value) : "r"(turn));
}
__device__ __forceinline__ void hold_in_turn(long long& value, int turn) {
    asm volatile(
        "{\n"
        ".reg .b32 zero;\n"
        ".reg .b64 wide;\n"
        "shr.s32 zero, %1, 31;\n"
        "cvt.s64.s32 wide, zero;\n"
        "or.b64 %0, %0, wide;\n"
        "}" : "+l"(value) : "r"(turn));
}

template <typename Value>
__device__ __forceinline__ void hold_pointer(Value*& pointer) { asm volatile("" : "+l"(pointer)); }

// `value` becomes *address where `is_wanted` says so. A load in a branch would be waited for at the branch's end.
__device__ __forceinline__ void load_if(bool is_wanted, const unsigned int* address, unsigned int& value) {
    asm volatile(
        "{\n"
        ".reg .pred is_wanted;\n"
        "setp.ne.s32 is_wanted, %2, 0;\n"
        "@is_wanted ld.global.u32 %0, [%1];\n"
        "}" : "+r"(value) : "l"(address), "r"(static_cast<int>(is_wanted)));
}

// BYTES of shared memory, the same at every call; they may be more than the 48 KiB of a __shared__ variable. The launch
// must ask for as many.
template <int BYTES>
__device__ __forceinline__ unsigned char* launch_shared_memory() {
    extern __shared__ __align__(16) unsigned char memory[];
    return memory;
}

// Copy 16 bytes from global to shared memory without waiting, each at a constant offset in bytes; both lie on 16-byte
// boundaries. The calling thread sees them after wait_for_copies, others after it has met them as well. (The form that
// allocates in L1 writes shared memory in a third of the passes that the other one takes.)
template <int SHARED_OFFSET, int GLOBAL_OFFSET>
__device__ __forceinline__ void start_copy_16(void* shared, const void* global) {
    const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0+%2], [%1+%3], 16;" ::"r"(address), "l"(global), "n"(SHARED_OFFSET),
                 "n"(GLOBAL_OFFSET) : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void start_copy_4(void* shared, const void* global) {
    const unsigned int address = static_cast<unsigned int>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address), "l"(global) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same in bulk, by the copy engine that compute capability 9.0 brought: `num_bytes`, a multiple of 16, that one thread
// asks for and a whole block waits for.
#if __CUDA_ARCH__ >= 900
constexpr bool HAS_BULK_COPIES = true;
#else
constexpr bool HAS_BULK_COPIES = false;
#endif

// In shared memory. Counts the bytes of one round of copies after the other; rounds are told apart by their parity.
struct alignas(8) CopyBarrier {
    unsigned long long bits;
};

// By one thread; the block must meet before it is used.
__device__ __forceinline__ void prepare_barrier(CopyBarrier& barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(
                     static_cast<unsigned int>(__cvta_generic_to_shared(&barrier))) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Begin a round of `num_bytes` in all. By one thread, before it starts the copies.
__device__ __forceinline__ void expect_bytes(CopyBarrier& barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(
                     static_cast<unsigned int>(__cvta_generic_to_shared(&barrier))), "r"(num_bytes) : "memory");
}

// `leaves_first`: whether the memory read should be the first to leave the L2 cache.
__device__ __forceinline__ void start_bulk_copy(
    void* shared, const void* global, int num_bytes, CopyBarrier& barrier, bool leaves_first = false) {
    const unsigned int target = static_cast<unsigned int>(__cvta_generic_to_shared(shared));
    const unsigned int barrier_address = static_cast<unsigned int>(__cvta_generic_to_shared(&barrier));
    if (leaves_first) {
        unsigned long long policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
            ::"r"(target), "l"(global), "r"(num_bytes), "r"(barrier_address), "l"(policy) : "memory");
    } else {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         target), "l"(global), "r"(num_bytes), "r"(barrier_address) : "memory");
    }
}

__device__ __forceinline__ void wait_for_round(CopyBarrier& barrier, unsigned int parity) {
    asm volatile(
        "{\n"
        ".reg .pred is_over;\n"
        "again: mbarrier.try_wait.parity.shared.b64 is_over, [%0], %1;\n"
        "@!is_over bra again;\n"
        "}" ::"r"(static_cast<unsigned int>(__cvta_generic_to_shared(&barrier))), "r"(parity) : "memory");
}

#endif
