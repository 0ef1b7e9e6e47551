// The plan of a chunked call in memory: its chunks, its rows, and the order in which slabs take the chunks. Made by
// gated_delta_chunk_plan, read by all kernels of the chunked form; gdn/backends/chunk_layout.py knows its size.
#pragma once

struct alignas(16) PlannedChunk {
    unsigned int token;  // its first one
    unsigned int length;
    unsigned int row;    // counted along the list
    unsigned int place;  // in the order of slabs
};

struct alignas(16) PlannedRow {
    unsigned int slot;         // of its state
    unsigned int first_chunk;  // of the row's chunks, which are numbered one after the other
    unsigned int end_chunk;
    unsigned int zero;
};

// In this order: num_chunks, num_rows, 0, 0; the chunks; the rows; the chunk of each place. Each array has room for
// max_chunks entries.
constexpr int PLAN_HEADER_ENTRIES = 4;
struct ChunkPlan {
    const unsigned int* entries;
    long long max_chunks;

    __device__ __forceinline__ unsigned int num_chunks() const { return entries[0]; }
    __device__ __forceinline__ unsigned int num_rows() const { return entries[1]; }
    __device__ __forceinline__ const PlannedChunk& chunk(unsigned int chunk) const {
        return reinterpret_cast<const PlannedChunk*>(entries + PLAN_HEADER_ENTRIES)[chunk];
    }
    __device__ __forceinline__ const PlannedRow& row(unsigned int row) const {
        return reinterpret_cast<const PlannedRow*>(entries + PLAN_HEADER_ENTRIES)[max_chunks + row];
    }
    __device__ __forceinline__ unsigned int chunk_at(unsigned int place) const {
        return entries[PLAN_HEADER_ENTRIES + 8 * max_chunks + place];
    }
};
