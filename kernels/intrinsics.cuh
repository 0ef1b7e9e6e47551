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

#endif
