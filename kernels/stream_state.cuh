// States on their way from the pool to the registers of a streaming block, through shared memory.
#pragma once
#include "row_tile.cuh"

static_assert(TILE_COLUMNS % 8 == 0 && LANES_PER_ROW >= 2, "copies move 16 bytes of a row");

constexpr int COPY_BYTES = 16;
constexpr int BLOCK_COLUMNS = STREAMED_WARPS * TILE_COLUMNS;
constexpr int BLOCKS_PER_HEAD = VALUE_HEAD_DIM / BLOCK_COLUMNS;
static_assert(VALUE_HEAD_DIM % BLOCK_COLUMNS == 0, "the tiles of a block are of one head");

// Where a tile's row is shorter than the 128 bytes of all banks, as much is left free behind the rows of a row group, so
// that lanes of neighbouring row groups read from different banks.
constexpr int FREE_COLUMNS = TILE_COLUMNS * sizeof(STATE_TYPE) % 128 == 0 ? 0 : TILE_COLUMNS;

template <int COLUMNS>
struct StagedRows {
    alignas(16) STATE_TYPE elements[ROW_GROUPS][ROWS_PER_LANE * COLUMNS + FREE_COLUMNS];

    // The lane's share of the tile that begins at `tile_column`.
    __device__ __forceinline__ void read(LaneState& state, int tile_column) const {
        const LanePlace place = lane_place();
        StoredState stored;
        stored.load<Stay::USUAL>(&elements[place.first_row / ROWS_PER_LANE][tile_column + place.first_column], COLUMNS);
        stored.widen(state);
    }
};

// The next state of each warp of a block, requested by its first element in the pool, with the whole block. The next one
// may be requested as soon as it has been read. This form needs no meeting but of each warp.
template <bool IN_BULK>
struct StateStage {
    StagedRows<TILE_COLUMNS> tiles[STREAMED_WARPS];

    __device__ __forceinline__ void begin() {}

    // Each row group copies the rows that its lanes will hold.
    __device__ __forceinline__ void request(const STATE_TYPE* block) {
        constexpr int COPY_ELEMENTS = COPY_BYTES / sizeof(STATE_TYPE);
        constexpr int COPIES_PER_ROW = TILE_COLUMNS / COPY_ELEMENTS;
        constexpr int ROWS_AT_ONCE = LANES_PER_ROW / COPIES_PER_ROW;
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int lane_of_row = static_cast<int>(threadIdx.x) % LANES_PER_ROW;
        const int row = lane_of_row / COPIES_PER_ROW;
        const int column = lane_of_row % COPIES_PER_ROW * COPY_ELEMENTS;
        const int first_row = lane_place().first_row;
        request_rows<0, ROWS_AT_ONCE>(
            &tiles[warp].elements[first_row / ROWS_PER_LANE][row * TILE_COLUMNS + column],
            block + (first_row + row) * VALUE_HEAD_DIM + warp * TILE_COLUMNS + column, row);
    }

    __device__ __forceinline__ void read(LaneState& state, unsigned int) {
        wait_for_copies();
        __syncwarp();
        tiles[threadIdx.x / 32].read(state, 0);
        __syncwarp();
    }

private:
    // ROW is a constant, so that no address has to wait in a register.
    template <int ROW, int ROWS_AT_ONCE>
    __device__ __forceinline__ static void request_rows(STATE_TYPE* shared, const STATE_TYPE* global, int row) {
        if constexpr (ROW < ROWS_PER_LANE) {
            if (ROW + ROWS_AT_ONCE <= ROWS_PER_LANE || ROW + row < ROWS_PER_LANE)
                start_copy_16<ROW * TILE_COLUMNS * sizeof(STATE_TYPE), ROW * VALUE_HEAD_DIM * sizeof(STATE_TYPE)>(
                    shared, global);
            request_rows<ROW + ROWS_AT_ONCE, ROWS_AT_ONCE>(shared, global, row);
        }
    }
};

// The same for blocks that take whole value heads, whose rows of a row group lie together in the pool. The block meets
// after `begin`, and between a request and its `read`. `round` counts the states that were read before.
template <>
struct StateStage<true> {
    static constexpr int ROW_GROUP_BYTES = ROWS_PER_LANE * VALUE_HEAD_DIM * sizeof(STATE_TYPE);
    StagedRows<VALUE_HEAD_DIM> head;
    CopyBarrier barrier;

    __device__ __forceinline__ void begin() {
        if (threadIdx.x == 0) prepare_barrier(barrier);
    }

    __device__ __forceinline__ void request(const STATE_TYPE* block) {
        if (threadIdx.x != 0) return;
        expect_bytes(barrier, ROW_GROUPS * ROW_GROUP_BYTES);
        #pragma unroll
        for (int group = 0; group < ROW_GROUPS; ++group)
            start_bulk_copy(head.elements[group], block + group * ROWS_PER_LANE * VALUE_HEAD_DIM, ROW_GROUP_BYTES,
                            barrier, STATE_STAY == Stay::SHORT);
    }

    __device__ __forceinline__ void read(LaneState& state, unsigned int round) {
        wait_for_round(barrier, round % 2);
        head.read(state, static_cast<int>(threadIdx.x) / 32 * TILE_COLUMNS);
        __syncthreads();
    }
};
