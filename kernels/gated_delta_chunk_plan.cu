// gated_delta_chunk_plan: which chunks the rows of a ragged batch make, for the chunked kernels, in which order these take
// them, and rows nobody owns.
//
// A live sequence (its slot in the pool, begin < end) of at least min_row_len tokens is a row of the list, in batch order,
// and splits into chunks of CHUNK_LEN tokens from its own first one on, the last one being what is left. A row whose
// chunks no more fit max_chunks, and all after it, are left out; only offsets that go back get there.
//
// Chunks are numbered row after row. Their places, the order in which slabs take them, go through rows_at_once rows of the
// list at a time: the first chunk of each, the second of each that has one, and so on; then come the next rows. So there
// are several rows to walk along in a slab.
//   chunk_plan        as chunk_plan.cuh has it
//   short_slot_idx    unless null, the slots of a call that runs the other rows: that of a live sequence of fewer than
//                     min_row_len tokens, PAD_SLOT for all others
// Rows of `out` that no live sequence owns, in the list or not, become zero.
//
// MACROS     CHUNK_LEN; OUT_TYPE: float, float16, bfloat16
// BLOCK      1024 threads. In the first block a sequence each, in passes, and then a chunk each
// GRID       1 block, followed by any number (one at least, unless there are no rows) that share clearing rows
// SHAPES     slot_idx [batch_size], input_row_offsets [batch_size + 1], out [total_seq_len, value_dim], chunk_plan
//            [4 + 9 * max_chunks], short_slot_idx [batch_size], dense. Strides in elements.
// MUTATES    chunk_plan, as far as there are chunks and rows; short_slot_idx; out
// CALLER     guarantees that arrays do not overlap, that max_chunks is less than 2^30, and that rows_at_once is at least 1.
//            Index values may be anything.
#include "chunk_plan.cuh"
#include "ragged_rows.cuh"

constexpr int NUM_THREADS = 1024;
constexpr int NUM_WARPS = NUM_THREADS / 32;

// The plan while it is made.
struct NewPlan {
    unsigned int* header;
    PlannedChunk* chunks;
    PlannedRow* rows;
    unsigned int* place_chunk;

    __device__ __forceinline__ NewPlan(unsigned int* plan, long long max_chunks)
        : header(plan), chunks(reinterpret_cast<PlannedChunk*>(plan + PLAN_HEADER_ENTRIES)),
          rows(reinterpret_cast<PlannedRow*>(chunks + max_chunks)),
          place_chunk(reinterpret_cast<unsigned int*>(rows + max_chunks)) {}
};

// A sum that stays at `limit`, which is below 2^31: offsets that go back make sums that no 32 bits hold.
__device__ __forceinline__ unsigned int capped_sum(unsigned int left, unsigned int right, unsigned int limit) {
    return left + right < limit ? left + right : limit;
}

// The capped sum of the values of this thread and all before it in the block. `warp_sums` may be used again at once: the
// threads have met behind their last use of it.
__device__ __forceinline__ unsigned int sum_up_to_here(
    unsigned int value, unsigned int limit, unsigned int (&warp_sums)[NUM_WARPS]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto add_below = [&](unsigned int& sum) {
        #pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const unsigned int below = __shfl_sync(0xFFFFFFFFu, sum, lane >= distance ? lane - distance : lane);
            if (lane >= distance) sum = capped_sum(sum, below, limit);
        }
    };
    add_below(value);
    if (lane == 31) warp_sums[warp] = value;
    __syncthreads();
    if (warp == 0) {
        static_assert(NUM_WARPS == 32, "a lane for each warp");
        unsigned int sum = warp_sums[lane];
        add_below(sum);
        warp_sums[lane] = sum;
    }
    __syncthreads();
    const unsigned int before = warp > 0 ? warp_sums[warp - 1] : 0;
    __syncthreads();
    return capped_sum(value, before, limit);
}

// What a pass found, by thread.
struct PassRows {
    unsigned int chunks_up_to_here[NUM_THREADS];
    unsigned int rows_up_to_here[NUM_THREADS];
    unsigned int begin[NUM_THREADS];
    unsigned int end[NUM_THREADS];
};

// The first thread whose row ends behind a chunk of the pass.
__device__ __forceinline__ int row_of_chunk(const PassRows& rows, unsigned int chunk) {
    int first = 0;
    #pragma unroll
    for (int step = NUM_THREADS / 2; step > 0; step /= 2)
        if (rows.chunks_up_to_here[first + step - 1] <= chunk) first += step;
    return first;
}

// The list, and the number of its chunks and rows, the same in all threads; whole once these have met.
struct ListSize {
    unsigned int num_chunks;
    unsigned int num_rows;
};

__device__ __forceinline__ ListSize make_list(
    const Batch& batch, const NewPlan& plan, long long max_chunks, long long min_row_len, unsigned int* short_slot_idx) {
    __shared__ PassRows rows;
    __shared__ unsigned int warp_sums[NUM_WARPS];
    unsigned int num_chunks = 0, num_rows = 0;
    bool is_full = false;
    for (long long first = 0; first < batch.batch_size; first += NUM_THREADS) {
        const long long sequence = first + threadIdx.x;
        long long slot = -1;
        RowRange tokens = {0, 0};
        if (sequence < batch.batch_size) {
            const TableEntries entries = table_entries(batch, sequence);
            tokens = sequence_rows(batch, entries);
            slot = tokens.begin < tokens.end ? live_slot(batch, entries) : -1;
            const bool is_short = slot >= 0 && tokens.end - tokens.begin < min_row_len;
            if (short_slot_idx != nullptr) short_slot_idx[sequence] = is_short ? static_cast<unsigned int>(slot) : PAD_SLOT;
            if (is_short) slot = -1;
        }
        // No sum that a row of the list has part in reaches the limit.
        const unsigned int room = static_cast<unsigned int>(max_chunks) - num_chunks, limit = room + 1;
        const long long length = slot >= 0 ? tokens.end - tokens.begin : 0;
        const unsigned int of_row = static_cast<unsigned int>((length + CHUNK_LEN - 1) / CHUNK_LEN);
        const unsigned int chunks = sum_up_to_here(of_row < limit ? of_row : limit, limit, warp_sums);
        const bool is_listed = of_row > 0 && chunks <= room && !is_full;
        const unsigned int row = sum_up_to_here(is_listed, NUM_THREADS + 1, warp_sums);
        rows.chunks_up_to_here[threadIdx.x] = chunks;
        rows.rows_up_to_here[threadIdx.x] = row;
        rows.begin[threadIdx.x] = static_cast<unsigned int>(tokens.begin);
        rows.end[threadIdx.x] = static_cast<unsigned int>(tokens.end);
        if (is_listed) {
            const unsigned int end = num_chunks + chunks;
            plan.rows[num_rows + row - 1] = {static_cast<unsigned int>(slot), end - of_row, end};
        }
        __syncthreads();
        const unsigned int rows_of_pass = rows.rows_up_to_here[NUM_THREADS - 1];
        unsigned int chunks_of_pass = rows.chunks_up_to_here[NUM_THREADS - 1];
        if (is_full) chunks_of_pass = 0;
        if (chunks_of_pass > room) {  // those of the rows that fit: all before the first that does not
            chunks_of_pass = rows.chunks_up_to_here[0] > room ? 0 : rows.chunks_up_to_here[row_of_chunk(rows, room) - 1];
            is_full = true;
        }
        for (unsigned int chunk = threadIdx.x; chunk < chunks_of_pass; chunk += NUM_THREADS) {
            const int thread = row_of_chunk(rows, chunk);
            const unsigned int before = thread > 0 ? rows.chunks_up_to_here[thread - 1] : 0;
            const unsigned int token = rows.begin[thread] + (chunk - before) * CHUNK_LEN, left = rows.end[thread] - token;
            const unsigned int row = num_rows + rows.rows_up_to_here[thread] - 1;
            plan.chunks[num_chunks + chunk] = {token, left < CHUNK_LEN ? left : CHUNK_LEN, row, 0};
        }
        num_chunks += chunks_of_pass;
        num_rows += rows_of_pass;
        __syncthreads();
    }
    if (threadIdx.x < PLAN_HEADER_ENTRIES)
        plan.header[threadIdx.x] = threadIdx.x == 0 ? num_chunks : threadIdx.x == 1 ? num_rows : 0;
    return {num_chunks, num_rows};
}

// The place of a chunk. Before it are, of the rows that are taken at the same time: of those before its own one chunk more
// than before it in its own, of the others as many, or all that a row has. The rows before these are there as a whole.
__device__ __forceinline__ unsigned int place_of(
    const NewPlan& plan, unsigned int chunk, unsigned int num_rows, unsigned int rows_at_once) {
    const unsigned int own_row = plan.chunks[chunk].row;
    const unsigned int before = chunk - plan.rows[own_row].first_chunk;
    const unsigned int first_row = own_row / rows_at_once * rows_at_once;
    const unsigned int end_row = min(num_rows, first_row + rows_at_once);
    unsigned int place = plan.rows[first_row].first_chunk;
    for (unsigned int row = first_row; row < end_row; ++row)
        place += min(plan.rows[row].end_chunk - plan.rows[row].first_chunk, row < own_row ? before + 1 : before);
    return place;
}

__device__ __forceinline__ void make_plan(
    const Batch& batch, const NewPlan& plan, long long max_chunks, long long min_row_len, long long rows_at_once,
    unsigned int* short_slot_idx) {
    const ListSize size = make_list(batch, plan, max_chunks, min_row_len, short_slot_idx);
    __syncthreads();
    for (unsigned int chunk = threadIdx.x; chunk < size.num_chunks; chunk += NUM_THREADS) {
        const unsigned int place = place_of(plan, chunk, size.num_rows, static_cast<unsigned int>(rows_at_once));
        plan.chunks[chunk].place = place;
        plan.place_chunk[place] = chunk;
    }
}

extern "C" __global__ void __launch_bounds__(1024) gated_delta_chunk_plan(
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    long long batch_size, long long total_seq_len, long long max_slots, long long value_dim,
    unsigned int* __restrict__ chunk_plan, long long max_chunks, long long min_row_len, long long rows_at_once,
    unsigned int* __restrict__ short_slot_idx) {
    const Batch batch = {slot_idx, slot_idx_stride, input_row_offsets, input_row_offsets_stride,
                         offsets_are_signed != 0, batch_size, total_seq_len, max_slots};
    const NewPlan plan(chunk_plan, max_chunks);
    if (blockIdx.x == 0) return make_plan(batch, plan, max_chunks, min_row_len, rows_at_once, short_slot_idx);
    const auto is_live = [&](long long, const TableEntries& entries) { return live_slot(batch, entries) >= 0; };
    for (long long first = blockIdx.x - 1; first * ROWS_PER_CLEARING_BLOCK < total_seq_len; first += gridDim.x - 1) {
        clear_unowned_rows(batch, static_cast<unsigned int>(first), is_live, out, out_token_stride, out_channel_stride,
                           value_dim);
        __syncthreads();
    }
}
