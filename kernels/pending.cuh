// Records that earlier windows left and that a state has yet to advance over before it runs tokens.
//
// If they lie in another ring row than the window's own records will (always, where a kernel records nothing), that is a
// fold: the state is rounded to its type in the pool and goes on from there. Otherwise they stay pending, and the window's
// records follow them in the same ring row.
#pragma once
#include "recurrence.cuh"
#include "ring_record.cuh"

#if HAS_PENDING
// What the tables say of a sequence, unread by anyone so far.
struct PendingEntries {
    unsigned int ring_row;
    unsigned int count;
};

// The pending records of one window, as far as the columns from a tile's first on need them.
struct PendingWindow {
    const RING_TYPE* first;
    long long record_stride;
    long long delta_offset;  // of the tile's first column
    long long decay_offset;
    unsigned int count;
    bool is_folded;

    __device__ __forceinline__ const RING_TYPE* record(unsigned int i) const { return first + i * record_stride; }
};

// Those of a batch.
struct PendingRecords {
    using Entries = PendingEntries;

    const RING_TYPE* ring;
    long long ring_rows;
    long long record_stride;
    const unsigned int* ring_slot_idx;  // [batch_size]
    long long ring_slot_idx_stride;
    const unsigned int* num_pending;  // [batch_size]
    long long num_pending_stride;
    long long num_key_heads;
    long long group_size;

    __device__ __forceinline__ Entries entries(long long sequence) const {
        return {ring_slot_idx[sequence * ring_slot_idx_stride], num_pending[sequence * num_pending_stride]};
    }

    __device__ __forceinline__ void request(long long sequence, bool is_wanted, Entries& entries) const {
        load_if(is_wanted, ring_slot_idx + sequence * ring_slot_idx_stride, entries.ring_row);
        load_if(is_wanted, num_pending + sequence * num_pending_stride, entries.count);
    }

    // A count above RING_LEN says that the window of these records advanced the state itself.
    __device__ __forceinline__ unsigned int count(const Entries& entries) const {
        return entries.count <= RING_LEN && valid_index(entries.ring_row, ring_rows) >= 0 ? entries.count : 0;
    }

    __device__ __forceinline__ PendingWindow window(const TileWork& work, const Entries& entries, bool is_folded) const {
        return {ring + first_record_offset(entries.ring_row, num_key_heads, work.key_head, record_stride),
                record_stride,
                ::delta_offset(work.head_of_group) + work.tile_column,
                ::decay_offset(work.head_of_group, group_size),
                count(entries),
                is_folded};
    }
};

// NoRecords, after a fold of what is pending.
struct FoldedRecords : NoRecords {
    using Entries = PendingEntries;
    static constexpr bool MAY_PEND = true;

    PendingRecords pending;

    __device__ __forceinline__ explicit FoldedRecords(const PendingRecords& pending) : pending(pending) {}

    __device__ __forceinline__ Entries entries(long long sequence) const { return pending.entries(sequence); }
    __device__ __forceinline__ void request(long long sequence, bool is_wanted, Entries& entries) const {
        pending.request(sequence, is_wanted, entries);
    }
    __device__ __forceinline__ bool has_place(const Entries&) const { return true; }
    __device__ __forceinline__ Window window(const TileWork&, const RowRange&, const Entries&) const { return {}; }

    // How many records a window starts with.
    __device__ __forceinline__ unsigned int num_pending(const Entries& entries, const RowRange&) const {
        return pending.count(entries);
    }
    __device__ __forceinline__ PendingWindow pending_window(const TileWork& work, const Entries& entries) const {
        return pending.window(work, entries, true);
    }
};

#else

// Answers of a call that has none.
struct PendingRecords {
    struct Entries {};

    __device__ __forceinline__ Entries entries(long long) const { return {}; }
    __device__ __forceinline__ void request(long long, bool, Entries&) const {}
    __device__ __forceinline__ unsigned int count(const Entries&) const { return 0; }
};
#endif
