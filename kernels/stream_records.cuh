// Pending records on their way from the ring to the warps of a streaming block, through shared memory.
//
// MACROS     RECORDS_PER_WARP: records of a chunk that a warp asks for
#pragma once
#include "pending.cuh"
#include "stream_state.cuh"

#if HAS_PENDING
constexpr int CHUNK_RECORDS = STREAMED_WARPS * RECORDS_PER_WARP;

// COUNT neighbouring elements of a record, shared out among the lanes of a warp and copied without waiting (but for those
// of a 16-bit ring that are not packed). A gap of GAP elements follows every RUN of them; RUN is a multiple of what a copy
// moves, where there is a gap.
template <int COUNT, int RUN, int GAP>
__device__ __forceinline__ void request_elements(RING_TYPE* shared, const RING_TYPE* global) {
    constexpr int WIDTH = RING_IS_PACKED ? COPY_BYTES / sizeof(RING_TYPE) : 1;
    constexpr int UNROLL = RING_IS_PACKED ? COUNT / (32 * WIDTH) + 1 : 1;  // many addresses would take many registers
    const int lane = static_cast<int>(threadIdx.x) % 32;
    #pragma unroll UNROLL
    for (int first = 0; first < COUNT; first += 32 * WIDTH) {
        const int element = first + lane * WIDTH;
        if (first + 32 * WIDTH > COUNT && element >= COUNT) continue;
        RING_TYPE* const target = shared + element + element / RUN * GAP;
        if constexpr (RING_IS_PACKED)
            start_copy_16<0, 0>(target, global + element);
        else if constexpr (sizeof(RING_TYPE) == 4)
            start_copy_4(target, global + element);
        else
            *target = global[element];
    }
}

// A record as a block needs it, as it lies in the ring. The key's rows of a row group are 16 bytes further apart than they
// are many, where copies allow, so that lanes of different row groups read from different banks.
struct alignas(16) StagedRecord {
    static constexpr int GAP = ROWS_PER_LANE * sizeof(RING_TYPE) % COPY_BYTES == 0 ? COPY_BYTES / sizeof(RING_TYPE) : 0;
    RING_TYPE key[KEY_HEAD_DIM + ROW_GROUPS * GAP];
    RING_TYPE delta[BLOCK_COLUMNS];
    RING_TYPE decay;

    // By one warp; the elements are there after its wait_for_copies.
    __device__ __forceinline__ void request(const PendingWindow& pending, unsigned int i) {
        const RING_TYPE* const record = pending.record(i);
        request_elements<KEY_HEAD_DIM, ROWS_PER_LANE, GAP>(key, record);
        request_elements<BLOCK_COLUMNS, BLOCK_COLUMNS, 0>(delta, record + pending.delta_offset);
        if (threadIdx.x % 32 == 0) {
            if constexpr (sizeof(RING_TYPE) == 4)
                start_copy_4(&decay, record + pending.decay_offset);
            else
                decay = record[pending.decay_offset];
        }
    }

    // Advance the share of the state of a lane that holds columns from `first_column` of the block on. `stored_decay` is
    // the record's, read ahead since everything waits for it. FOLDS: this is the last record before the state is rounded to
    // its type in the pool; there lies the lane's share of it, if it is to be stored.
    template <bool FOLDS>
    __device__ __forceinline__ void apply(
        LaneState& state, RING_TYPE stored_decay, int row_group, int first_column, STATE_TYPE* pool) const {
        Run<RING_TYPE, COLUMNS_PER_LANE, true> stored_delta;
        stored_delta.load(delta + first_column, 1);
        float delta_factors[COLUMNS_PER_LANE];
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) delta_factors[column] = stored_delta[column];
        apply_rows<FOLDS, 0>(
            state, key + row_group * (ROWS_PER_LANE + GAP), delta_factors, to_float(stored_decay), pool);
    }

private:
    // A few rows at a time: so few of the key's are in registers, and stores are spread out among the arithmetic.
    template <bool FOLDS, int FIRST>
    __device__ __forceinline__ static void apply_rows(
        LaneState& state, const RING_TYPE* rows, const float (&delta)[COLUMNS_PER_LANE], float record_decay,
        STATE_TYPE* pool) {
        if constexpr (FIRST < ROWS_PER_LANE) {
            constexpr int PART = ROWS_PER_LANE % 4 == 0 ? 4 : 1;
            Run<RING_TYPE, PART, true> part;
            part.load(rows + FIRST, 1);
            #pragma unroll
            for (int row = 0; row < PART; ++row) {
                float(&elements)[COLUMNS_PER_LANE] = state[FIRST + row];
                const float key_row = part[row];
                #pragma unroll
                for (int column = 0; column < COLUMNS_PER_LANE; ++column)
                    elements[column] = updated_element(decayed_element(elements[column], record_decay), key_row, delta[column]);
                if constexpr (FOLDS) fold_row(elements, pool == nullptr ? nullptr : pool + (FIRST + row) * VALUE_HEAD_DIM);
            }
            apply_rows<FOLDS, FIRST + PART>(state, rows, delta, record_decay, pool);
        }
    }
};

// The pending records of a block's chunk and of the next one. The block meets between a wait and the use of its records, and
// between that and the next request to the same buffer.
struct RecordStage {
    StagedRecord records[2][CHUNK_RECORDS];

    // Each warp asks for its part.
    template <typename Records, typename Chunk>
    __device__ __forceinline__ void request_records(int buffer, const Records& batch_records, const Chunk& chunk) {
        const int num_records = chunk.num_records();
        const int first = static_cast<int>(threadIdx.x) / 32 * RECORDS_PER_WARP;
        if (first >= num_records) return;
        const PendingWindow pending = batch_records.pending_window(chunk.work, chunk.entries);
        #pragma unroll 1
        for (int i = first; i < first + RECORDS_PER_WARP && i < num_records; ++i)
            records[buffer][i].request(pending, chunk.record + i);
    }

    __device__ __forceinline__ void wait_for_records() const { wait_for_copies(); }

    // Advance the calling thread's share of the state. `pool` says where it lies.
    template <typename Records, typename Chunk, typename Pool>
    __device__ __forceinline__ void apply_records(
        int buffer, const Records& batch_records, const Chunk& chunk, LaneState& state, const Pool& pool) const {
        const int num_records = chunk.num_records();
        if (num_records == 0) return;
        const int row_group = static_cast<int>(threadIdx.x) % 32 / LANES_PER_ROW;
        const int first_column = static_cast<int>(threadIdx.x) / 32 * TILE_COLUMNS + lane_place().first_column;
        const PendingWindow pending = batch_records.pending_window(chunk.work, chunk.entries);
        const bool folds = chunk.ends_records() && pending.is_folded;
        RING_TYPE next_decay = records[buffer][0].decay;
        for (int i = 0; i < num_records - (folds ? 1 : 0); ++i) {
            const RING_TYPE decay = next_decay;
            next_decay = records[buffer][i + 1 < num_records ? i + 1 : i].decay;
            records[buffer][i].template apply<false>(state, decay, row_group, first_column, nullptr);
        }
        if (!folds) return;
        const bool is_stored_later = chunk.begin < chunk.end && !chunk.window(batch_records).is_recorded;
        records[buffer][num_records - 1].template apply<true>(
            state, next_decay, row_group, first_column, is_stored_later ? nullptr : pool(chunk));
    }
};

#else
constexpr int CHUNK_RECORDS = 1;

struct RecordStage {
    template <typename Records, typename Chunk>
    __device__ __forceinline__ void request_records(int, const Records&, const Chunk&) {}
    __device__ __forceinline__ void wait_for_records() const {}
    template <typename Records, typename Chunk, typename Pool>
    __device__ __forceinline__ void apply_records(int, const Records&, const Chunk&, LaneState&, const Pool&) const {}
};
#endif
