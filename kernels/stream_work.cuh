// A streaming block's way through the batch: which tokens come next.
#pragma once
#include "recurrence.cuh"
#include "stream_records.cuh"
#include "stream_state.cuh"

constexpr int CHUNK_TOKENS = STREAMED_WARPS * TOKENS_PER_WARP;

// A share of the batch: BLOCK_COLUMNS columns of a value head of a sequence. Jobs are numbered like tiles.
struct Job {
    unsigned int sequence;
    unsigned int of_sequence;  // its number among the sequence's
};

// What a block runs between two meetings, all of one window: pending records, then, behind the last of them, tokens; none
// where the window's sequence is padding or has nothing to do. Token numbers fit 32 bits, as input_row_offsets does.
template <typename Records>
struct Chunk {
    Job job;
    TileWork work;  // of the block's first tile
    unsigned int slot;
    typename Records::Entries entries;
    unsigned int begin;  // of the window
    unsigned int end;
    unsigned int token;  // the chunk's first
    unsigned int num_pending;  // of the window
    unsigned int record;       // the chunk's first

    __device__ __forceinline__ int num_records() const {
        if constexpr (!Records::MAY_PEND) return 0;
        return num_pending - record < CHUNK_RECORDS ? static_cast<int>(num_pending - record) : CHUNK_RECORDS;
    }
    __device__ __forceinline__ bool ends_records() const {
        return !Records::MAY_PEND || num_pending - record <= CHUNK_RECORDS;
    }
    __device__ __forceinline__ int num_tokens() const {
        if (!ends_records()) return 0;
        return end - token < CHUNK_TOKENS ? static_cast<int>(end - token) : CHUNK_TOKENS;
    }
    __device__ __forceinline__ bool begins_window() const {
        const bool has_tokens = token == begin && token < end;
        if constexpr (!Records::MAY_PEND) return has_tokens;
        return record == 0 && (has_tokens || num_pending > 0);
    }
    __device__ __forceinline__ bool ends_window() const { return ends_records() && end - token <= CHUNK_TOKENS; }

    __device__ __forceinline__ typename Records::Window window(const Records& records) const {
        return records.window(work, {begin, end}, entries);
    }
};

// A job, and what the tables say of its sequence: requested as soon as the job is known, looked at a chunk later.
template <typename Records>
struct UpcomingJob {
    Job job;
    TableEntries entries;
    typename Records::Entries record_entries;
};

template <typename Records>
struct Stream {
    const TokenArrays& arrays;
    const Batch& batch;
    const Records& records;
    unsigned int jobs_of_sequence;
    Job stride;  // from a block's job to its next one

    __device__ __forceinline__ Stream(const TokenArrays& arrays, const Batch& batch, const Records& records)
        : arrays(arrays), batch(batch), records(records),
          jobs_of_sequence(static_cast<unsigned int>(arrays.num_value_heads()) * BLOCKS_PER_HEAD),
          stride{gridDim.x / jobs_of_sequence, gridDim.x % jobs_of_sequence} {}

    __device__ __forceinline__ Job first_job() const {
        return {blockIdx.x / jobs_of_sequence, blockIdx.x % jobs_of_sequence};
    }

    __device__ __forceinline__ Job job_after(const Job& job) const {
        const Job sum = {job.sequence + stride.sequence, job.of_sequence + stride.of_sequence};
        return sum.of_sequence < jobs_of_sequence ? sum : Job{sum.sequence + 1, sum.of_sequence - jobs_of_sequence};
    }

    __device__ __forceinline__ bool exists(const Job& job) const { return job.sequence < batch.batch_size; }

    // Move on to `job`, if `is_wanted`.
    __device__ __forceinline__ void request(UpcomingJob<Records>& upcoming, const Job& job, bool is_wanted) const {
        const unsigned int sequence = exists(job) ? job.sequence : 0;
        request_entries(batch, sequence, is_wanted, upcoming.entries);
        records.request(sequence, is_wanted, upcoming.record_entries);
        if (is_wanted) upcoming.job = job;
    }

    __device__ __forceinline__ Chunk<Records> first_chunk(const UpcomingJob<Records>& upcoming) const {
        const Job& job = upcoming.job;
        const long long slot = live_slot(batch, upcoming.entries);
        const RowRange rows = sequence_rows(batch, upcoming.entries);
        const bool is_live = exists(job) && slot >= 0 && records.has_place(upcoming.record_entries);
        const unsigned int begin = static_cast<unsigned int>(rows.begin);
        const unsigned int end = is_live && rows.begin < rows.end ? static_cast<unsigned int>(rows.end) : begin;
        const unsigned int num_pending = is_live ? records.num_pending(upcoming.record_entries, rows) : 0;
        const TileWork work = work_of_head(arrays, job.sequence, job.of_sequence / BLOCKS_PER_HEAD,
                                           static_cast<int>(job.of_sequence % BLOCKS_PER_HEAD) * BLOCK_COLUMNS);
        return {job, work, static_cast<unsigned int>(slot), upcoming.record_entries, begin, end, begin, num_pending, 0};
    }

    // The chunk after `chunk`; where it begins the window of `upcoming`, that moves on.
    __device__ __forceinline__ Chunk<Records> following(
        const Chunk<Records>& chunk, UpcomingJob<Records>& upcoming) const {
        const bool moves_on = chunk.ends_window();
        Chunk<Records> result = chunk;
        result.token += chunk.ends_records() ? CHUNK_TOKENS : 0;
        result.record += chunk.num_records();
        if (moves_on) result = first_chunk(upcoming);
        request(upcoming, job_after(upcoming.job), moves_on);
        return result;
    }
};
