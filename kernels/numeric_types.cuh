// Storage types, and moving runs of them between memory and float32 registers.
//
// Arithmetic is float32 everywhere; these types only say how a value lies in memory. Widening is exact,
// narrowing rounds to nearest even.
#pragma once
#include "intrinsics.cuh"

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(float16 value) { return float16_bits_to_float(value.bits); }
__device__ __forceinline__ float to_float(bfloat16 value) {
    return __uint_as_float(static_cast<unsigned int>(value.bits) << 16);
}

__device__ __forceinline__ void from_float(float value, float& stored) { stored = value; }
__device__ __forceinline__ void from_float(float value, float16& stored) { stored.bits = float_to_float16_bits(value); }
__device__ __forceinline__ void from_float(float value, bfloat16& stored) { stored.bits = float_to_bfloat16_bits(value); }

// COUNT neighbouring values as one memory access.
template <typename Stored, int COUNT>
struct alignas(sizeof(Stored) * COUNT) Packed {
    Stored values[COUNT];
};

// The most neighbouring values, a power of two that divides COUNT, that one access of 16 bytes can move.
template <typename Stored, int COUNT>
__host__ __device__ constexpr int packed_width() {
    int width = 1;
    while (COUNT % (2 * width) == 0 && 2 * width * static_cast<int>(sizeof(Stored)) <= 16) width *= 2;
    return width;
}

// Read COUNT values that lie `stride` elements apart. `packed` says that the stride is 1 and that the run
// starts on a 16-byte boundary or on a multiple of its own widest access; the values are the same either way.
template <typename Stored, int COUNT>
__device__ __forceinline__ void load_run(const Stored* source, long long stride, bool packed, float (&values)[COUNT]) {
    if (packed) {
        constexpr int WIDTH = packed_width<Stored, COUNT>();
        #pragma unroll
        for (int first = 0; first < COUNT; first += WIDTH) {
            const auto pack = *reinterpret_cast<const Packed<Stored, WIDTH>*>(source + first);
            #pragma unroll
            for (int i = 0; i < WIDTH; ++i) values[first + i] = to_float(pack.values[i]);
        }
    } else {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) values[i] = to_float(source[i * stride]);
    }
}

// The counterpart of load_run; rounds to the stored type.
template <typename Stored, int COUNT>
__device__ __forceinline__ void store_run(Stored* target, long long stride, bool packed, const float (&values)[COUNT]) {
    if (packed) {
        constexpr int WIDTH = packed_width<Stored, COUNT>();
        #pragma unroll
        for (int first = 0; first < COUNT; first += WIDTH) {
            Packed<Stored, WIDTH> pack;
            #pragma unroll
            for (int i = 0; i < WIDTH; ++i) from_float(values[first + i], pack.values[i]);
            *reinterpret_cast<Packed<Stored, WIDTH>*>(target + first) = pack;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) from_float(values[i], target[i * stride]);
    }
}
