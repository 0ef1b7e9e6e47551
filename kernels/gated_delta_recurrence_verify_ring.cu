// gated_delta_recurrence_verify_ring: the readout of a speculative window, with the states left alone.
//
// Per token the mathematics and the bits of gated_delta_recurrence_fwd. Instead of storing the last state, each token of
// a window of at most RING_LEN tokens leaves one record per key head (ring_record.cuh) from which
// gated_delta_state_fold advances the pool later. A longer row records nothing and stores its state as fwd does.
//
// With HAS_PENDING a state first advances over num_pending[b] records of ring row pending_ring_slot_idx[b] (pending.cuh):
// from another ring row than the window's a fold, which is stored; in the same one they stay pending, the window's records
// follow them, and a window that does not fit behind them stores its state.
//
// MACROS     those of gated_delta_recurrence_fwd.cu, of them RING_LEN, RING_TYPE, RING_IS_PACKED always
// BLOCK, GRID as in gated_delta_recurrence_fwd.cu
// SHAPES     as there; ring_slot_idx [batch_size]
// MUTATES    ring rows of live, non-empty sequences; out; the slots of rows that are folded or do not fit their ring row
// RECORDS    the key by the first tile of the group's first value head; delta factors by each tile; decays by the
//            first tile of each value head.
// CALLER     as there; two live sequences never share a ring row, and none records where another has pending records. A
//            sequence whose ring row lies outside the ring is treated as padding.
#include "ring_window.cuh"
#include "run_batch.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_AT_ONCE) gated_delta_recurrence_verify_ring(
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
    const unsigned int* __restrict__ ring_slot_idx, long long ring_slot_idx_stride
#if HAS_PENDING
    , const unsigned int* __restrict__ pending_ring_slot_idx, long long pending_ring_slot_idx_stride,
    const unsigned int* __restrict__ num_pending, long long num_pending_stride
#endif
    ) {
    const Batch batch = {slot_idx, slot_idx_stride, input_row_offsets, input_row_offsets_stride,
                         offsets_are_signed != 0, batch_size, total_seq_len, max_slots};
    const TokenArrays arrays = {
        qkv_conv_output, qkv_token_stride, qkv_channel_stride,
        decay_per_token, decay_token_stride, decay_head_stride,
        beta_per_token, beta_token_stride, beta_head_stride,
        out, out_token_stride, out_channel_stride, num_key_heads, group_size};
#if HAS_PENDING
    const PendingRecords pending = {ring, ring_rows, record_stride, pending_ring_slot_idx, pending_ring_slot_idx_stride,
                                    num_pending, num_pending_stride, num_key_heads, group_size};
#else
    const PendingRecords pending = {};
#endif
    const RingRecords records = {ring, ring_rows, record_stride, ring_slot_idx, ring_slot_idx_stride,
                                 num_key_heads, group_size, pending};
    run_batch(arrays, batch, {recurrent_state, state_slot_stride}, records);
}
