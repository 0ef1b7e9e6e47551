// gated_delta_recurrence_fwd: the Gated DeltaNet recurrence over a ragged batch, states in a pool.
//
// For each live sequence b and value head h, with S = recurrent_state[slot_idx[b], h], for each of its
// tokens in order (arithmetic, order of sums and rounding: gated_delta_step.cuh):
//   1. S <- decay[t,h] S   2. memory = S^T k   3. delta = beta[t,h] (value - memory)
//   4. S <- S + k delta^T  5. out[t,h] = S^T q / sqrt(KEY_HEAD_DIM)          k, q normalised
// Rows of `out` that no live sequence owns become zero.
//
// With HAS_PENDING the state of each live sequence, with tokens or without, is first folded over num_pending[b] records of
// ring row pending_ring_slot_idx[b], as gated_delta_state_fold does (pending.cuh).
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM: multiples of 8 from 8 to 256
//            WORK_TYPE (qkv), GATE_TYPE (decay, beta), STATE_TYPE (pool), OUT_TYPE: float, float16, bfloat16
//            ROW_GROUPS, LANES_PER_ROW, COLUMNS_PER_LANE, STREAMED_WARPS, STATE_STAYS: row_tile.cuh
//            MIN_BLOCKS: of a multiprocessor; with STREAMED_WARPS also TOKENS_PER_WARP, SHARED_BYTES (streamed_tokens.cuh)
//            IS_PACKED: whether qkv, recurrent_state and out take the widest accesses (numeric_types.cuh)
//            CLEARS_ROWS: true unless given (recurrence.cuh)
//            HAS_PENDING: 0 or 1. With it RING_LEN, 1 to 64; RING_TYPE: float, float16, bfloat16; RING_IS_PACKED; and with
//            STREAMED_WARPS also RECORDS_PER_WARP (streamed_tokens.cuh)
// BLOCK, GRID with STREAMED_WARPS = 0 as block_tokens.cuh says, a block for each tile of columns of a value head of a
//            sequence; otherwise as streamed_tokens.cuh says, any number of blocks that share the tiles
// SHAPES     qkv_conv_output [total_seq_len, conv_dim], channels Q, K, V; decay_per_token, beta_per_token
//            [total_seq_len, num_value_heads]; recurrent_state [max_slots, num_value_heads, KEY_HEAD_DIM,
//            VALUE_HEAD_DIM], the last three dense; slot_idx [batch_size]; input_row_offsets
//            [batch_size + 1]; out [total_seq_len, num_value_heads * VALUE_HEAD_DIM]; ring [ring_rows,
//            num_key_heads, RING_LEN, record_stride], dense; pending_ring_slot_idx, num_pending [batch_size]. Strides in
//            elements.
// MUTATES    the slots of live sequences that have tokens or pending records; out.
// CALLER     guarantees that arrays do not overlap, that two live sequences never share a slot, and that
//            IS_PACKED is true only where channels are neighbours and rows start on 16-byte boundaries, RING_IS_PACKED
//            only where records do. Index values may be anything.
#include "pending.cuh"
#include "run_batch.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_AT_ONCE) gated_delta_recurrence_fwd(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    const GATE_TYPE* __restrict__ decay_per_token, long long decay_token_stride, long long decay_head_stride,
    const GATE_TYPE* __restrict__ beta_per_token, long long beta_token_stride, long long beta_head_stride,
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    long long batch_size, long long total_seq_len, long long max_slots,
    long long num_key_heads, long long group_size
#if HAS_PENDING
    , const RING_TYPE* __restrict__ ring, long long ring_rows, long long record_stride,
    const unsigned int* __restrict__ pending_ring_slot_idx, long long pending_ring_slot_idx_stride,
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
    run_batch(arrays, batch, {recurrent_state, state_slot_stride}, FoldedRecords(pending));
#else
    run_batch(arrays, batch, {recurrent_state, state_slot_stride}, NoRecords());
#endif
}
