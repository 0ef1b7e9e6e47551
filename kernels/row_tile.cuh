// The row-tile thread map: how threads hold one tile of columns of one value head's state.
//
// MACROS     ROW_GROUPS, LANES_PER_ROW, COLUMNS_PER_LANE, STREAMED_WARPS beside those of gated_delta_step.cuh; STATE_TYPE;
//            STATE_STAYS: whether states should stay in the cache as long as other memory
// MAP        TILE_COLUMNS = LANES_PER_ROW * COLUMNS_PER_LANE columns a tile. LANES_PER_ROW neighbouring threads (a row
//            group) hold neighbouring columns of the same rows, so that they read and write one contiguous piece of a
//            state row; ROW_GROUPS row groups split the rows, each a whole number of the tree's chains.
//            STREAMED_WARPS = 0: a block of max(32, ROW_GROUPS * LANES_PER_ROW) threads holds a tile; where 32 are
//            more than the tile needs, the upper threads repeat the work of the lower ones. Otherwise a block has
//            STREAMED_WARPS warps, and each holds a tile of its own.
// CALLER     calls every function here with all threads of a tile.
#pragma once
#include "gated_delta_step.cuh"
#include "numeric_types.cuh"
#include "ragged_rows.cuh"

constexpr int TILE_COLUMNS = LANES_PER_ROW * COLUMNS_PER_LANE;
constexpr int NUM_TILES = VALUE_HEAD_DIM / TILE_COLUMNS;
constexpr int WORKING_THREADS = ROW_GROUPS * LANES_PER_ROW;
constexpr int TILE_THREADS = WORKING_THREADS < 32 ? 32 : WORKING_THREADS;
constexpr int NUM_THREADS = STREAMED_WARPS > 0 ? STREAMED_WARPS * 32 : TILE_THREADS;
constexpr int NUM_WARPS = TILE_THREADS / 32;  // that hold a tile
constexpr int ROWS_PER_LANE = KEY_HEAD_DIM / ROW_GROUPS;
constexpr int CHAINS_PER_LANE = NUM_CHAINS / ROW_GROUPS;
constexpr int WARP_ROWS = KEY_HEAD_DIM / NUM_WARPS;  // of the state, held by one warp
constexpr int WARP_GROUP_LANES = WORKING_THREADS < 32 ? WORKING_THREADS : 32;

// Blocks to leave registers for: no more than shared memory has room for, on multiprocessors of this architecture.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int SHARED_KIB = 164;
#elif __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200
constexpr int SHARED_KIB = 100;
#else
constexpr int SHARED_KIB = 228;
#endif
#if STREAMED_WARPS > 0
constexpr int BLOCKS_IN_SHARED = SHARED_KIB * 1024 / (SHARED_BYTES + 1024);  // 1 KiB of each is the system's
constexpr int BLOCKS_AT_ONCE = MIN_BLOCKS < BLOCKS_IN_SHARED ? MIN_BLOCKS : BLOCKS_IN_SHARED;
#else
constexpr int BLOCKS_AT_ONCE = MIN_BLOCKS;
#endif

static_assert(VALUE_HEAD_DIM % TILE_COLUMNS == 0, "a tile must divide VALUE_HEAD_DIM");
static_assert(NUM_CHAINS % ROW_GROUPS == 0, "a row group holds whole chains");
static_assert((LANES_PER_ROW & (LANES_PER_ROW - 1)) == 0 && LANES_PER_ROW <= 32, "LANES_PER_ROW");
static_assert((ROW_GROUPS & (ROW_GROUPS - 1)) == 0, "ROW_GROUPS must be a power of two");

// A thread's share of the state.
using LaneState = float[ROWS_PER_LANE][COLUMNS_PER_LANE];

// Of states in the pool, in kernels whose STATE_STAYS macro says so. States pass once through a launch.
constexpr Stay STATE_STAY = STATE_STAYS ? Stay::USUAL : Stay::SHORT;

// A thread's share of the state as it lies in the pool, at `first`, the thread's first element.
struct StoredState {
    Run<STATE_TYPE, COLUMNS_PER_LANE, IS_PACKED> rows[ROWS_PER_LANE];

    template <Stay STAY>
    __device__ __forceinline__ void load(const STATE_TYPE* first, int row_stride) {
        #pragma unroll
        for (int row = 0; row < ROWS_PER_LANE; ++row) rows[row].template load<STAY>(first + row * row_stride, 1);
    }

    __device__ __forceinline__ void load_from_pool(const STATE_TYPE* first) { load<STATE_STAY>(first, VALUE_HEAD_DIM); }

    // Rows [FIRST, FIRST + ROWS) in float32.
    template <int FIRST = 0, int ROWS>
    __device__ __forceinline__ void widen(float (&state)[ROWS][COLUMNS_PER_LANE]) const {
        #pragma unroll
        for (int row = 0; row < ROWS; ++row)
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) state[row][column] = rows[FIRST + row][column];
    }
};

__device__ __forceinline__ void store_row(const float (&elements)[COLUMNS_PER_LANE], STATE_TYPE* row) {
    store_run<IS_PACKED, STATE_STAY>(row, 1, elements);
}

// Make of elements what they become in the pool and back, and put them there, if `row` is given. They are rounded once, and
// several at a time where the machine can.
__device__ __forceinline__ void fold_row(float (&elements)[COLUMNS_PER_LANE], STATE_TYPE* row) {
    if (row != nullptr) store_row(elements, row);
    if constexpr (sizeof(STATE_TYPE) < 4) {
        Packed<STATE_TYPE, COLUMNS_PER_LANE> rounded;
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) from_float(elements[column], rounded.values[column]);
        if constexpr (COLUMNS_PER_LANE % 2 == 0) {
            const auto* const words = reinterpret_cast<const unsigned int*>(&rounded);
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column)
                elements[column] = float_of_word(words, column, STATE_TYPE{});
        } else {
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) elements[column] = to_float(rounded.values[column]);
        }
    }
}

// Write rows of the thread's share to the pool, the first of them at `first`.
template <int ROWS>
__device__ __forceinline__ void store_state(const float (&state)[ROWS][COLUMNS_PER_LANE], STATE_TYPE* first) {
    if (threadIdx.x % TILE_THREADS >= WORKING_THREADS) return;
    #pragma unroll
    for (int row = 0; row < ROWS; ++row) store_row(state[row], first + row * VALUE_HEAD_DIM);
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

struct StatePool {
    STATE_TYPE* states;
    long long slot_stride;

    // The first element of a tile, and of the thread's share of it.
    __device__ __forceinline__ STATE_TYPE* tile(long long slot, unsigned int value_head, int tile_column) const {
        return states + slot * slot_stride + static_cast<long long>(value_head) * (KEY_HEAD_DIM * VALUE_HEAD_DIM) +
               tile_column;
    }

    __device__ __forceinline__ STATE_TYPE* lane(long long slot, unsigned int value_head, int tile_column) const {
        const LanePlace place = lane_place();
        return tile(slot, value_head, tile_column) + place.first_row * VALUE_HEAD_DIM + place.first_column;
    }
};

// A token's effect on the state of a lane, in the two halves of gated_delta_step.cuh.
__device__ __forceinline__ void decay_state(LaneState& state, float decay) {
    #pragma unroll
    for (int row = 0; row < ROWS_PER_LANE; ++row)
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column)
            state[row][column] = decayed_element(state[row][column], decay);
}

__device__ __forceinline__ void update_decayed_state(
    LaneState& state, const float* key, const float (&delta)[COLUMNS_PER_LANE]) {
    #pragma unroll
    for (int row = 0; row < ROWS_PER_LANE; ++row)
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column)
            state[row][column] = updated_element(state[row][column], key[row], delta[column]);
}

// The same at once, for any number of a lane's rows.
template <int ROWS>
__device__ __forceinline__ void update_state(
    float (&state)[ROWS][COLUMNS_PER_LANE], const float* key, const float (&delta)[COLUMNS_PER_LANE], float decay) {
    #pragma unroll
    for (int row = 0; row < ROWS; ++row)
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column)
            state[row][column] =
                updated_element(decayed_element(state[row][column], decay), key[row], delta[column]);
}
