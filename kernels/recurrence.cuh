// What the kernels that run tokens share: finding their work in a ragged batch, and the token loop over it.
// The arguments of the recurrence functions are described at the head of gated_delta_recurrence_fwd.cu.
#pragma once
#include "ragged_rows.cuh"
#include "row_tile.cuh"

struct TokenArrays {
    const WORK_TYPE* qkv_conv_output;
    long long qkv_token_stride;
    long long qkv_channel_stride;
    bool qkv_is_packed;
    const GATE_TYPE* decay_per_token;
    long long decay_token_stride;
    long long decay_head_stride;
    const GATE_TYPE* beta_per_token;
    long long beta_token_stride;
    long long beta_head_stride;
    OUT_TYPE* out;
    long long out_token_stride;
    long long out_channel_stride;
    bool out_is_packed;
    long long num_key_heads;
    long long group_size;
};

// The block's share of the batch.
struct TileWork {
    unsigned int sequence;
    unsigned int value_head;
    unsigned int key_head;
    int tile_column;  // first column of the tile in its value head
    int head_of_group;
};

// Blocks of the grid before those that clear unowned rows: tile fastest, then value head, then sequence.
// Block numbers fit 31 bits, and 32-bit divisions are several times cheaper than 64-bit ones.
__device__ __forceinline__ unsigned int num_recurrence_blocks(const TokenArrays& arrays, const Batch& batch) {
    const long long num_value_heads = arrays.num_key_heads * arrays.group_size;
    return static_cast<unsigned int>(batch.batch_size * num_value_heads * NUM_TILES);
}

__device__ __forceinline__ TileWork work_of_block(const TokenArrays& arrays) {
    const unsigned int group_size = static_cast<unsigned int>(arrays.group_size);
    const unsigned int num_value_heads = static_cast<unsigned int>(arrays.num_key_heads) * group_size;
    const unsigned int head_of_batch = blockIdx.x / NUM_TILES;
    TileWork work;
    work.sequence = head_of_batch / num_value_heads;
    work.value_head = head_of_batch % num_value_heads;
    work.key_head = work.value_head / group_size;
    work.head_of_group = static_cast<int>(work.value_head % group_size);
    work.tile_column = static_cast<int>(blockIdx.x % NUM_TILES) * TILE_COLUMNS;
    return work;
}

// A half warp prepares a token: one lane a chain.
constexpr int LANES_PER_TOKEN = 16;
constexpr int STAGE_TOKENS = NUM_THREADS / LANES_PER_TOKEN;

// Tokens of one stage, widened to float32 and shared by the block.
struct Stage {
    alignas(16) float key[STAGE_TOKENS][KEY_HEAD_DIM];
    alignas(16) float query[STAGE_TOKENS][KEY_HEAD_DIM];
    alignas(16) float value[STAGE_TOKENS][TILE_COLUMNS];
    TokenScalars scalars[STAGE_TOKENS];
};

// Where one value head finds a token's inputs.
struct TokenInputs {
    const WORK_TYPE* query;  // at the key head's first channel, token 0
    const WORK_TYPE* key;
    const WORK_TYPE* value;  // at the tile's first channel
    long long token_stride;
    long long channel_stride;
    bool is_packed;
    const GATE_TYPE* decay;  // at the value head, token 0
    long long decay_token_stride;
    const GATE_TYPE* beta;
    long long beta_token_stride;
};

// Read, widen and reduce up to STAGE_TOKENS tokens from `first_token` on.
__device__ __forceinline__ void fill_stage(
    Stage& stage, const TokenInputs& inputs, long long first_token, int num_tokens) {
    const int place = threadIdx.x / LANES_PER_TOKEN;
    const int lane = threadIdx.x % LANES_PER_TOKEN;
    const int first_row = lane % NUM_CHAINS * CHAIN_LENGTH;
    // Lanes past the last token read it again: shuffles need the whole warp, and the copy is never used.
    const long long token = first_token + (place < num_tokens ? place : num_tokens - 1);
    const long long token_offset = token * inputs.token_stride;
    const long long row_offset = token_offset + first_row * inputs.channel_stride;
    float key[CHAIN_LENGTH];
    float query[CHAIN_LENGTH];
    load_run(inputs.key + row_offset, inputs.channel_stride, inputs.is_packed, key);
    load_run(inputs.query + row_offset, inputs.channel_stride, inputs.is_packed, query);
    const float decay = to_float(inputs.decay[token * inputs.decay_token_stride]);
    const float beta = to_float(inputs.beta[token * inputs.beta_token_stride]);

    const float key_dot_key = add_across_lanes(chain_dot(key, key), 1, NUM_CHAINS);
    const float query_dot_query = add_across_lanes(chain_dot(query, query), 1, NUM_CHAINS);
    const float query_dot_key = add_across_lanes(chain_dot(query, key), 1, NUM_CHAINS);

    #pragma unroll
    for (int i = 0; i < CHAIN_LENGTH; ++i) {
        stage.key[place][first_row + i] = key[i];
        stage.query[place][first_row + i] = query[i];
    }
    for (int column = lane; column < TILE_COLUMNS; column += LANES_PER_TOKEN)
        stage.value[place][column] = to_float(inputs.value[token_offset + column * inputs.channel_stride]);
    if (lane == 0)
        stage.scalars[place] = token_scalars(key_dot_key, query_dot_query, query_dot_key, decay, beta);
}

// Complete the sums of a thread's columns over all row groups of the block. `partial` holds one warp's sums
// per tile column; callers alternate between two of them, which makes one barrier a token enough.
__device__ __forceinline__ void add_across_row_groups(
    StateSums (&sums)[COLUMNS_PER_LANE], StateSums (&partial)[NUM_WARPS][TILE_COLUMNS], int first_column) {
    #pragma unroll
    for (int column = 0; column < COLUMNS_PER_LANE; ++column) {
        sums[column].memory = add_across_lanes(sums[column].memory, LANES_PER_ROW, WARP_GROUP_LANES);
        sums[column].readout = add_across_lanes(sums[column].readout, LANES_PER_ROW, WARP_GROUP_LANES);
    }
    if constexpr (NUM_WARPS > 1) {
        if (threadIdx.x % 32 < LANES_PER_ROW) {
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column)
                partial[threadIdx.x / 32][first_column + column] = sums[column];
        }
        __syncthreads();
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) {
            StateSums branches[NUM_WARPS];
            #pragma unroll
            for (int warp = 0; warp < NUM_WARPS; ++warp) branches[warp] = partial[warp][first_column + column];
            #pragma unroll
            for (int distance = 1; distance < NUM_WARPS; distance *= 2)
                #pragma unroll
                for (int warp = 0; warp + distance < NUM_WARPS; warp += 2 * distance)
                    branches[warp] = add(branches[warp], branches[warp + distance]);
            sums[column] = branches[0];
        }
    }
}

__device__ __forceinline__ TokenInputs inputs_of(const TokenArrays& arrays, const TileWork& work) {
    const long long key_channel = static_cast<long long>(work.key_head) * KEY_HEAD_DIM;
    const long long key_dim = arrays.num_key_heads * KEY_HEAD_DIM;
    const long long value_channel =
        2 * key_dim + static_cast<long long>(work.value_head) * VALUE_HEAD_DIM + work.tile_column;
    return {arrays.qkv_conv_output + key_channel * arrays.qkv_channel_stride,
            arrays.qkv_conv_output + (key_dim + key_channel) * arrays.qkv_channel_stride,
            arrays.qkv_conv_output + value_channel * arrays.qkv_channel_stride,
            arrays.qkv_token_stride,
            arrays.qkv_channel_stride,
            arrays.qkv_is_packed,
            arrays.decay_per_token + work.value_head * arrays.decay_head_stride,
            arrays.decay_token_stride,
            arrays.beta_per_token + work.value_head * arrays.beta_head_stride,
            arrays.beta_token_stride};
}

// For kernels that keep no records.
struct NoRecords {
    __device__ __forceinline__ void token(long long, const float*, const float (&)[COLUMNS_PER_LANE], float) const {}
};

// Run the tokens [rows.begin, rows.end) from `state` on: writes their readout, leaves the last state in `state`.
// After each token `records.token(token, key, delta, decay)` is told what the token did to the state: the raw key
// (all of it, shared by the block), the thread's delta factors, and the decay.
template <typename Records>
__device__ __forceinline__ void run_tokens(
    const TokenArrays& arrays, const TileWork& work, const RowRange& rows, LaneState& state, const Records& records) {
    __shared__ Stage stage;
    __shared__ StateSums partial[2][NUM_WARPS][TILE_COLUMNS];
    const LanePlace lane = lane_place();
    const TokenInputs inputs = inputs_of(arrays, work);
    const long long first_channel =
        static_cast<long long>(work.value_head) * VALUE_HEAD_DIM + work.tile_column + lane.first_column;
    OUT_TYPE* const lane_out = arrays.out + first_channel * arrays.out_channel_stride;

    for (long long first_token = rows.begin; first_token < rows.end; first_token += STAGE_TOKENS) {
        const int num_tokens =
            static_cast<int>(rows.end - first_token < STAGE_TOKENS ? rows.end - first_token : STAGE_TOKENS);
        fill_stage(stage, inputs, first_token, num_tokens);
        __syncthreads();
        for (int place = 0; place < num_tokens; ++place) {
            const float* const key = stage.key[place] + lane.first_row;
            const TokenScalars scalars = stage.scalars[place];
            StateSums sums[COLUMNS_PER_LANE];
            thread_sums<CHAINS_PER_LANE, 0>(state, key, stage.query[place] + lane.first_row, sums);
            add_across_row_groups(sums, partial[place % 2], lane.first_column);

            float delta[COLUMNS_PER_LANE];
            float readout[COLUMNS_PER_LANE];
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) {
                delta[column] =
                    delta_factor(scalars, sums[column].memory, stage.value[place][lane.first_column + column]);
                readout[column] = token_readout(scalars, sums[column].readout, delta[column]);
            }
            if (threadIdx.x < LANES_PER_ROW)
                store_run(lane_out + (first_token + place) * arrays.out_token_stride, arrays.out_channel_stride,
                          arrays.out_is_packed, readout);
            records.token(first_token + place, stage.key[place], delta, scalars.decay);
            update_state(state, key, delta, scalars.decay);
        }
        __syncthreads();  // the next stage overwrites keys that slower warps may still read
    }
}
