// What one token leaves for one key head in the ring, and where it lies:
//
//   [0, KEY_HEAD_DIM)                      the raw key
//   then group_size rows of VALUE_HEAD_DIM the delta factors, one row per value head of the group
//   then group_size                        the decays, one per value head of the group
//
// A ring is [ring_rows, num_key_heads, RING_LEN, record_stride], dense; a token's record lies at the token's place in
// its window. Elements of a record beyond these are padding, never read or written.
#pragma once

#ifdef RING_LEN
static_assert(RING_LEN >= 1 && RING_LEN <= 64, "RING_LEN");

// The record of a window's first token; those of the others follow, record_stride apart.
__device__ __forceinline__ long long first_record_offset(
    long long ring_row, long long num_key_heads, long long key_head, long long record_stride) {
    return (ring_row * num_key_heads + key_head) * RING_LEN * record_stride;
}

__device__ __forceinline__ long long delta_offset(int head_of_group) {
    return KEY_HEAD_DIM + static_cast<long long>(head_of_group) * VALUE_HEAD_DIM;
}

__device__ __forceinline__ long long decay_offset(int head_of_group, long long group_size) {
    return KEY_HEAD_DIM + group_size * VALUE_HEAD_DIM + head_of_group;
}
#endif
