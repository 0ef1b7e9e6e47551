// gated_delta_recurrence_fwd: the Gated DeltaNet recurrence over a ragged batch, states in a pool.
//
// For each live sequence b and value head h, with S = recurrent_state[slot_idx[b], h], for each of its
// tokens in order (arithmetic, order of sums and rounding: gated_delta_step.cuh):
//   1. S <- decay[t,h] S   2. memory = S^T k   3. delta = beta[t,h] (value - memory)
//   4. S <- S + k delta^T  5. out[t,h] = S^T q / sqrt(KEY_HEAD_DIM)          k, q normalised
// Rows of `out` that no live sequence owns become zero.
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM: multiples of 8 from 8 to 256
//            WORK_TYPE (qkv), GATE_TYPE (decay, beta), STATE_TYPE (pool), OUT_TYPE: float, float16, bfloat16
//            ROW_GROUPS, LANES_PER_ROW, COLUMNS_PER_LANE, MIN_BLOCKS: the thread map below
// BLOCK      one sequence, one value head, one tile of TILE_COLUMNS = LANES_PER_ROW * COLUMNS_PER_LANE columns.
//            LANES_PER_ROW neighbouring threads (a row group) hold neighbouring columns of the same rows, so
//            that they read and write one contiguous piece of a state row; ROW_GROUPS row groups split the
//            rows, each a whole number of the tree's chains. max(32, ROW_GROUPS * LANES_PER_ROW) threads;
//            where 32 are more than the tile needs, the upper ones repeat the work of the lower ones.
// GRID       batch_size * num_value_heads * (VALUE_HEAD_DIM / TILE_COLUMNS) blocks, tile fastest, then head,
//            followed by ceil(total_seq_len / ROWS_PER_CLEARING_BLOCK) blocks that clear unowned rows.
// SHAPES     qkv_conv_output [total_seq_len, conv_dim], channels Q, K, V; decay_per_token, beta_per_token
//            [total_seq_len, num_value_heads]; recurrent_state [max_slots, num_value_heads, KEY_HEAD_DIM,
//            VALUE_HEAD_DIM], the last three dense; slot_idx [batch_size]; input_row_offsets
//            [batch_size + 1]; out [total_seq_len, num_value_heads * VALUE_HEAD_DIM]. Strides in elements.
// MUTATES    the slots of live, non-empty sequences; out.
// CALLER     guarantees that arrays do not overlap, that two live sequences never share a slot, and that
//            `*_is_packed` is set only where channels are neighbours and rows start on 16-byte boundaries.
//            Index values may be anything.
#include "gated_delta_step.cuh"
#include "numeric_types.cuh"
#include "ragged_rows.cuh"

constexpr int TILE_COLUMNS = LANES_PER_ROW * COLUMNS_PER_LANE;
constexpr int NUM_TILES = VALUE_HEAD_DIM / TILE_COLUMNS;
constexpr int WORKING_THREADS = ROW_GROUPS * LANES_PER_ROW;
constexpr int NUM_THREADS = WORKING_THREADS < 32 ? 32 : WORKING_THREADS;
constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int ROWS_PER_LANE = KEY_HEAD_DIM / ROW_GROUPS;
constexpr int CHAINS_PER_LANE = NUM_CHAINS / ROW_GROUPS;
constexpr int WARP_GROUP_LANES = WORKING_THREADS < 32 ? WORKING_THREADS : 32;

static_assert(VALUE_HEAD_DIM % TILE_COLUMNS == 0, "a tile must divide VALUE_HEAD_DIM");
static_assert(NUM_CHAINS % ROW_GROUPS == 0, "a row group holds whole chains");
static_assert((LANES_PER_ROW & (LANES_PER_ROW - 1)) == 0 && LANES_PER_ROW <= 32, "LANES_PER_ROW");
static_assert((ROW_GROUPS & (ROW_GROUPS - 1)) == 0, "ROW_GROUPS must be a power of two");

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

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS) gated_delta_recurrence_fwd(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    long long qkv_is_packed,
    const GATE_TYPE* __restrict__ decay_per_token, long long decay_token_stride, long long decay_head_stride,
    const GATE_TYPE* __restrict__ beta_per_token, long long beta_token_stride, long long beta_head_stride,
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride, long long state_is_packed,
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    long long out_is_packed,
    long long batch_size, long long total_seq_len, long long max_slots,
    long long num_key_heads, long long group_size) {
    __shared__ Stage stage;
    __shared__ StateSums partial[2][NUM_WARPS][TILE_COLUMNS];

    const Batch batch = {slot_idx, slot_idx_stride, input_row_offsets, input_row_offsets_stride,
                         offsets_are_signed != 0, batch_size, total_seq_len, max_slots};
    const long long num_value_heads = num_key_heads * group_size;
    // Block numbers fit 31 bits, and 32-bit divisions are several times cheaper than 64-bit ones.
    const unsigned int blocks_per_sequence = static_cast<unsigned int>(num_value_heads) * NUM_TILES;
    const unsigned int num_recurrence_blocks = static_cast<unsigned int>(batch_size) * blocks_per_sequence;
    if (blockIdx.x >= num_recurrence_blocks) {
        const long long first_row =
            static_cast<long long>(blockIdx.x - num_recurrence_blocks) * ROWS_PER_CLEARING_BLOCK;
        clear_unowned_rows(batch, first_row, out, out_token_stride, out_channel_stride,
                           num_value_heads * VALUE_HEAD_DIM);
        return;
    }
    const unsigned int sequence = blockIdx.x / blocks_per_sequence;
    const unsigned int value_head = blockIdx.x % blocks_per_sequence / NUM_TILES;
    const long long tile_channel =
        static_cast<long long>(value_head) * VALUE_HEAD_DIM + blockIdx.x % NUM_TILES * TILE_COLUMNS;
    const long long slot = live_slot(batch, sequence);
    const RowRange rows = sequence_rows(batch, sequence);
    if (slot < 0 || rows.begin >= rows.end) return;

    const int row_group = threadIdx.x / LANES_PER_ROW % ROW_GROUPS;
    const int first_row = row_group * ROWS_PER_LANE;
    const int first_column = threadIdx.x % LANES_PER_ROW * COLUMNS_PER_LANE;
    STATE_TYPE* const head_state = recurrent_state + slot * state_slot_stride +
                                   static_cast<long long>(value_head) * (KEY_HEAD_DIM * VALUE_HEAD_DIM) +
                                   first_row * VALUE_HEAD_DIM + tile_channel % VALUE_HEAD_DIM + first_column;
    float state[ROWS_PER_LANE][COLUMNS_PER_LANE];
    #pragma unroll
    for (int row = 0; row < ROWS_PER_LANE; ++row)
        load_run(head_state + row * VALUE_HEAD_DIM, 1, state_is_packed != 0, state[row]);

    const long long key_channel =
        static_cast<long long>(value_head / static_cast<unsigned int>(group_size)) * KEY_HEAD_DIM;
    const long long key_dim = num_key_heads * KEY_HEAD_DIM;
    const TokenInputs inputs = {
        qkv_conv_output + key_channel * qkv_channel_stride,
        qkv_conv_output + (key_dim + key_channel) * qkv_channel_stride,
        qkv_conv_output + (2 * key_dim + tile_channel) * qkv_channel_stride,
        qkv_token_stride, qkv_channel_stride, qkv_is_packed != 0,
        decay_per_token + value_head * decay_head_stride, decay_token_stride,
        beta_per_token + value_head * beta_head_stride, beta_token_stride};
    OUT_TYPE* const tile_out = out + (tile_channel + first_column) * out_channel_stride;

    for (long long first_token = rows.begin; first_token < rows.end; first_token += STAGE_TOKENS) {
        const int num_tokens =
            static_cast<int>(rows.end - first_token < STAGE_TOKENS ? rows.end - first_token : STAGE_TOKENS);
        fill_stage(stage, inputs, first_token, num_tokens);
        __syncthreads();
        for (int place = 0; place < num_tokens; ++place) {
            const float* const key = stage.key[place] + first_row;
            const TokenScalars scalars = stage.scalars[place];
            StateSums sums[COLUMNS_PER_LANE];
            thread_sums<CHAINS_PER_LANE, 0>(state, key, stage.query[place] + first_row, sums);
            add_across_row_groups(sums, partial[place % 2], first_column);

            float delta[COLUMNS_PER_LANE];
            float readout[COLUMNS_PER_LANE];
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) {
                delta[column] = delta_factor(scalars, sums[column].memory, stage.value[place][first_column + column]);
                readout[column] = token_readout(scalars, sums[column].readout, delta[column]);
            }
            if (threadIdx.x < LANES_PER_ROW)
                store_run(tile_out + (first_token + place) * out_token_stride, out_channel_stride,
                          out_is_packed != 0, readout);
            #pragma unroll
            for (int row = 0; row < ROWS_PER_LANE; ++row)
                #pragma unroll
                for (int column = 0; column < COLUMNS_PER_LANE; ++column)
                    state[row][column] = updated_element(state[row][column], key[row], delta[column], scalars.decay);
        }
        __syncthreads();  // the next stage overwrites keys that slower warps may still read
    }
    if (threadIdx.x < WORKING_THREADS) {
        #pragma unroll
        for (int row = 0; row < ROWS_PER_LANE; ++row)
            store_run(head_state + row * VALUE_HEAD_DIM, 1, state_is_packed != 0, state[row]);
    }
}
