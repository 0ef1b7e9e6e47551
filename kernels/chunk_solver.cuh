// The inverse of I + A, A strictly lower triangular, for a chunk: by blocks of 16 x 16.
//
// The blocks on the diagonal are inverted by substitution in float32, T_jj = (I + A_jj)^-1. Then, column of blocks by column,
//
//   T_ij = -T_ii (A_ij T_jj + ... + A_i,i-1 T_i-1,j)      i = j + 1, j + 2, ...
//
// on tensor cores, with two terms each. One warp has a column. It holds transposed blocks: the sums of one product are
// then the left operand of the next, and blocks of A and T_ii, row by row in memory, are right operands.
#pragma once
#include "chunk_workspace.cuh"

constexpr int BLOCKS = CHUNK_LEN / 16;  // of a side
constexpr int BLOCK_ROW_BYTES = 32;
constexpr int BLOCK_BYTES = 16 * BLOCK_ROW_BYTES;
constexpr int TRIANGLE_BLOCKS = BLOCKS * (BLOCKS + 1) / 2;
constexpr int TRIANGLE_TERM_BYTES = TRIANGLE_BLOCKS * BLOCK_BYTES;

__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

__device__ __forceinline__ int block_number(int row, int column) { return row * (row + 1) / 2 + column; }

// In shared memory: A in two terms, its diagonal blocks in float32 until they are inverted: both take the same place.
struct Triangle {
    alignas(16) unsigned char terms[2 * TRIANGLE_TERM_BYTES];

    // A row of A_jj: rows 0 to 7 lie in the place of the first term, the others in that of the second.
    __device__ __forceinline__ float* diagonal_row(int j, int row) {
        return reinterpret_cast<float*>(block(j, j) + row / 8 * TRIANGLE_TERM_BYTES + row % 8 * 64);
    }

    __device__ __forceinline__ unsigned char* block(int row, int column) {
        return terms + block_number(row, column) * BLOCK_BYTES;
    }
    __device__ __forceinline__ unsigned char* term_word(int block, int row, int column) {
        return terms + block * BLOCK_BYTES + tile_offset<BLOCK_ROW_BYTES>(row, column / 8) + column % 8 * 2;
    }

    // Two neighbouring entries of A: of a block, a row of it, the `pair`th two of a piece.
    __device__ __forceinline__ void store_pair(
        int block_row, int block_column, int row, int piece, int pair, float first, float second) {
        if (block_row == block_column) {
            *reinterpret_cast<float2*>(diagonal_row(block_row, row) + piece * 8 + pair * 2) = make_float2(first, second);
            return;
        }
        const unsigned int rounded = float16_pair(first, second);
        unsigned char* const word =
            block(block_row, block_column) + tile_offset<BLOCK_ROW_BYTES>(row, piece) + pair * 4;
        *reinterpret_cast<unsigned int*>(word) = rounded;
        *reinterpret_cast<unsigned int*>(word + TRIANGLE_TERM_BYTES) = left_over(first, second, rounded);
    }
};

// Where two neighbouring entries of a tile of tokens by tokens lie: of row `row` + `next_rows`, `row` a multiple of 8, the
// `pair`th two of a piece.
__device__ __forceinline__ unsigned int* score_pair(unsigned char* tile, int row, int next_rows, int piece, int pair) {
    return reinterpret_cast<unsigned int*>(
        tile + row * SCORE_ROW_BYTES + (tile_offset<SCORE_ROW_BYTES>(next_rows, 0) ^ piece * 16) + pair * 4);
}
constexpr int SCORE_TERM_WORDS = SCORE_TERM_BYTES / 4;

__device__ __forceinline__ void store_score_pair(
    unsigned char* tile, int row, int next_rows, int piece, int pair, float first, float second) {
    const unsigned int rounded = float16_pair(first, second);
    unsigned int* const word = score_pair(tile, row, next_rows, piece, pair);
    word[0] = rounded;
    if constexpr (OPERANDS == 2) word[SCORE_TERM_WORDS] = left_over(first, second, rounded);
}

// Put the inverse of I + A_jj, in two terms, where A_jj would lie. By a half-warp, a lane for each column.
__device__ __forceinline__ void invert_block(Triangle& triangle, int j) {
    const int column = static_cast<int>(threadIdx.x) % 16;
    float inverse[16];
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == column ? 1.0f : 0.0f;
        #pragma unroll
        for (int k = 0; k < i; ++k) sum = fmaf(-triangle.diagonal_row(j, i)[k], inverse[k], sum);
        inverse[i] = sum;
    }
    __syncwarp();  // the inverse takes the block's place
    #pragma unroll
    for (int i = 0; i < 16; ++i) {
        const unsigned int rounded = float16_pair(inverse[i], 0.0f);
        unsigned char* const word = triangle.term_word(block_number(j, j), i, column);
        *reinterpret_cast<unsigned short*>(word) = static_cast<unsigned short>(rounded);
        *reinterpret_cast<unsigned short*>(word + TRIANGLE_TERM_BYTES) =
            static_cast<unsigned short>(left_over(inverse[i], 0.0f, rounded));
    }
}

// Columns 16 j to 16 j + 15 of the solver T diag(beta) * unit, from the finished triangle, into its tile. By a warp.
__device__ __forceinline__ void solve_column(
    Triangle& triangle, int j, const float* beta, float unit, unsigned char* solver) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const float scales[2] = {beta[16 * j + lane / 4] * unit, beta[16 * j + lane / 4 + 8] * unit};
    // Entries of a transposed block that a lane holds lie in one column of T, until they are transposed again.
    const auto store = [&](int i, int half, int side, float first, float second) {
        first *= scales[half];
        second *= scales[half];
        const unsigned int rounded = float16_pair(first, second);
        unsigned int* const word = score_pair(solver, 16 * i + 8 * side, lane / 4, 2 * j + half, lane % 4);
        word[0] = transposed(rounded);
        if constexpr (OPERANDS == 2) word[SCORE_TERM_WORDS] = transposed(left_over(first, second, rounded));
    };
    LeftOperand<2> column[BLOCKS];  // T_ij transposed; entries before j are never used
    #pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        float sums[2][4] = {};
        if (i == j) {
            load_rows<BLOCK_ROW_BYTES>(column[i], triangle.block(j, j), TRIANGLE_TERM_BYTES, 0, 0);
            #pragma unroll
            for (int word = 0; word < 4; ++word) {
                const unsigned int high = column[i].words[0][word];
                const unsigned int low = column[i].words[1][word];
                const auto value = [&](int shift) {
                    return float16_bits_to_float(static_cast<unsigned short>(high >> shift)) +
                           float16_bits_to_float(static_cast<unsigned short>(low >> shift));
                };
                sums[word / 2][word % 2 * 2] = value(0);
                sums[word / 2][word % 2 * 2 + 1] = value(16);
            }
        } else if (i > j) {
            float partial[2][4] = {};
            #pragma unroll
            for (int k = 0; k < i; ++k) {
                if (k < j) continue;
                RightOperands<2> right;
                load_rows<BLOCK_ROW_BYTES>(right, triangle.block(i, k), TRIANGLE_TERM_BYTES, 0, 0);
                right.multiply(partial[0], column[k], 0);
                right.multiply(partial[1], column[k], 1);
            }
            LeftOperand<2> left;
            left.set(partial[0], partial[1]);
            RightOperands<2> right;
            load_rows<BLOCK_ROW_BYTES>(right, triangle.block(i, i), TRIANGLE_TERM_BYTES, 0, 0);
            right.multiply(sums[0], left, 0);
            right.multiply(sums[1], left, 1);
            #pragma unroll
            for (int side = 0; side < 2; ++side)
                #pragma unroll
                for (int word = 0; word < 4; ++word) sums[side][word] = -sums[side][word];
            if (i + 1 < BLOCKS) column[i].set(sums[0], sums[1]);
        }
        #pragma unroll
        for (int side = 0; side < 2; ++side)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                store(i, half, side, sums[side][2 * half], sums[side][2 * half + 1]);
    }
}
