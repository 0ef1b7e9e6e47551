// Which rows of the token arrays a sequence owns, and what happens to rows that nobody owns.
// Index values come from the device unread by anyone, so nothing here trusts them.
#pragma once
#include "numeric_types.cuh"

constexpr unsigned int PAD_SLOT = 0xFFFFFFFFu;

// The token offsets and slots of a batch.
struct Batch {
    const unsigned int* slot_idx;           // [batch_size]
    long long slot_idx_stride;
    const unsigned int* input_row_offsets;  // [batch_size + 1]
    long long input_row_offsets_stride;
    bool offsets_are_signed;                // int32 rather than uint32
    long long batch_size;
    long long total_seq_len;
    long long max_slots;
};

struct RowRange {
    long long begin;
    long long end;
};

// What the tables say of a sequence, unread by anyone so far.
struct TableEntries {
    unsigned int slot;
    unsigned int begin;
    unsigned int end;
};

__device__ __forceinline__ TableEntries table_entries(const Batch& batch, long long sequence) {
    const unsigned int* const offset = batch.input_row_offsets + sequence * batch.input_row_offsets_stride;
    return {batch.slot_idx[sequence * batch.slot_idx_stride], offset[0], offset[batch.input_row_offsets_stride]};
}

// The same without waiting, where `is_wanted` says so.
__device__ __forceinline__ void request_entries(
    const Batch& batch, long long sequence, bool is_wanted, TableEntries& entries) {
    const unsigned int* const offset = batch.input_row_offsets + sequence * batch.input_row_offsets_stride;
    load_if(is_wanted, batch.slot_idx + sequence * batch.slot_idx_stride, entries.slot);
    load_if(is_wanted, offset, entries.begin);
    load_if(is_wanted, offset + batch.input_row_offsets_stride, entries.end);
}

// An offset clamped to [0, total_seq_len].
__device__ __forceinline__ long long clamped_offset(const Batch& batch, unsigned int bits) {
    const long long offset = batch.offsets_are_signed ? static_cast<long long>(static_cast<int>(bits))
                                                      : static_cast<long long>(bits);
    return offset < 0 ? 0 : offset > batch.total_seq_len ? batch.total_seq_len : offset;
}

// An index into `count` slots or ring rows; -1 where it is PAD_SLOT or lies outside.
__device__ __forceinline__ long long valid_index(unsigned int index, long long count) {
    return index == PAD_SLOT || static_cast<long long>(index) >= count ? -1 : static_cast<long long>(index);
}

// The slot of a sequence, or -1 where the sequence is padding.
__device__ __forceinline__ long long live_slot(const Batch& batch, const TableEntries& entries) {
    return valid_index(entries.slot, batch.max_slots);
}

// The rows of a sequence; begin >= end where it has none (a decreasing pair among them).
__device__ __forceinline__ RowRange sequence_rows(const Batch& batch, const TableEntries& entries) {
    return {clamped_offset(batch, entries.begin), clamped_offset(batch, entries.end)};
}

// Zero those of the ROWS_PER_CLEARING_BLOCK rows of the n-th clearing block that no live sequence owns. The block
// looks at every sequence, which stays right whatever the offsets hold: gaps before, after and between sequences,
// padding rows, offsets that decrease. Call it with a whole block; `is_live(sequence, entries)` says what is not padding.
constexpr int ROWS_PER_CLEARING_BLOCK = 64;

template <typename IsLive, typename Stored>
__device__ __forceinline__ void clear_unowned_rows(
    const Batch& batch, unsigned int clearing_block, const IsLive& is_live, Stored* out, long long out_token_stride,
    long long out_channel_stride, long long num_channels) {
    static_assert(ROWS_PER_CLEARING_BLOCK == 64, "a bit each");
    __shared__ unsigned int owned[ROWS_PER_CLEARING_BLOCK / 32];
    const auto below = [](int row) { return row < 64 ? (1ull << row) - 1 : ~0ull; };
    const long long first_row = static_cast<long long>(clearing_block) * ROWS_PER_CLEARING_BLOCK;
    const long long last_row = first_row + ROWS_PER_CLEARING_BLOCK < batch.total_seq_len
                                   ? first_row + ROWS_PER_CLEARING_BLOCK
                                   : batch.total_seq_len;
    if (threadIdx.x < ROWS_PER_CLEARING_BLOCK / 32) owned[threadIdx.x] = 0;
    __syncthreads();
    for (long long sequence = threadIdx.x; sequence < batch.batch_size; sequence += blockDim.x) {
        const TableEntries entries = table_entries(batch, sequence);
        const RowRange rows = sequence_rows(batch, entries);
        const long long begin = rows.begin > first_row ? rows.begin : first_row;
        const long long end = rows.end < last_row ? rows.end : last_row;
        if (begin >= end || !is_live(sequence, entries)) continue;
        const unsigned long long mask = below(static_cast<int>(end - first_row)) & ~below(static_cast<int>(begin - first_row));
        atomicOr(&owned[0], static_cast<unsigned int>(mask));
        atomicOr(&owned[1], static_cast<unsigned int>(mask >> 32));
    }
    __syncthreads();
    const unsigned long long there = below(static_cast<int>(last_row - first_row));
    unsigned long long left = there & ~(static_cast<unsigned long long>(owned[1]) << 32 | owned[0]);
    for (; left != 0; left &= left - 1) {
        const unsigned int low = static_cast<unsigned int>(left);
        const unsigned int word = low != 0 ? low : static_cast<unsigned int>(left >> 32);
        const long long row = first_row + (low != 0 ? 31 : 63) - __clz(static_cast<int>(word & (0u - word)));
        for (long long channel = threadIdx.x; channel < num_channels; channel += blockDim.x)
            from_float(0.0f, out[row * out_token_stride + channel * out_channel_stride]);
    }
}
