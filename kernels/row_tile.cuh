// The row-tile thread map: one block advances one tile of columns of one value head of one sequence.
//
// MACROS     ROW_GROUPS, LANES_PER_ROW, COLUMNS_PER_LANE, beside those of gated_delta_step.cuh; STATE_TYPE
// MAP        TILE_COLUMNS = LANES_PER_ROW * COLUMNS_PER_LANE columns a block. LANES_PER_ROW neighbouring threads (a row
//            group) hold neighbouring columns of the same rows, so that they read and write one contiguous piece of a
//            state row; ROW_GROUPS row groups split the rows, each a whole number of the tree's chains.
//            NUM_THREADS = max(32, ROW_GROUPS * LANES_PER_ROW); where 32 are more than the tile needs, the upper
//            threads repeat the work of the lower ones.
// CALLER     calls every function here with a whole block.
#pragma once
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
constexpr int WARP_ROWS = KEY_HEAD_DIM / NUM_WARPS;  // of the state, held by one warp
constexpr int WARP_GROUP_LANES = WORKING_THREADS < 32 ? WORKING_THREADS : 32;

static_assert(VALUE_HEAD_DIM % TILE_COLUMNS == 0, "a tile must divide VALUE_HEAD_DIM");
static_assert(NUM_CHAINS % ROW_GROUPS == 0, "a row group holds whole chains");
static_assert((LANES_PER_ROW & (LANES_PER_ROW - 1)) == 0 && LANES_PER_ROW <= 32, "LANES_PER_ROW");
static_assert((ROW_GROUPS & (ROW_GROUPS - 1)) == 0, "ROW_GROUPS must be a power of two");

// A thread's share of the state.
using LaneState = float[ROWS_PER_LANE][COLUMNS_PER_LANE];

// A thread's share of the state as it lies in the pool, at `first`, the thread's first element.
struct StoredState {
    Run<STATE_TYPE, COLUMNS_PER_LANE, IS_PACKED> rows[ROWS_PER_LANE];

    __device__ __forceinline__ void load(const STATE_TYPE* first) {
        #pragma unroll
        for (int row = 0; row < ROWS_PER_LANE; ++row) rows[row].load(first + row * VALUE_HEAD_DIM, 1);
    }

    __device__ __forceinline__ void widen(LaneState& state) const {
        #pragma unroll
        for (int row = 0; row < ROWS_PER_LANE; ++row)
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) state[row][column] = rows[row][column];
    }
};

__device__ __forceinline__ void store_state(const LaneState& state, STATE_TYPE* first) {
    if (threadIdx.x >= WORKING_THREADS) return;
    #pragma unroll
    for (int row = 0; row < ROWS_PER_LANE; ++row)
        store_run<IS_PACKED>(first + row * VALUE_HEAD_DIM, 1, state[row]);
}

// Where the calling thread's share lies within its head and tile.
struct LanePlace {
    int first_row;
    int first_column;  // in the tile
};

__device__ __forceinline__ LanePlace lane_place() {
    return {static_cast<int>(threadIdx.x) / LANES_PER_ROW % ROW_GROUPS * ROWS_PER_LANE,
            static_cast<int>(threadIdx.x) % LANES_PER_ROW * COLUMNS_PER_LANE};
}

// The thread's first element of the state in the pool.
__device__ __forceinline__ STATE_TYPE* lane_state(
    STATE_TYPE* recurrent_state, long long slot, long long state_slot_stride, unsigned int value_head, int tile_column) {
    const LanePlace place = lane_place();
    return recurrent_state + slot * state_slot_stride +
           static_cast<long long>(value_head) * (KEY_HEAD_DIM * VALUE_HEAD_DIM) +
           place.first_row * VALUE_HEAD_DIM + tile_column + place.first_column;
}

// A token's effect on the state of a lane.
__device__ __forceinline__ void update_state(
    LaneState& state, const float* key, const float (&delta)[COLUMNS_PER_LANE], float decay) {
    #pragma unroll
    for (int row = 0; row < ROWS_PER_LANE; ++row)
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column)
            state[row][column] = updated_element(state[row][column], key[row], delta[column], decay);
}
