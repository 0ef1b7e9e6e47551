// What the kernels of the chunked form hand to each other in memory: the plan, and what is made of a chunk before
// the walk along its row. gdn/backends/chunk_layout.py knows the same sizes.
#pragma once
#include "chunk_plan.cuh"
#include "tensor_core.cuh"

constexpr int OPERANDS = OPERAND_TERMS;
constexpr int PADDED_KEY_DIM = (KEY_HEAD_DIM + 63) / 64 * 64;
constexpr int KEY_ROW_BYTES = 128;                              // of a tile: 64 elements of keys or queries
constexpr int KEY_TILE_BYTES = CHUNK_LEN * KEY_ROW_BYTES;
constexpr int KEY_TERM_BYTES = PADDED_KEY_DIM / 64 * KEY_TILE_BYTES;  // all elements, tile after tile
constexpr int SCORE_ROW_BYTES = CHUNK_LEN * 2;
constexpr int SCORE_TERM_BYTES = CHUNK_LEN * SCORE_ROW_BYTES;   // a tile of CHUNK_LEN tokens by CHUNK_LEN tokens
constexpr int MAX_POWER = 40;  // of the powers of two that are taken out of a chunk

static_assert(KEY_HEAD_DIM % 32 == 0 && VALUE_HEAD_DIM % 32 == 0 && KEY_HEAD_DIM <= 256 && VALUE_HEAD_DIM <= 256, "heads");
static_assert(CHUNK_LEN == 64 || CHUNK_LEN == 32, "CHUNK_LEN");
static_assert(OPERANDS == 1 || OPERANDS == 2, "OPERAND_TERMS");

// Of a chunk and a value head. With G_i the sum of the logarithms of the decays of the chunk's tokens up to i, r_i what is
// left of the normalised key when a power of two is taken out of the raw one, readout_power what was taken out of solver and
// scores together:
struct ChunkScalars {
    float decayed[CHUNK_LEN];      // exp(G_i) / 2^readout_power
    float decayed_key[CHUNK_LEN];  // -exp(G_i) r_i
    float query[CHUNK_LEN];        // 2^readout_power times what is left of the normalised query, over sqrt(KEY_HEAD_DIM)
    float update[CHUNK_LEN];       // exp(G_last - G_i) r_i 2^solve_power
    float decay;                   // exp(G_last)
    int update_power;              // of the largest entry of `update`
    int num_good;                  // tokens before the first that holds what is not finite; CHUNK_LEN if there is none
    float first_decay;             // exp(G_0): the most that the chunk sees of the state before it
    int is_plain;                  // whether num_good, first_decay and update_power are as they are nearly always
    static constexpr int NUM_UNUSED = 11;
    int unused[NUM_UNUSED];

    // A walk that has one unit for the state and for values can do so unless updates are smaller than this, or the chunk
    // sees less than that of the state, but something.
    static constexpr int LEAST_UPDATE_POWER = -9;
    static constexpr float LEAST_DECAY = 0x1p-13f;

    __device__ __forceinline__ bool has_own_units() const {
        return update_power < LEAST_UPDATE_POWER || (first_decay < LEAST_DECAY && first_decay > 0.0f);
    }
};

// In this order. Of a key head: terms of keys, terms of queries. Of a value head: terms of the solver, terms of the scores,
// scalars. Key heads come first.
constexpr int KEY_HEAD_BYTES = 2 * OPERANDS * KEY_TERM_BYTES;
constexpr int SCALARS_OFFSET = 2 * OPERANDS * SCORE_TERM_BYTES;
constexpr int VALUE_HEAD_BYTES = SCALARS_OFFSET + static_cast<int>(sizeof(ChunkScalars));

static_assert(sizeof(ChunkScalars) == (4 * CHUNK_LEN + 16) * 4, "copied as it is");

struct ChunkSlab {
    unsigned char* bytes;
    long long num_key_heads;
    long long group_size;

    __device__ __forceinline__ long long chunk_bytes() const {
        return num_key_heads * (KEY_HEAD_BYTES + group_size * VALUE_HEAD_BYTES);
    }
    __device__ __forceinline__ unsigned char* key_head(long long chunk, long long key_head) const {
        return bytes + chunk * chunk_bytes() + key_head * KEY_HEAD_BYTES;
    }
    __device__ __forceinline__ unsigned char* value_head(long long chunk, long long value_head) const {
        return bytes + chunk * chunk_bytes() + num_key_heads * KEY_HEAD_BYTES + value_head * VALUE_HEAD_BYTES;
    }
};

// Where 8 neighbouring elements of a key or query of a token lie, from the start of a term.
__device__ __forceinline__ int key_piece_offset(int token, int piece) {
    return piece / 8 * KEY_TILE_BYTES + tile_offset<KEY_ROW_BYTES>(token, piece % 8);
}
