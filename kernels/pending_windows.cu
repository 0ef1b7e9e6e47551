// pending_windows: where the next windows of a batch record, and what is pending for them, in all layers.
//
// For each sequence, what is given of three things, in this order:
//   is_new             where it says so, nothing is pending
//   num_accepted       what became of the window that input_row_offsets told of last, of `length` tokens:
//                      num_pending = length == 0 ? num_pending : length > ring_len ? 0
//                                                : first_place + min(num_accepted, length)
//                      and what is pending lies in the window's ring row, of every layer
//   input_row_offsets  its next window, empty where slot_idx, if given, is padding. It takes the sequence's other ring row
//                      if records are pending, it is not empty, and not (is_lazy and num_pending + length <= ring_len);
//                      first_place is 0 then, otherwise num_pending. Told of again before num_accepted, it is judged anew.
//
// BLOCK      128 threads, a sequence each
// GRID       ceil(batch_size / 128) blocks
// SHAPES     is_new, num_accepted, slot_idx [batch_size], input_row_offsets [batch_size + 1], or null. Dense:
//            ring_slot_idx, pending_ring_slot_idx, spare_ring_slot_idx [num_layers, batch_size]; num_pending, window_len,
//            first_place [batch_size]. Strides in elements.
// MUTATES    the dense arrays
// CALLER     guarantees that arrays do not overlap, and that no window ends beyond the tokens that there are. Other values
//            may be anything; offsets that decrease are an empty window, those below zero are zero.
#include "ragged_rows.cuh"

// An offset that is not below 0.
__device__ __forceinline__ unsigned int clamped(unsigned int bits, bool is_signed) {
    return is_signed && static_cast<int>(bits) < 0 ? 0 : bits;
}

__device__ __forceinline__ unsigned int pending_after(
    unsigned int num_pending, unsigned int length, unsigned int first_place, unsigned int num_accepted,
    long long ring_len) {
    if (length == 0) return num_pending;
    if (length > ring_len) return 0;
    return first_place + (num_accepted < length ? num_accepted : length);
}

extern "C" __global__ void __launch_bounds__(128) pending_windows(
    const unsigned char* __restrict__ is_new, long long is_new_stride,
    const unsigned int* __restrict__ num_accepted, long long num_accepted_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    unsigned int* __restrict__ ring_slot_idx, unsigned int* __restrict__ pending_ring_slot_idx,
    unsigned int* __restrict__ spare_ring_slot_idx, unsigned int* __restrict__ num_pending,
    unsigned int* __restrict__ window_len, unsigned int* __restrict__ first_place,
    long long num_layers, long long batch_size, long long ring_len, long long is_lazy) {
    const long long sequence = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (sequence >= batch_size) return;
    unsigned int pending = num_pending[sequence];
    if (is_new != nullptr && is_new[sequence * is_new_stride] != 0) pending = 0;
    if (num_accepted != nullptr) {
        pending = pending_after(pending, window_len[sequence], first_place[sequence],
                                num_accepted[sequence * num_accepted_stride], ring_len);
        #pragma unroll 1
        for (long long at = sequence; at < num_layers * batch_size; at += batch_size)
            pending_ring_slot_idx[at] = ring_slot_idx[at];
    }
    num_pending[sequence] = pending;
    if (input_row_offsets == nullptr) return;

    const unsigned int* const offset = input_row_offsets + sequence * input_row_offsets_stride;
    const unsigned int begin = clamped(offset[0], offsets_are_signed != 0);
    const unsigned int end = clamped(offset[input_row_offsets_stride], offsets_are_signed != 0);
    const bool is_padding = slot_idx != nullptr && slot_idx[sequence * slot_idx_stride] == PAD_SLOT;
    const unsigned int length = end > begin && !is_padding ? end - begin : 0;
    const bool fits = is_lazy != 0 && static_cast<long long>(pending) + length <= ring_len;
    const bool moves = pending > 0 && length > 0 && !fits;
    window_len[sequence] = length;
    first_place[sequence] = moves ? 0 : pending;
    #pragma unroll 1
    for (long long at = sequence; at < num_layers * batch_size; at += batch_size) {
        const unsigned int current = pending_ring_slot_idx[at];
        const unsigned int other = ring_slot_idx[at] == current ? spare_ring_slot_idx[at] : ring_slot_idx[at];
        ring_slot_idx[at] = moves ? other : current;
        spare_ring_slot_idx[at] = moves ? current : other;
    }
}
