// run_batch, as a block for each tile: its threads share the rows of the tile, and meet once a token to add their sums.
//
// GRID       num_tiles_of(...) blocks, followed with CLEARS_ROWS by ceil(total_seq_len / ROWS_PER_CLEARING_BLOCK) that
//            clear rows
#pragma once
#include "pending.cuh"
#include "recurrence.cuh"

// A warp reads the keys and queries of its own rows and spreads them among its lanes through shared memory.
__host__ __device__ constexpr int staged_rows() {
    int rows = (WARP_ROWS + 31) / 32;
    while (WARP_ROWS % rows != 0) ++rows;
    return rows;
}
constexpr int STAGED_ROWS = staged_rows();  // that one lane reads
constexpr int STAGING_LANES = WARP_ROWS / STAGED_ROWS;

// Where a thread finds a token's inputs: the channels of the rows it reads and of its columns, and its value head's
// gates, at token 0.
struct TokenInputs {
    const WORK_TYPE* query;
    const WORK_TYPE* key;
    const WORK_TYPE* value;
    const GATE_TYPE* decay;
    const GATE_TYPE* beta;
};

__device__ __forceinline__ int first_staged_row() {
    return static_cast<int>(threadIdx.x) / 32 * WARP_ROWS + static_cast<int>(threadIdx.x) % 32 * STAGED_ROWS;
}

__device__ __forceinline__ TokenInputs inputs_of(const TokenArrays& arrays, const TileWork& work) {
    const int lane = threadIdx.x % 32 < STAGING_LANES ? threadIdx.x % 32 : 0;
    const long long key_channel = static_cast<long long>(work.key_head) * KEY_HEAD_DIM +
                                  static_cast<int>(threadIdx.x) / 32 * WARP_ROWS + lane * STAGED_ROWS;
    const long long key_dim = arrays.num_key_heads * KEY_HEAD_DIM;
    const long long value_channel = 2 * key_dim + static_cast<long long>(work.value_head) * VALUE_HEAD_DIM +
                                    work.tile_column + lane_place().first_column;
    return {arrays.qkv_conv_output + key_channel * arrays.qkv_channel_stride,
            arrays.qkv_conv_output + (key_dim + key_channel) * arrays.qkv_channel_stride,
            arrays.qkv_conv_output + value_channel * arrays.qkv_channel_stride,
            arrays.decay_per_token + work.value_head * arrays.decay_head_stride,
            arrays.beta_per_token + work.value_head * arrays.beta_head_stride};
}

// A token's inputs as they lie in memory.
struct StoredToken {
    Run<WORK_TYPE, STAGED_ROWS, IS_PACKED> key;
    Run<WORK_TYPE, STAGED_ROWS, IS_PACKED> query;
    Run<WORK_TYPE, COLUMNS_PER_LANE, IS_PACKED> value;
    GATE_TYPE decay;
    GATE_TYPE beta;

    __device__ __forceinline__ void load(const TokenArrays& arrays, const TokenInputs& inputs, long long token) {
        const long long offset = token * arrays.qkv_token_stride;
        key.load(inputs.key + offset, arrays.qkv_channel_stride);
        query.load(inputs.query + offset, arrays.qkv_channel_stride);
        value.load(inputs.value + offset, arrays.qkv_channel_stride);
        decay = inputs.decay[token * arrays.decay_token_stride];
        beta = inputs.beta[token * arrays.beta_token_stride];
    }
};

// The raw key and query of one token.
struct StagedToken {
    alignas(16) float key[KEY_HEAD_DIM];
    alignas(16) float query[KEY_HEAD_DIM];
};

// Bring a token's key and query to the lanes of the warp. Callers alternate between two `staged`: a lane that writes one
// again has met, at the barrier of the token between, all lanes that read it.
__device__ __forceinline__ void stage_token(StagedToken& staged, const StoredToken& token) {
    if (threadIdx.x % 32 < STAGING_LANES) {
        const int first = first_staged_row();
        #pragma unroll
        for (int i = 0; i < STAGED_ROWS; ++i) {
            staged.key[first + i] = token.key[i];
            staged.query[first + i] = token.query[i];
        }
    }
    __syncwarp();
}

// All that a token sums over the key head dimension, as far as a thread's rows go: key.key, query.query, query.key, an
// unused place, then the memory of each column, then the readout of each column.
constexpr int NUM_SUMS = 4 + 2 * COLUMNS_PER_LANE + (4 - 2 * COLUMNS_PER_LANE % 4) % 4;
using TokenSums = float[NUM_SUMS];

// What the warps of a block leave for each other: their part of every sum, by lane of a row.
struct alignas(16) PartialSums {
    float sums[NUM_WARPS][LANES_PER_ROW][NUM_SUMS];
};

// Complete the sums over all row groups of the block. Callers alternate between two `partial`, which makes one barrier a
// token enough.
__device__ __forceinline__ void add_across_row_groups(TokenSums& sums, PartialSums& partial) {
    #pragma unroll
    for (int i = 0; i < NUM_SUMS; ++i)
        if (i != 3) sums[i] = add_across_lanes(sums[i], LANES_PER_ROW, WARP_GROUP_LANES);
    if constexpr (NUM_WARPS > 1) {
        const int lane_of_row = threadIdx.x % LANES_PER_ROW;
        if (threadIdx.x % 32 < LANES_PER_ROW)
            store_run<true>(partial.sums[threadIdx.x / 32][lane_of_row], 1, sums);
        __syncthreads();
        #pragma unroll
        for (int first = 0; first < NUM_SUMS; first += 4) {
            Packed<float, 4> branches[NUM_WARPS];
            #pragma unroll
            for (int warp = 0; warp < NUM_WARPS; ++warp)
                branches[warp] = *reinterpret_cast<const Packed<float, 4>*>(&partial.sums[warp][lane_of_row][first]);
            #pragma unroll
            for (int distance = 1; distance < NUM_WARPS; distance *= 2)
                #pragma unroll
                for (int warp = 0; warp + distance < NUM_WARPS; warp += 2 * distance)
                    #pragma unroll
                    for (int i = 0; i < 4; ++i)
                        branches[warp].values[i] = __fadd_rn(branches[warp].values[i], branches[warp + distance].values[i]);
            #pragma unroll
            for (int i = 0; i < 4; ++i) sums[first + i] = branches[0].values[i];
        }
    }
}

// Leave a token's record, as far as it is this thread's to write.
template <typename Records>
__device__ __forceinline__ void record_token(
    const typename Records::Window& window, long long place, const float* key, const float (&delta)[COLUMNS_PER_LANE], float decay) {
    const LanePlace lane = lane_place();
    if (threadIdx.x < LANES_PER_ROW && window.is_recorded)
        store_run<Records::ARE_PACKED>(window.delta_row(place, lane.first_column), 1, delta);
    if (threadIdx.x == NUM_THREADS - 1) window.write_decay(place, decay);
    if (threadIdx.x % LANES_PER_ROW == 0) {
        float rows[ROWS_PER_LANE];
        #pragma unroll
        for (int row = 0; row < ROWS_PER_LANE; ++row) rows[row] = key[lane.first_row + row];
        window.write_key(place, lane.first_row, rows);
    }
}

#if HAS_PENDING
// A pending record as it lies in the ring: the rows of the key that a lane reads, the delta factors of its columns.
struct StoredRecord {
    Run<RING_TYPE, STAGED_ROWS, RING_IS_PACKED> key;
    Run<RING_TYPE, COLUMNS_PER_LANE, RING_IS_PACKED> delta;
    RING_TYPE decay;

    __device__ __forceinline__ void load(const PendingWindow& pending, unsigned int i) {
        const RING_TYPE* const record = pending.record(i);
        key.load(record + (threadIdx.x % 32 < STAGING_LANES ? first_staged_row() : 0), 1);
        delta.load(record + pending.delta_offset + lane_place().first_column, 1);
        decay = record[pending.decay_offset];
    }
};

// Advance the state over its pending records, if any. `staged` as in stage_token, the first for the first record.
__device__ __forceinline__ void apply_pending(LaneState& state, const PendingWindow& pending, StagedToken (&staged)[2]) {
    if (pending.count == 0) return;
    StoredRecord next;
    next.load(pending, 0);
    for (unsigned int i = 0; i < pending.count; ++i) {
        const StoredRecord current = next;
        next.load(pending, i + 1 < pending.count ? i + 1 : i);
        float* const key = staged[i % 2].key;
        if (threadIdx.x % 32 < STAGING_LANES) {
            #pragma unroll
            for (int row = 0; row < STAGED_ROWS; ++row) key[first_staged_row() + row] = current.key[row];
        }
        __syncwarp();
        float delta[COLUMNS_PER_LANE];
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) delta[column] = current.delta[column];
        update_state(state, key + lane_place().first_row, delta, to_float(current.decay));
    }
    __syncwarp();  // before a token takes the place of the last record
}
#endif

// Run the tokens [rows.begin, rows.end) from the state in the pool on, at least one unless records are pending: writes
// their readout and records, leaves the last state in `state`.
template <typename Records>
__device__ __forceinline__ void run_tokens(
    const TokenArrays& arrays, const TileWork& work, const RowRange& rows, STATE_TYPE* pool, LaneState& state,
    const Records& records, const typename Records::Entries& entries, const typename Records::Window& window) {
    __shared__ PartialSums partial[2];
    __shared__ StagedToken staged[2];
    const TokenInputs inputs = inputs_of(arrays, work);
    const long long first_channel =
        static_cast<long long>(work.value_head) * VALUE_HEAD_DIM + work.tile_column + lane_place().first_column;
    OUT_TYPE* const lane_out = arrays.out + first_channel * arrays.out_channel_stride;

    // Every load is under way before the first value is used.
    StoredState stored_state;
    stored_state.load_from_pool(pool);
    StoredToken next;
    if (!Records::MAY_PEND || rows.begin < rows.end) next.load(arrays, inputs, rows.begin);
    stored_state.widen(state);
    if constexpr (Records::MAY_PEND) {
        const auto pending = records.pending_window(work, entries);
        apply_pending(state, pending, staged);
        if (pending.count > 0 && pending.is_folded) {
            const bool is_stored_later = rows.begin < rows.end && !window.is_recorded;
            const bool stores = !is_stored_later && threadIdx.x < WORKING_THREADS;
            #pragma unroll
            for (int row = 0; row < ROWS_PER_LANE; ++row)
                fold_row(state[row], stores ? pool + row * VALUE_HEAD_DIM : nullptr);
        }
    }

    for (long long token = rows.begin; token < rows.end; ++token) {
        const StoredToken current = next;
        if (token + 1 < rows.end) next.load(arrays, inputs, token + 1);
        stage_token(staged[token % 2], current);
        const float* const key = staged[token % 2].key + lane_place().first_row;
        const float* const query = staged[token % 2].query + lane_place().first_row;

        TokenSums sums;
        sums[0] = thread_dot<CHAINS_PER_LANE>(key, key);
        sums[1] = thread_dot<CHAINS_PER_LANE>(query, query);
        sums[2] = thread_dot<CHAINS_PER_LANE>(query, key);
        sums[3] = 0.0f;
        float memory[COLUMNS_PER_LANE];
        float readout[COLUMNS_PER_LANE];
        thread_sums<CHAINS_PER_LANE>(state, key, query, memory, readout);
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) {
            sums[4 + column] = memory[column];
            sums[4 + COLUMNS_PER_LANE + column] = readout[column];
        }
        #pragma unroll
        for (int i = 4 + 2 * COLUMNS_PER_LANE; i < NUM_SUMS; ++i) sums[i] = 0.0f;
        add_across_row_groups(sums, partial[token % 2]);

        const float decay = to_float(current.decay);
        const TokenScalars scalars = token_scalars(inverse_norm(sums[0]), inverse_norm(sums[1]), sums[2], decay,
                                                   to_float(current.beta));
        float delta[COLUMNS_PER_LANE];
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) {
            delta[column] = delta_factor(scalars, counted_sum(sums[4 + column], decay), current.value[column]);
            readout[column] = token_readout(
                scalars, counted_sum(sums[4 + COLUMNS_PER_LANE + column], decay), delta[column]);
        }
        if (threadIdx.x < LANES_PER_ROW)
            store_run<IS_PACKED>(lane_out + token * arrays.out_token_stride, arrays.out_channel_stride, readout);
        record_token<Records>(window, token - rows.begin, staged[token % 2].key, delta, decay);
        update_state(state, key, delta, decay);
    }
}

template <typename Records>
__device__ __forceinline__ void run_batch(
    const TokenArrays& arrays, const Batch& batch, const StatePool& pool, const Records& records) {
    const unsigned int num_tiles = num_tiles_of(arrays, batch);
    if (blockIdx.x >= num_tiles) return clear_rows(arrays, batch, records, blockIdx.x - num_tiles);
    const TileWork work = work_of_tile(arrays, blockIdx.x);
    const TableEntries entries = table_entries(batch, work.sequence);
    const auto record_entries = records.entries(work.sequence);
    const long long slot = live_slot(batch, entries);
    const RowRange rows = sequence_rows(batch, entries);
    const bool has_tokens = rows.begin < rows.end;
    const bool has_work = has_tokens || records.num_pending(record_entries, rows) > 0;
    if (slot < 0 || !records.has_place(record_entries) || !has_work) return;

    STATE_TYPE* const lane_pool = pool.lane(slot, work.value_head, work.tile_column);
    const auto window = records.window(work, rows, record_entries);
    LaneState state;
    run_tokens<Records>(arrays, work, rows, lane_pool, state, records, record_entries, window);
    if ((!Records::MAY_PEND || has_tokens) && !window.is_recorded) store_state(state, lane_pool);
}
