// gated_delta_recurrence_verify_ring: the readout of a speculative window, with the states left alone.
//
// Per token the mathematics and the bits of gated_delta_recurrence_fwd. Instead of storing the last state, each token of
// a window of at most RING_LEN tokens leaves one record per key head (ring_record.cuh) from which
// gated_delta_state_fold advances the pool later. A longer row records nothing and stores its state as fwd does.
//
// MACROS     those of gated_delta_recurrence_fwd.cu; RING_LEN, 1 to 64; RING_TYPE: float, float16,
//            bfloat16; RING_IS_PACKED
// BLOCK, GRID as in gated_delta_recurrence_fwd.cu
// SHAPES     as there; ring [ring_rows, num_key_heads, RING_LEN, record_stride], dense; ring_slot_idx [batch_size]
// MUTATES    ring rows of live, non-empty sequences; out; the slots of rows longer than RING_LEN
// RECORDS    the key by the first tile of the group's first value head; delta factors by each tile; decays by the
//            first tile of each value head.
// CALLER     as there; two live sequences never share a ring row; RING_IS_PACKED only where records start on 16-byte
//            boundaries. A sequence whose ring row lies outside the ring is treated as padding.
#include "recurrence.cuh"
#include "ring_record.cuh"

// Writes the records of one window, as far as they are this block's.
struct RingRecords {
    RING_TYPE* first;  // record of the window's first token; null where nothing is recorded
    long long record_stride;
    long long first_token;
    long long delta_offset;  // of the thread's first column
    long long decay_offset;
    bool writes_key;
    bool writes_decay;

    __device__ __forceinline__ void token(
        long long token, const float* key, const float (&delta)[COLUMNS_PER_LANE], float decay) const {
        if (first == nullptr) return;
        RING_TYPE* const record = first + (token - first_token) * record_stride;
        if (threadIdx.x < LANES_PER_ROW) store_run<RING_IS_PACKED>(record + delta_offset, 1, delta);
        if (writes_decay && threadIdx.x == NUM_THREADS - 1) from_float(decay, record[decay_offset]);
        if (writes_key) {
            float rows[ROWS_PER_LANE];
            #pragma unroll
            for (int row = 0; row < ROWS_PER_LANE; ++row) rows[row] = key[lane_place().first_row + row];
            store_run<RING_IS_PACKED>(record + lane_place().first_row, 1, rows);
        }
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS) gated_delta_recurrence_verify_ring(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    const GATE_TYPE* __restrict__ decay_per_token, long long decay_token_stride, long long decay_head_stride,
    const GATE_TYPE* __restrict__ beta_per_token, long long beta_token_stride, long long beta_head_stride,
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    long long batch_size, long long total_seq_len, long long max_slots,
    long long num_key_heads, long long group_size,
    RING_TYPE* __restrict__ ring, long long ring_rows, long long record_stride,
    const unsigned int* __restrict__ ring_slot_idx, long long ring_slot_idx_stride) {
    const Batch batch = {slot_idx, slot_idx_stride, input_row_offsets, input_row_offsets_stride,
                         offsets_are_signed != 0, batch_size, total_seq_len, max_slots};
    const TokenArrays arrays = {
        qkv_conv_output, qkv_token_stride, qkv_channel_stride,
        decay_per_token, decay_token_stride, decay_head_stride,
        beta_per_token, beta_token_stride, beta_head_stride,
        out, out_token_stride, out_channel_stride, num_key_heads, group_size};
    const auto ring_row_of = [&](long long sequence) {
        return valid_index(ring_slot_idx[sequence * ring_slot_idx_stride], ring_rows);
    };
    if (blockIdx.x >= num_recurrence_blocks(arrays, batch)) {
        const auto is_live = [&](long long sequence) {
            return live_slot(batch, sequence) >= 0 && ring_row_of(sequence) >= 0;
        };
        clear_unowned_rows(batch, blockIdx.x - num_recurrence_blocks(arrays, batch), is_live, out, out_token_stride,
                           out_channel_stride, num_key_heads * group_size * VALUE_HEAD_DIM);
        return;
    }
    const TileWork work = work_of_block(arrays);
    const long long slot = live_slot(batch, work.sequence);
    const long long ring_row = ring_row_of(work.sequence);
    const RowRange rows = sequence_rows(batch, work.sequence);
    if (slot < 0 || ring_row < 0 || rows.begin >= rows.end) return;

    STATE_TYPE* const pool = lane_state(recurrent_state, slot, state_slot_stride, work.value_head, work.tile_column);
    LaneState state;
    const bool fits_ring = rows.end - rows.begin <= RING_LEN;
    RING_TYPE* const first_record =
        ring + first_record_offset(ring_row, num_key_heads, work.key_head, record_stride);
    const RingRecords records = {
        fits_ring ? first_record : nullptr, record_stride, rows.begin,
        delta_offset(work.head_of_group) + work.tile_column + lane_place().first_column,
        decay_offset(work.head_of_group, group_size),
        work.tile_column == 0 && work.head_of_group == 0 && threadIdx.x % LANES_PER_ROW == 0, work.tile_column == 0};
    run_tokens(arrays, work, rows, pool, state, records);
    if (!fits_ring) store_state(state, pool);
}
