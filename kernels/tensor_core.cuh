// Products of small float16 matrices on tensor cores, for one warp: what its lanes hold, and how they get it.
//
// A product adds left [16 x 16] times right [16 x 8] to sums [16 x 8]. With lane = 4 * group + place (place 0 to 3):
//
//   sums   a lane holds rows group and group + 8 of columns 2 * place and 2 * place + 1, in the order row, then column
//   left   word 0: row group, columns 2 * place and 2 * place + 1; word 1: row group + 8; words 2, 3: columns 8 more
//   right  word 0: rows 2 * place and 2 * place + 1 of column group; word 1: rows 8 more
//
// So the sums of two products that lie side by side, rounded, are the left operand of the next: chains of products need
// no exchange between lanes.
//
// float16 holds 11 bits. Where that is too few, an operand is the sum of two terms, the second what rounding to the first
// left over, and a product is three: first with first, first with second, second with first.
#pragma once
#include "numeric_types.cuh"

#ifndef GDN_ON_CPU

__device__ __forceinline__ void multiply_add(
    float (&sums)[4], const unsigned int (&left)[4], unsigned int right_low, unsigned int right_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

// Four 8 x 8 matrices out of shared memory. Lane 8 * m + r gives the address of row r of matrix m, 16 bytes; word m of a
// lane becomes row `group`, columns 2 * place and 2 * place + 1, of matrix m.
__device__ __forceinline__ void load_matrices(unsigned int (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(static_cast<unsigned int>(__cvta_generic_to_shared(row))) : "memory");
}

// The same of the transposed matrices: rows 2 * place and 2 * place + 1 of column `group`.
__device__ __forceinline__ void load_matrices_transposed(unsigned int (&words)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(static_cast<unsigned int>(__cvta_generic_to_shared(row))) : "memory");
}

// Transpose an 8 x 8 matrix of which each lane holds a word, as load_matrices leaves it.
__device__ __forceinline__ unsigned int transposed(unsigned int word) {
    unsigned int result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
    return result;
}

// Two values rounded to float16, the first in the lower half.
__device__ __forceinline__ unsigned int float16_pair(float first, float second) {
    unsigned int word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}

// 2 to the power of `exponent`, to within 2^-22 of itself.
__device__ __forceinline__ float power_of_two(float exponent) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
    return result;
}

#endif

// What a pair of float32 values leaves over when it is rounded to `rounded`.
__device__ __forceinline__ unsigned int left_over(float first, float second, unsigned int rounded) {
    return float16_pair(__fsub_rn(first, float16_bits_to_float(static_cast<unsigned short>(rounded & 0xFFFFu))),
                        __fsub_rn(second, float16_bits_to_float(static_cast<unsigned short>(rounded >> 16))));
}

// A left operand of one or two terms, [term][word].
template <int TERMS>
struct LeftOperand {
    unsigned int words[TERMS][4];

    __device__ __forceinline__ void set(int word, float first, float second) {
        words[0][word] = float16_pair(first, second);
        if constexpr (TERMS == 2) words[1][word] = left_over(first, second, words[0][word]);
    }

    // From the sums of two products side by side.
    __device__ __forceinline__ void set(const float (&left_sums)[4], const float (&right_sums)[4]) {
        set(0, left_sums[0], left_sums[1]);
        set(1, left_sums[2], left_sums[3]);
        set(2, right_sums[0], right_sums[1]);
        set(3, right_sums[2], right_sums[3]);
    }
};

// Right operands of two products side by side: [term][words 0 and 1 of the first, then of the second].
template <int TERMS>
struct RightOperands {
    unsigned int words[TERMS][4];

    // sums += left * right, right being the first (side 0) or the second of the two.
    __device__ __forceinline__ void multiply(float (&sums)[4], const LeftOperand<TERMS>& left, int side) const {
        multiply_add(sums, left.words[0], words[0][2 * side], words[0][2 * side + 1]);
        if constexpr (TERMS == 2) {
            multiply_add(sums, left.words[0], words[1][2 * side], words[1][2 * side + 1]);
            multiply_add(sums, left.words[1], words[0][2 * side], words[0][2 * side + 1]);
        }
    }
};

// ---- Tiles of float16 in shared memory ----

// A tile has rows of 128, 64 or 32 bytes. The 16-byte pieces of a row are swapped by a pattern that depends on the row, so
// that eight rows of a matrix lie in different banks. (Of 128 bytes it is the pattern that the tensor cores of compute
// capability 9.0 read by themselves.)
template <int ROW_BYTES>
__device__ __forceinline__ int tile_offset(int row, int piece) {
    static_assert(ROW_BYTES == 128 || ROW_BYTES == 64 || ROW_BYTES == 32, "rows of a tile");
    return row * ROW_BYTES + (piece ^ (row * ROW_BYTES / 128 & (ROW_BYTES / 16 - 1))) * 16;
}

// Where a lane finds its row of the four matrices of an operand that begins at the start of a tile: row by row of matrices,
// or column by column. An operand that begins at `row`, a multiple of 8, and `piece`, an even one, lies operand_offset on.
template <int ROW_BYTES>
__device__ __forceinline__ int row_first_offset(int lane = static_cast<int>(threadIdx.x) % 32) {
    return tile_offset<ROW_BYTES>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}
template <int ROW_BYTES>
__device__ __forceinline__ int column_first_offset(int lane = static_cast<int>(threadIdx.x) % 32) {
    return tile_offset<ROW_BYTES>(lane % 16, lane / 16);
}
template <int ROW_BYTES>
__device__ __forceinline__ int operand_offset(int lane_offset, int row, int piece) {
    return row * ROW_BYTES + (lane_offset ^ piece * 16);
}

// The lane as one turn of a loop, or one part of a kernel, knows it: addresses made from it take no registers elsewhere.
__device__ __forceinline__ int lane_in_turn(int turn) {
    int lane = static_cast<int>(threadIdx.x) % 32;
    hold_in_turn(lane, turn);
    return lane;
}

// The right operands whose columns are 16 rows of a tile, or that are 16 rows of a tile. Each term has a tile, `term_bytes`
// apart.
template <int ROW_BYTES, int TERMS>
__device__ __forceinline__ void load_rows(
    RightOperands<TERMS>& right, const unsigned char* tile, int term_bytes, int row, int piece,
    int lane_offset = row_first_offset<ROW_BYTES>()) {
    #pragma unroll
    for (int term = 0; term < TERMS; ++term)
        load_matrices(right.words[term], tile + term * term_bytes + operand_offset<ROW_BYTES>(lane_offset, row, piece));
}
template <int ROW_BYTES, int TERMS>
__device__ __forceinline__ void load_block(
    RightOperands<TERMS>& right, const unsigned char* tile, int term_bytes, int row, int piece,
    int lane_offset = column_first_offset<ROW_BYTES>()) {
    #pragma unroll
    for (int term = 0; term < TERMS; ++term)
        load_matrices_transposed(
            right.words[term], tile + term * term_bytes + operand_offset<ROW_BYTES>(lane_offset, row, piece));
}

// The left operands of the same.
template <int ROW_BYTES, int TERMS>
__device__ __forceinline__ void load_rows(
    LeftOperand<TERMS>& left, const unsigned char* tile, int term_bytes, int row, int piece) {
    const int offset = operand_offset<ROW_BYTES>(row_first_offset<ROW_BYTES>(), row, piece);
    #pragma unroll
    for (int term = 0; term < TERMS; ++term) load_matrices_transposed(left.words[term], tile + term * term_bytes + offset);
}
template <int ROW_BYTES, int TERMS>
__device__ __forceinline__ void load_block(
    LeftOperand<TERMS>& left, const unsigned char* tile, int term_bytes, int row, int piece,
    int lane_offset = column_first_offset<ROW_BYTES>()) {
    const int offset = operand_offset<ROW_BYTES>(lane_offset, row, piece);
    #pragma unroll
    for (int term = 0; term < TERMS; ++term) load_matrices(left.words[term], tile + term * term_bytes + offset);
}

// ---- Exact powers of two ----

// The largest power of two that is not above a positive float, as its exponent; 0 of 0.
__device__ __forceinline__ int exponent_of(float value) {
    const int exponent = static_cast<int>(__float_as_uint(value) >> 23 & 255u);
    return exponent == 0 ? 0 : exponent - 127;
}

// 2 to the power of a whole number, which is held within what a float can be.
__device__ __forceinline__ float whole_power(int exponent) {
    const int held = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    return __uint_as_float(static_cast<unsigned int>(held + 127) << 23);
}
