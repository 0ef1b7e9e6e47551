// What the kernels that run tokens share: their arguments, and finding work in a ragged batch.
// The arguments of the recurrence functions are described at the head of gated_delta_recurrence_fwd.cu.
#pragma once
#include "ragged_rows.cuh"
#include "row_tile.cuh"

// Whether run_batch zeroes rows of `out` that no live sequence owns; false where another kernel of the call does.
#ifndef CLEARS_ROWS
#define CLEARS_ROWS true
#endif

struct TokenArrays {
    const WORK_TYPE* qkv_conv_output;
    long long qkv_token_stride;
    long long qkv_channel_stride;
    const GATE_TYPE* decay_per_token;
    long long decay_token_stride;
    long long decay_head_stride;
    const GATE_TYPE* beta_per_token;
    long long beta_token_stride;
    long long beta_head_stride;
    OUT_TYPE* out;
    long long out_token_stride;
    long long out_channel_stride;
    long long num_key_heads;
    long long group_size;

    __device__ __forceinline__ long long num_value_heads() const { return num_key_heads * group_size; }
};

// One tile of columns of one value head of one sequence.
struct TileWork {
    unsigned int sequence;
    unsigned int value_head;
    unsigned int key_head;
    int tile_column;  // first column of the tile in its value head
    int head_of_group;
};

// Tiles of a batch: those of a value head are neighbours, then come its sequence's heads, then sequences. Their number
// fits 31 bits, and 32-bit divisions are several times cheaper than 64-bit ones.
__device__ __forceinline__ unsigned int num_tiles_of(const TokenArrays& arrays, const Batch& batch) {
    return static_cast<unsigned int>(batch.batch_size * arrays.num_value_heads() * NUM_TILES);
}

__device__ __forceinline__ TileWork work_of_head(
    const TokenArrays& arrays, unsigned int sequence, unsigned int value_head, int tile_column) {
    const unsigned int group_size = static_cast<unsigned int>(arrays.group_size);
    const unsigned int key_head = value_head / group_size;
    return {sequence, value_head, key_head, tile_column, static_cast<int>(value_head - key_head * group_size)};
}

__device__ __forceinline__ TileWork work_of_tile(const TokenArrays& arrays, unsigned int tile) {
    const unsigned int num_value_heads = static_cast<unsigned int>(arrays.num_value_heads());
    const unsigned int head_of_batch = tile / NUM_TILES;
    return work_of_head(arrays, head_of_batch / num_value_heads, head_of_batch % num_value_heads,
                        static_cast<int>(tile % NUM_TILES) * TILE_COLUMNS);
}

// Zero the rows of a clearing block (ragged_rows.cuh).
template <typename Records>
__device__ __forceinline__ void clear_rows(
    const TokenArrays& arrays, const Batch& batch, const Records& records, unsigned int clearing_block) {
    const auto is_live = [&](long long sequence, const TableEntries& entries) {
        return live_slot(batch, entries) >= 0 && records.has_place(records.entries(sequence));
    };
    clear_unowned_rows(batch, clearing_block, is_live, arrays.out, arrays.out_token_stride, arrays.out_channel_stride,
                       arrays.num_value_heads() * VALUE_HEAD_DIM);
}

// What run_batch asks about the records of a batch, answered for kernels that keep none: every sequence has a place for
// them, none is written, and the last state goes to the pool. ring_window.cuh and pending.cuh have other answers.
struct NoRecords {
    using Stored = float;
    struct Entries {};  // what the tables say of a sequence's records
    static constexpr bool ARE_PACKED = true;
    static constexpr bool MAY_PEND = false;  // whether states advance over records before they run tokens

    struct Window {
        static constexpr long long record_stride = 0;
        static constexpr bool is_recorded = false;
        template <int COUNT>
        __device__ __forceinline__ void write_key(long long, int, const float (&)[COUNT]) const {}
        __device__ __forceinline__ void write_decay(long long, float) const {}
        __device__ __forceinline__ Stored* delta_row(long long, int) const { return nullptr; }
    };

    __device__ __forceinline__ Entries entries(long long) const { return {}; }
    __device__ __forceinline__ void request(long long, bool, Entries&) const {}
    __device__ __forceinline__ bool has_place(const Entries&) const { return true; }
    __device__ __forceinline__ unsigned int num_pending(const Entries&, const RowRange&) const { return 0; }
    __device__ __forceinline__ Window window(const TileWork&, const RowRange&, const Entries&) const { return {}; }
};
