// gated_delta_conv1d_commit: move the windows of past inputs over the accepted tokens of each sequence, as
// gated_delta_conv1d_fwd over those tokens leaves them.
//
// MACROS     those of conv1d.cuh
// BLOCK      one sequence, NUM_THREADS * CHANNELS channels
// GRID       batch_size * ceil(conv_dim / (NUM_THREADS * CHANNELS)) blocks, channels fastest
// SHAPES     qkv [total_seq_len, conv_dim]; conv_state [max_slots, conv_dim, CONV_WIDTH - 1]; slot_idx, num_accepted
//            [batch_size]; input_row_offsets [batch_size + 1]. Strides in elements.
// MUTATES    the slots of live sequences whose count is not 0. A count above the tokens of a sequence means all of them.
// CALLER     guarantees that arrays do not overlap and that two live sequences never name one slot.
#include "conv1d.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) gated_delta_conv1d_commit(
    const WORK_TYPE* __restrict__ qkv, long long qkv_token_stride, long long qkv_channel_stride,
    STATE_TYPE* __restrict__ conv_state, long long state_slot_stride, long long state_channel_stride,
    long long state_place_stride,
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    const unsigned int* __restrict__ num_accepted, long long num_accepted_stride,
    long long batch_size, long long total_seq_len, long long max_slots, long long conv_dim,
    long long channel_blocks) {
    const Batch batch{slot_idx,   slot_idx_stride, input_row_offsets, input_row_offsets_stride, offsets_are_signed != 0,
                      batch_size, total_seq_len,   max_slots};
    const unsigned int sequence = blockIdx.x / static_cast<unsigned int>(channel_blocks);
    const long long channel = first_channel(blockIdx.x % static_cast<unsigned int>(channel_blocks));
    const unsigned int count = num_accepted[sequence * num_accepted_stride];
    const TableEntries entries = table_entries(batch, sequence);
    const long long slot = live_slot(batch, entries);
    RowRange rows = sequence_rows(batch, entries);
    if (rows.begin + count < rows.end) rows.end = rows.begin + count;
    if (channel >= conv_dim || slot < 0 || rows.begin >= rows.end) return;
    const WindowPool pool{conv_state + channel * state_channel_stride, state_slot_stride, state_channel_stride,
                          state_place_stride};
    const TokenColumn column{qkv + channel * qkv_channel_stride, qkv_token_stride, qkv_channel_stride};
    move_window(pool, slot, column, rows, true, [](int, const Window&, const Inputs&) {});
}
