// Making tokens ready for a streaming block: keys, queries and values widened in shared memory, scalars worked out.
#pragma once
#include "recurrence.cuh"
#include "stream_work.cuh"

static_assert(IS_PACKED && WORKING_THREADS == 32 && NUM_CHAINS == 16 && ROW_GROUPS >= 2, "not a map for streaming");

// A token made ready: everything but the state itself. The rows of a row group are 4 floats further apart than they
// are many, so that lanes of different row groups read from different banks.
struct alignas(16) PreparedToken {
    static constexpr int ROW_GROUP_STRIDE = ROWS_PER_LANE + 4;
    float key[ROW_GROUPS * ROW_GROUP_STRIDE];
    float query[ROW_GROUPS * ROW_GROUP_STRIDE];
    float value[BLOCK_COLUMNS];
    TokenScalars scalars;
};

// The fewest values a lane that spread those of a block evenly over at most 32 lanes.
__host__ __device__ constexpr int values_of_lane() {
    int values = (BLOCK_COLUMNS + 31) / 32;
    while (BLOCK_COLUMNS % values != 0) ++values;
    return values;
}

// What a warp reads of a token that it makes ready: the lower lanes a chain of its key each, the upper ones of its
// query, all of them a part of its values.
struct LoadedToken {
    static constexpr int VALUES = values_of_lane();
    static constexpr int VALUE_LANES = BLOCK_COLUMNS / VALUES;
    Run<WORK_TYPE, CHAIN_LENGTH, true> rows;
    Run<WORK_TYPE, VALUES, true> values;
    GATE_TYPE decay;
    GATE_TYPE beta;

    __device__ __forceinline__ void load(const TokenArrays& arrays, const TileWork& work, long long token) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int value_lane = lane < VALUE_LANES ? lane : 0;
        const WORK_TYPE* const channels = arrays.qkv_conv_output + token * arrays.qkv_token_stride;
        const long long key_dim = arrays.num_key_heads * KEY_HEAD_DIM;
        rows.load(channels + (lane < 16 ? key_dim : 0) + static_cast<long long>(work.key_head) * KEY_HEAD_DIM +
                      lane % 16 * CHAIN_LENGTH,
                  1);
        values.load(channels + 2 * key_dim + static_cast<long long>(work.value_head) * VALUE_HEAD_DIM +
                        work.tile_column + value_lane * VALUES,
                    1);
        decay = arrays.decay_per_token[token * arrays.decay_token_stride + work.value_head * arrays.decay_head_stride];
        beta = arrays.beta_per_token[token * arrays.beta_token_stride + work.value_head * arrays.beta_head_stride];
    }
};

// The tokens of a chunk that a warp makes ready. Where the chunk has fewer, the warp repeats the chunk's last one, for the
// sake of code without branches, and nobody reads that.
struct LoadedTokens {
    LoadedToken tokens[TOKENS_PER_WARP];

    __device__ __forceinline__ static int first_token() { return static_cast<int>(threadIdx.x) / 32 * TOKENS_PER_WARP; }

    template <typename Records>
    __device__ __forceinline__ void load(const TokenArrays& arrays, const Chunk<Records>& chunk) {
        const int num_tokens = chunk.num_tokens();
        if (num_tokens == 0) return;
        #pragma unroll
        for (int i = 0; i < TOKENS_PER_WARP; ++i) {
            const int token = first_token() + i < num_tokens ? first_token() + i : num_tokens - 1;
            tokens[i].load(arrays, chunk.work, static_cast<long long>(chunk.token) + token);
        }
    }

    // `window` is told keys and decays.
    template <typename Records>
    __device__ __forceinline__ void prepare(
        PreparedToken* chunk_tokens, const Chunk<Records>& chunk, const typename Records::Window& window) const {
        const int num_tokens = chunk.num_tokens();
        if (num_tokens == 0) return;
        PreparedToken* const prepared = chunk_tokens + first_token();
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int row = lane % 16 * CHAIN_LENGTH;
        const int place_of_row = row + row / ROWS_PER_LANE * (PreparedToken::ROW_GROUP_STRIDE - ROWS_PER_LANE);
        float own[TOKENS_PER_WARP][CHAIN_LENGTH], inverse[TOKENS_PER_WARP];
        #pragma unroll
        for (int i = 0; i < TOKENS_PER_WARP; ++i) {
            #pragma unroll
            for (int j = 0; j < CHAIN_LENGTH; ++j) own[i][j] = tokens[i].rows[j];
            store_run<true>((lane < 16 ? prepared[i].key : prepared[i].query) + place_of_row, 1, own[i]);
            if (lane < LoadedToken::VALUE_LANES) {
                #pragma unroll
                for (int j = 0; j < LoadedToken::VALUES; ++j)
                    prepared[i].value[lane * LoadedToken::VALUES + j] = tokens[i].values[j];
            }
            inverse[i] = inverse_norm(add_across_lanes(thread_dot<1>(own[i], own[i]), 1, 16));
        }
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < TOKENS_PER_WARP; ++i) {
            const float* const other = (lane < 16 ? prepared[i].query : prepared[i].key) + place_of_row;
            const float query_dot_key = add_across_lanes(thread_dot<1>(own[i], other), 1, 16);
            const float inverse_query_norm = __shfl_sync(0xFFFFFFFFu, inverse[i], 16);
            if (lane == 0)
                prepared[i].scalars = token_scalars(inverse[i], inverse_query_norm, query_dot_key,
                                                    to_float(tokens[i].decay), to_float(tokens[i].beta));
            if (first_token() + i < num_tokens) {
                const long long place = chunk.token - chunk.begin + first_token() + i;
                if (lane < 16) window.write_key(place, row, own[i]);
                if (lane == 0) window.write_decay(place, to_float(tokens[i].decay));
            }
        }
    }
};
