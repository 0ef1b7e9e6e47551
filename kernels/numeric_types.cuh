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

// How long memory that is accessed once should stay in the caches: as long as usual, or not longer than it must.
enum class Stay { USUAL, SHORT };

// The built-in type that hinted accesses of so many bytes take.
template <int BYTES>
struct AccessOf;
template <>
struct AccessOf<16> {
    using Type = uint4;
};
template <>
struct AccessOf<8> {
    using Type = uint2;
};
template <>
struct AccessOf<4> {
    using Type = unsigned int;
};
template <>
struct AccessOf<2> {
    using Type = unsigned short;
};

template <Stay STAY, typename Pack>
__device__ __forceinline__ Pack load_pack(const Pack* source) {
    if constexpr (STAY == Stay::USUAL) {
        return *source;
    } else {
        const auto bits = __ldcs(reinterpret_cast<const typename AccessOf<sizeof(Pack)>::Type*>(source));
        return *reinterpret_cast<const Pack*>(&bits);
    }
}

template <Stay STAY, typename Pack>
__device__ __forceinline__ void store_pack(Pack* target, const Pack& pack) {
    if constexpr (STAY == Stay::USUAL) {
        *target = pack;
    } else {
        using Access = typename AccessOf<sizeof(Pack)>::Type;
        __stcs(reinterpret_cast<Access*>(target), *reinterpret_cast<const Access*>(&pack));
    }
}

// The most neighbouring values, a power of two that divides COUNT, that one access of 16 bytes can move.
template <typename Stored, int COUNT>
__host__ __device__ constexpr int packed_width() {
    int width = 1;
    while (COUNT % (2 * width) == 0 && 2 * width * static_cast<int>(sizeof(Stored)) <= 16) width *= 2;
    return width;
}

// A value out of the 32-bit words that hold several, or one.
__device__ __forceinline__ float float_of_word(const unsigned int* words, int i, float) {
    return __uint_as_float(words[i]);
}
template <typename Stored>
__device__ __forceinline__ float float_of_word(const unsigned int* words, int i, Stored) {
    return to_float(Stored{static_cast<unsigned short>(i % 2 == 0 ? words[i / 2] & 0xFFFFu : words[i / 2] >> 16)});
}

// COUNT values as they lie in memory, read in one go and widened at their use: a kernel issues all its loads before it
// needs the first value. PACKED says that the values are neighbours and that the run starts on a 16-byte boundary or on
// a multiple of its own widest access; otherwise they lie `stride` elements apart. The values are the same either way.
// It is a constant because the addresses of the strided form would take a register pair each.
//
// The packed form keeps whole words: a compiler that sees 16-bit values takes the words apart where they are loaded, and
// so waits for the load.
template <typename Stored, int COUNT, bool PACKED, bool IN_WORDS = PACKED && COUNT * sizeof(Stored) % 4 == 0>
struct Run {
    static constexpr int WIDTH = packed_width<Stored, COUNT>();
    Packed<Stored, WIDTH> packs[COUNT / WIDTH];

    template <Stay STAY = Stay::USUAL>
    __device__ __forceinline__ void load(const Stored* source, long long stride) {
        #pragma unroll
        for (int i = 0; i < COUNT / WIDTH; ++i) {
            if constexpr (PACKED) {
                packs[i] = load_pack<STAY>(reinterpret_cast<const Packed<Stored, WIDTH>*>(source + i * WIDTH));
            } else {
                #pragma unroll
                for (int j = 0; j < WIDTH; ++j) packs[i].values[j] = source[(i * WIDTH + j) * stride];
            }
        }
    }

    __device__ __forceinline__ float operator[](int i) const { return to_float(packs[i / WIDTH].values[i % WIDTH]); }
};

template <typename Stored, int COUNT>
struct Run<Stored, COUNT, true, true> {
    static constexpr int WORDS = COUNT * sizeof(Stored) / 4;
    static constexpr int WIDTH = packed_width<Stored, COUNT>() * sizeof(Stored) / 4;  // in words
    unsigned int words[WORDS];

    template <Stay STAY = Stay::USUAL>
    __device__ __forceinline__ void load(const Stored* source, long long) {
        #pragma unroll
        for (int first = 0; first < WORDS; first += WIDTH) {
            const auto pack = load_pack<STAY>(reinterpret_cast<const Packed<unsigned int, WIDTH>*>(
                reinterpret_cast<const unsigned int*>(source) + first));
            #pragma unroll
            for (int i = 0; i < WIDTH; ++i) words[first + i] = pack.values[i];
        }
    }

    __device__ __forceinline__ float operator[](int i) const { return float_of_word(words, i, Stored{}); }
};

// Write COUNT values, rounded to the stored type, where Run::load would read them.
template <bool PACKED, Stay STAY = Stay::USUAL, typename Stored, int COUNT>
__device__ __forceinline__ void store_run(Stored* target, long long stride, const float (&values)[COUNT]) {
    if constexpr (PACKED) {
        constexpr int WIDTH = packed_width<Stored, COUNT>();
        #pragma unroll
        for (int first = 0; first < COUNT; first += WIDTH) {
            Packed<Stored, WIDTH> pack;
            #pragma unroll
            for (int i = 0; i < WIDTH; ++i) from_float(values[first + i], pack.values[i]);
            store_pack<STAY>(reinterpret_cast<Packed<Stored, WIDTH>*>(target + first), pack);
        }
    } else {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) from_float(values[i], target[i * stride]);
    }
}
