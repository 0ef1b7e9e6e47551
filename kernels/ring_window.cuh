// What verify leaves of a window, in the words of NoRecords in recurrence.cuh.
#pragma once
#include "pending.cuh"
#include "recurrence.cuh"
#include "ring_record.cuh"

struct RingRecords {
    // What the tables say of a sequence, unread by anyone so far.
    struct Entries {
        unsigned int ring_row;
        PendingRecords::Entries pending;
    };
    static constexpr bool MAY_PEND = HAS_PENDING;
    using Stored = RING_TYPE;
    static constexpr bool ARE_PACKED = RING_IS_PACKED;

    RING_TYPE* ring;
    long long ring_rows;
    long long record_stride;
    const unsigned int* ring_slot_idx;  // [batch_size]
    long long ring_slot_idx_stride;
    long long num_key_heads;
    long long group_size;
    PendingRecords pending;

    // The records of one window, as far as the columns from a tile's first on write them. `place` is a token's place in
    // the window. A window that is not recorded stores its state.
    struct Window {
        RING_TYPE* first;  // that of the window's first token
        long long record_stride;
        long long delta_offset;  // of the tile's first column
        long long decay_offset;
        bool is_recorded;
        bool writes_key;    // the first tile of the group's first value head
        bool writes_decay;  // the first tile of each value head

        template <int COUNT>
        __device__ __forceinline__ void write_key(long long place, int first_row, const float (&rows)[COUNT]) const {
            if (writes_key) store_run<RING_IS_PACKED>(first + place * record_stride + first_row, 1, rows);
        }

        __device__ __forceinline__ void write_decay(long long place, float decay) const {
            if (writes_decay) from_float(decay, first[place * record_stride + decay_offset]);
        }

        // The delta factor of one of the tile's columns; those of other columns are its neighbours.
        __device__ __forceinline__ RING_TYPE* delta_row(long long place, int column) const {
            return first + place * record_stride + delta_offset + column;
        }
    };

    __device__ __forceinline__ Entries entries(long long sequence) const {
        return {ring_slot_idx[sequence * ring_slot_idx_stride], pending.entries(sequence)};
    }

    // The same without waiting, where `is_wanted` says so.
    __device__ __forceinline__ void request(long long sequence, bool is_wanted, Entries& entries) const {
        load_if(is_wanted, ring_slot_idx + sequence * ring_slot_idx_stride, entries.ring_row);
        pending.request(sequence, is_wanted, entries.pending);
    }

    // A ring row outside the ring makes the sequence padding.
    __device__ __forceinline__ bool has_place(const Entries& entries) const {
        return valid_index(entries.ring_row, ring_rows) >= 0;
    }

    __device__ __forceinline__ Window window(
        const TileWork& work, const RowRange& rows, const Entries& entries) const {
        const unsigned int first_place = is_folded(entries) ? 0 : pending.count(entries.pending);
        const bool is_recorded = first_place + (rows.end - rows.begin) <= RING_LEN;
        return {ring + first_record_offset(entries.ring_row, num_key_heads, work.key_head, record_stride) +
                    first_place * record_stride,
                record_stride,
                ::delta_offset(work.head_of_group) + work.tile_column,
                ::decay_offset(work.head_of_group, group_size),
                is_recorded,
                is_recorded && work.tile_column == 0 && work.head_of_group == 0,
                is_recorded && work.tile_column == 0};
    }

    // How many records a window starts with. An empty one has no use for those that stay pending.
    __device__ __forceinline__ unsigned int num_pending(const Entries& entries, const RowRange& rows) const {
        return rows.begin < rows.end || is_folded(entries) ? pending.count(entries.pending) : 0;
    }

#if HAS_PENDING
    __device__ __forceinline__ PendingWindow pending_window(const TileWork& work, const Entries& entries) const {
        return pending.window(work, entries.pending, is_folded(entries));
    }
#endif

private:
    __device__ __forceinline__ bool is_folded(const Entries& entries) const {
#if HAS_PENDING
        return entries.pending.ring_row != entries.ring_row;
#else
        return false;
#endif
    }
};
