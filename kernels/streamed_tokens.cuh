// run_batch, as blocks that stream through the batch: each warp of a block holds one tile, all of the same value head, and
// while the block runs the tokens of a chunk, the next chunk and the state it starts from are on their way.
//
// What the sums over the state do not decide is done once for all warps, and ahead of time: each warp makes some tokens
// of the next chunk ready (stream_tokens.cuh). So the chain from one token to the next holds nothing but the sums over the
// state, and the warps meet once a chunk (once more a window where its state comes in bulk).
//
// MACROS     beside those of row_tile.cuh: TOKENS_PER_WARP, that a warp makes ready for a chunk; SHARED_BYTES of a block
// MAP        ROW_GROUPS * LANES_PER_ROW = 32: a warp holds a tile; STREAMED_WARPS of them divide a value head
// GRID       any number of blocks: they share the work evenly, and then, with CLEARS_ROWS, clear unowned rows
// CALLER     IS_PACKED only (numeric_types.cuh): copies move 16 bytes
#pragma once
#include "stream_records.cuh"
#include "stream_state.cuh"
#include "stream_tokens.cuh"
#include "stream_work.cuh"

// ---- A token ----

// A token has two sums a column, memory and readout, spread over the row groups. At the first exchange a lane of an even
// row group takes over the memory sums and its neighbour the readout sums; at the next ones each half of them goes to
// one side, until one is left. So every sum is finished in one lane (or, where there are more lanes than sums, in
// several), for a third of the shuffles that finishing all of them in every lane would take.
constexpr int OWNED_COLUMNS = 2 * COLUMNS_PER_LANE > ROW_GROUPS ? 2 * COLUMNS_PER_LANE / ROW_GROUPS : 1;

// `sums` holds COUNT sums of the lane, complete over row groups below DISTANCE.
template <int DISTANCE, int COUNT>
__device__ __forceinline__ void add_across_row_groups(float (&sums)[COLUMNS_PER_LANE], int row_group) {
    if constexpr (DISTANCE < ROW_GROUPS) {
        constexpr int KEPT = COUNT > 1 ? COUNT / 2 : 1;
        #pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const bool upper = COUNT > 1 && (row_group & DISTANCE) != 0;
            const float kept = upper ? sums[COUNT - KEPT + i] : sums[i];
            const float sent = upper ? sums[i] : sums[COUNT - KEPT + i];
            sums[i] = __fadd_rn(kept, __shfl_xor_sync(0xFFFFFFFFu, sent, DISTANCE * LANES_PER_ROW));
        }
        add_across_row_groups<2 * DISTANCE, KEPT>(sums, row_group);
    }
}

// Of one value for each column, keep those of the columns whose sums the lane finishes.
template <int DISTANCE, int COUNT>
__device__ __forceinline__ void keep_owned(float (&values)[COLUMNS_PER_LANE], int row_group) {
    if constexpr (DISTANCE < ROW_GROUPS && COUNT > 1) {
        #pragma unroll
        for (int i = 0; i < COUNT / 2; ++i)
            values[i] = (row_group & DISTANCE) != 0 ? values[COUNT / 2 + i] : values[i];
        keep_owned<2 * DISTANCE, COUNT / 2>(values, row_group);
    }
}

// The first of the columns whose sums a lane of this row group finishes.
__device__ __forceinline__ int first_owned_column(int row_group) {
    int first = 0;
    #pragma unroll
    for (int distance = 2, count = COLUMNS_PER_LANE; distance < ROW_GROUPS && count > 1; distance *= 2, count /= 2)
        if (row_group & distance) first += count / 2;
    return first;
}

// The even row group that finishes the memory of a column, the first of them where there are several.
__host__ __device__ constexpr int owner_of_column(int column) {
    int owner = 0;
    for (int distance = 2, count = COLUMNS_PER_LANE; distance < ROW_GROUPS && count > 1; distance *= 2, count /= 2)
        if (column % count >= count / 2) owner += distance;
    return owner;
}

// What a lane knows about its place, worked out once.
struct StreamLane {
    int row_group;
    int lane_of_row;
    int row_place;     // of the row group's rows in a prepared token
    int tile_column;   // of the block's columns
    int first_column;  // that it finishes, of the block's columns
    bool is_odd;       // finishes readouts, not memories
    bool is_spare;     // repeats what another lane finishes
};

__device__ __forceinline__ StreamLane stream_lane() {
    const int lane_of_row = static_cast<int>(threadIdx.x) % LANES_PER_ROW;
    const int row_group = static_cast<int>(threadIdx.x) % 32 / LANES_PER_ROW;
    const int tile_column = static_cast<int>(threadIdx.x) / 32 * TILE_COLUMNS;
    return {row_group,
            lane_of_row,
            row_group * PreparedToken::ROW_GROUP_STRIDE,
            tile_column,
            tile_column + lane_of_row * COLUMNS_PER_LANE + first_owned_column(row_group),
            row_group % 2 != 0,
            row_group >= 2 * COLUMNS_PER_LANE};
}

// The rows of a token that a lane multiplies its state with: of the key and of the query, or the other way round, as the
// first exchange wants it. A lane that has few keeps those of the next token in registers, so that it need not wait.
template <bool IN_REGISTERS>
struct RowsOf {
    __device__ __forceinline__ void load(const PreparedToken&, const StreamLane&) {}
    __device__ __forceinline__ const float* kept(const PreparedToken& token, const StreamLane& lane) const {
        return (lane.is_odd ? token.query : token.key) + lane.row_place;
    }
    __device__ __forceinline__ const float* sent(const PreparedToken& token, const StreamLane& lane) const {
        return (lane.is_odd ? token.key : token.query) + lane.row_place;
    }
};
template <>
struct RowsOf<true> {
    float kept_rows[ROWS_PER_LANE];
    float sent_rows[ROWS_PER_LANE];
    __device__ __forceinline__ void load(const PreparedToken& token, const StreamLane& lane) {
        #pragma unroll
        for (int row = 0; row < ROWS_PER_LANE; ++row) {
            kept_rows[row] = RowsOf<false>().kept(token, lane)[row];
            sent_rows[row] = RowsOf<false>().sent(token, lane)[row];
        }
    }
    __device__ __forceinline__ const float* kept(const PreparedToken&, const StreamLane&) const { return kept_rows; }
    __device__ __forceinline__ const float* sent(const PreparedToken&, const StreamLane&) const { return sent_rows; }
};
using TokenRows = RowsOf<(ROWS_PER_LANE <= 8)>;

// Where a lane writes what it finishes of the token that comes next, if anything: a delta factor and a readout for each
// column that it owns.
template <typename Records>
struct TokenTargets {
    typename Records::Stored* delta;
    OUT_TYPE* readout;
    bool writes_delta;
    bool writes_readout;
};

// Run one prepared token. `updates_state`: whether anything will read the state again.
template <typename Records>
__device__ __forceinline__ void run_token(
    LaneState& state, const PreparedToken& token, const TokenRows& rows, const StreamLane& lane,
    const TokenTargets<Records>& targets, bool updates_state) {
    float kept[COLUMNS_PER_LANE], sent[COLUMNS_PER_LANE], received[COLUMNS_PER_LANE];
    thread_sums<CHAINS_PER_LANE>(state, rows.kept(token, lane), rows.sent(token, lane), kept, sent);
    #pragma unroll
    for (int column = 0; column < COLUMNS_PER_LANE; ++column)
        received[column] = __shfl_xor_sync(0xFFFFFFFFu, sent[column], LANES_PER_ROW);
    if (updates_state) decay_state(state, token.scalars.decay);  // while the sums are on their way
    #pragma unroll
    for (int column = 0; column < COLUMNS_PER_LANE; ++column) kept[column] = __fadd_rn(kept[column], received[column]);
    add_across_row_groups<2, COLUMNS_PER_LANE>(kept, lane.row_group);

    // Every lane works out a delta factor and a readout of each sum that it owns; one of them is of use.
    const TokenScalars scalars = token.scalars;
    float sum[OWNED_COLUMNS], owned_delta[OWNED_COLUMNS];
    #pragma unroll
    for (int i = 0; i < OWNED_COLUMNS; ++i) {
        sum[i] = counted_sum(kept[i], scalars.decay);
        owned_delta[i] = delta_factor(scalars, sum[i], token.value[lane.first_column + i]);
    }
    float delta[COLUMNS_PER_LANE];
    #pragma unroll
    for (int column = 0; column < COLUMNS_PER_LANE; ++column)
        delta[column] = __shfl_sync(0xFFFFFFFFu, owned_delta[column % OWNED_COLUMNS],
                                    owner_of_column(column) * LANES_PER_ROW + lane.lane_of_row);
    float readout[OWNED_COLUMNS];
    float own[COLUMNS_PER_LANE];
    #pragma unroll
    for (int column = 0; column < COLUMNS_PER_LANE; ++column) own[column] = delta[column];
    keep_owned<2, COLUMNS_PER_LANE>(own, lane.row_group);
    #pragma unroll
    for (int i = 0; i < OWNED_COLUMNS; ++i) readout[i] = token_readout(scalars, sum[i], own[i]);
    if (targets.writes_delta) store_run<Records::ARE_PACKED>(targets.delta, 1, owned_delta);
    if (targets.writes_readout) store_run<true>(targets.readout, 1, readout);
    if (updates_state) update_decayed_state(state, token.key + lane.row_place, delta);
}

// ---- The stream ----

struct BlockMemory : RecordStage {
    PreparedToken tokens[2][CHUNK_TOKENS];
    StateStage<HAS_BULK_COPIES && BLOCKS_PER_HEAD == 1> states;
};
static_assert(sizeof(BlockMemory) <= SHARED_BYTES, "more than the launch asks for");

template <typename Records>
__device__ __forceinline__ void run_chunk(
    const TokenArrays& arrays, const Records& records, const Chunk<Records>& chunk, const PreparedToken* tokens,
    const StreamLane& lane, LaneState& state) {
    const auto window = chunk.window(records);
    const long long first_channel =
        static_cast<long long>(chunk.work.value_head) * VALUE_HEAD_DIM + chunk.work.tile_column + lane.first_column;
    TokenTargets<Records> targets = {window.delta_row(chunk.token - chunk.begin, lane.first_column),
                                     arrays.out + chunk.token * arrays.out_token_stride + first_channel,
                                     window.is_recorded && !lane.is_odd && !lane.is_spare,
                                     lane.is_odd && !lane.is_spare};
    const int num_tokens = chunk.num_tokens();
    const bool state_is_read = !window.is_recorded || !chunk.ends_window();
    TokenRows next_rows;
    next_rows.load(tokens[0], lane);
    for (int i = 0; i < num_tokens; ++i) {
        const TokenRows rows = next_rows;
        next_rows.load(tokens[i + 1 < num_tokens ? i + 1 : i], lane);
        run_token(state, tokens[i], rows, lane, targets, state_is_read || i + 1 < num_tokens);
        targets.delta += window.record_stride;
        targets.readout += arrays.out_token_stride;
    }
}

template <typename Records>
__device__ __forceinline__ void run_batch(
    const TokenArrays& arrays, const Batch& batch, const StatePool& pool, const Records& records) {
    BlockMemory& memory = *reinterpret_cast<BlockMemory*>(launch_shared_memory<SHARED_BYTES>());
    const StreamLane lane = stream_lane();
    const Stream<Records> stream(arrays, batch, records);
    const auto request_state = [&](const Chunk<Records>& chunk) {
        memory.states.request(pool.tile(chunk.slot, chunk.work.value_head, chunk.work.tile_column));
    };
    const auto lane_pool = [&](const Chunk<Records>& chunk) {
        return pool.lane(chunk.slot, chunk.work.value_head, chunk.work.tile_column + lane.tile_column);
    };

    UpcomingJob<Records> upcoming = {};
    stream.request(upcoming, stream.first_job(), true);
    memory.states.begin();
    __syncthreads();  // while the tables are on their way
    Chunk<Records> chunk = stream.first_chunk(upcoming);
    if (chunk.begins_window()) request_state(chunk);
    memory.request_records(0, records, chunk);
    stream.request(upcoming, stream.job_after(chunk.job), true);
    LoadedTokens loaded;
    loaded.load(arrays, chunk);
    loaded.prepare(memory.tokens[0], chunk, chunk.window(records));
    memory.wait_for_records();
    Chunk<Records> next = stream.following(chunk, upcoming);
    loaded.load(arrays, next);
    __syncthreads();

    LaneState state;
    unsigned int num_states = 0;  // that were read
    for (int buffer = 0; stream.exists(chunk.job); buffer ^= 1) {
        if (chunk.begins_window()) memory.states.read(state, num_states++);
        if (next.begins_window()) request_state(next);
        memory.request_records(buffer ^ 1, records, next);

        memory.apply_records(buffer, records, chunk, state, lane_pool);
        run_chunk(arrays, records, chunk, memory.tokens[buffer], lane, state);
        if (chunk.ends_window() && chunk.num_tokens() > 0 && !chunk.window(records).is_recorded)
            store_state(state, lane_pool(chunk));

        loaded.prepare(memory.tokens[buffer ^ 1], next, next.window(records));
        memory.wait_for_records();  // before new loads are under way, since it would wait for those as well
        chunk = next;
        next = stream.following(next, upcoming);
        loaded.load(arrays, next);
        __syncthreads();
    }
    if constexpr (!CLEARS_ROWS) return;
    const long long num_clearing_blocks =
        (batch.total_seq_len + ROWS_PER_CLEARING_BLOCK - 1) / ROWS_PER_CLEARING_BLOCK;
    for (long long clearing_block = gridDim.x - 1 - blockIdx.x; clearing_block < num_clearing_blocks;
         clearing_block += gridDim.x) {
        __syncthreads();
        clear_rows(arrays, batch, records, static_cast<unsigned int>(clearing_block));
    }
}
