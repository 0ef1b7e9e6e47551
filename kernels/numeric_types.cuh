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

// COUNT values as they lie in memory, read in one go and widened at their use: a kernel issues all its loads before it
// needs the first value. PACKED says that the values are neighbours and that the run starts on a 16-byte boundary or on
// a multiple of its own widest access; otherwise they lie `stride` elements apart. The values are the same either way.
// It is a constant because the addresses of the strided form would take a register pair each.
template <typename Stored, int COUNT, bool PACKED>
struct Run {
    static constexpr int WIDTH = packed_width<Stored, COUNT>();
    Packed<Stored, WIDTH> packs[COUNT / WIDTH];

    __device__ __forceinline__ void load(const Stored* source, long long stride) {
        if constexpr (PACKED) {
            #pragma unroll
            for (int i = 0; i < COUNT / WIDTH; ++i)
                packs[i] = *reinterpret_cast<const Packed<Stored, WIDTH>*>(source + i * WIDTH);
        } else {
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) packs[i / WIDTH].values[i % WIDTH] = source[i * stride];
        }
    }

    __device__ __forceinline__ float operator[](int i) const { return to_float(packs[i / WIDTH].values[i % WIDTH]); }
};

// Write COUNT values, rounded to the stored type, where Run::load would read them.
template <bool PACKED, typename Stored, int COUNT>
__device__ __forceinline__ void store_run(Stored* target, long long stride, const float (&values)[COUNT]) {
    if constexpr (PACKED) {
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
