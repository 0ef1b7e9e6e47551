// What the convolution and its commit share: a thread's channels, their windows of past inputs, one output.
//
// MACROS     CONV_WIDTH: taps, 2 to 8; CHANNELS: neighbouring channels of a thread; NUM_THREADS of a block;
//            HEAD_TOKENS: the first rows of a sequence that are walked with its window, at least CONV_WIDTH - 1;
//            WORK_TYPE (qkv), STATE_TYPE (conv_state); IS_PACKED: qkv (and out) take the widest accesses;
//            STATE_BY_CHANNEL, STATE_IS_PACKED: how a thread's window lies in the pool, see ChannelColumns
// GRID       the channels of a token are split over ceil(conv_dim / (NUM_THREADS * CHANNELS)) neighbouring blocks
#pragma once
#include "ragged_rows.cuh"

constexpr int WINDOW_LEN = CONV_WIDTH - 1;
static_assert(HEAD_TOKENS >= WINDOW_LEN, "HEAD_TOKENS");

// COLUMNS values of each of a thread's channels, as they lie in memory at `first`: BY_CHANNEL, all of a channel side by
// side and channel after channel; else column after column, the channels of each `channel_stride` apart, or side by side
// where IS_PACKED_ says so. Only neighbours on 16-byte boundaries are by channel.
template <typename Stored, int COLUMNS, bool BY_CHANNEL, bool IS_PACKED_>
struct ChannelColumns {
    static constexpr int NUM_RUNS = BY_CHANNEL ? 1 : COLUMNS;
    static constexpr int RUN_LEN = CHANNELS * COLUMNS / NUM_RUNS;
    Run<Stored, RUN_LEN, IS_PACKED_> runs[NUM_RUNS];

    __device__ __forceinline__ void load(const Stored* first, long long channel_stride, long long column_stride) {
        #pragma unroll
        for (int run = 0; run < NUM_RUNS; ++run) runs[run].load(first + run * column_stride, channel_stride);
    }

    __device__ __forceinline__ void widen(float (&values)[COLUMNS][CHANNELS]) const {
        #pragma unroll
        for (int column = 0; column < COLUMNS; ++column)
            #pragma unroll
            for (int channel = 0; channel < CHANNELS; ++channel)
                values[column][channel] = BY_CHANNEL ? runs[0][channel * COLUMNS + column] : runs[column % NUM_RUNS][channel];
    }

    // The same place written, each value rounded to the stored type.
    static __device__ __forceinline__ void store(
        const float (&values)[COLUMNS][CHANNELS], Stored* first, long long channel_stride, long long column_stride) {
        #pragma unroll
        for (int run = 0; run < NUM_RUNS; ++run) {
            float of_run[RUN_LEN];
            #pragma unroll
            for (int i = 0; i < RUN_LEN; ++i)
                of_run[i] = BY_CHANNEL ? values[i % COLUMNS][i / COLUMNS] : values[run][i % CHANNELS];
            store_run<IS_PACKED_>(first + run * column_stride, channel_stride, of_run);
        }
    }
};

using Token = Run<WORK_TYPE, CHANNELS, IS_PACKED>;
using StoredWindow = ChannelColumns<STATE_TYPE, WINDOW_LEN, STATE_BY_CHANNEL, STATE_IS_PACKED>;

// The first of the calling thread's channels; conv_dim or more where it has none.
__device__ __forceinline__ long long first_channel(unsigned int channel_block) {
    return (static_cast<long long>(channel_block) * NUM_THREADS + threadIdx.x) * CHANNELS;
}

// qkv, at the thread's first channel.
struct TokenColumn {
    const WORK_TYPE* first;
    long long token_stride;
    long long channel_stride;

    __device__ __forceinline__ void load(long long row, Token& token) const {
        token.load(first + row * token_stride, channel_stride);
    }
};

// One token of a thread's channels.
struct Inputs {
    float of[CHANNELS];

    __device__ __forceinline__ explicit Inputs(const Token& token) {
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel) of[channel] = token[channel];
    }
};

// The last inputs of a thread's channels, oldest first.
struct Window {
    float inputs[WINDOW_LEN][CHANNELS];

    __device__ __forceinline__ void take(int place, const Token& token) {
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel) inputs[place][channel] = token[channel];
    }

    __device__ __forceinline__ void advance(const Inputs& newest) {
        #pragma unroll
        for (int place = 0; place + 1 < WINDOW_LEN; ++place)
            #pragma unroll
            for (int channel = 0; channel < CHANNELS; ++channel) inputs[place][channel] = inputs[place + 1][channel];
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel) inputs[WINDOW_LEN - 1][channel] = newest.of[channel];
    }
};

// conv_state, at the thread's first channel.
struct WindowPool {
    STATE_TYPE* first;
    long long slot_stride;
    long long channel_stride;
    long long place_stride;

    __device__ __forceinline__ void load(long long slot, StoredWindow& window) const {
        window.load(first + slot * slot_stride, channel_stride, place_stride);
    }

    __device__ __forceinline__ void store(const Window& window, long long slot) const {
        StoredWindow::store(window.inputs, first + slot * slot_stride, channel_stride, place_stride);
    }
};

// The ends of a sequence's rows, under way together: the first HEAD_TOKENS and the last WINDOW_LEN, or fewer and some
// repeated.
struct SequenceEnds {
    Token first[HEAD_TOKENS];
    Token last[WINDOW_LEN];

    __device__ __forceinline__ void load(const TokenColumn& qkv, const RowRange& rows) {
        #pragma unroll
        for (int i = 0; i < HEAD_TOKENS; ++i) qkv.load(rows.begin + i < rows.end ? rows.begin + i : rows.end - 1, first[i]);
        #pragma unroll
        for (int i = 0; i < WINDOW_LEN; ++i) {
            const long long row = rows.end - WINDOW_LEN + i;
            qkv.load(row > rows.begin ? row : rows.begin, last[i]);
        }
    }
};

// Move a slot's window over all of these rows; `on_token(i, window, inputs)` sees each of the first HEAD_TOKENS before
// the window moves over it. The slot is read before it is written, by the thread that writes it.
template <typename OnToken>
__device__ __forceinline__ void move_window(
    const WindowPool& pool, long long slot, const TokenColumn& qkv, const RowRange& rows, bool writes,
    const OnToken& on_token) {
    StoredWindow stored;
    pool.load(slot, stored);
    SequenceEnds tokens;
    tokens.load(qkv, rows);
    Window window;
    stored.widen(window.inputs);
    #pragma unroll
    for (int i = 0; i < HEAD_TOKENS; ++i) {
        if (rows.begin + i < rows.end) {
            const Inputs inputs(tokens.first[i]);
            on_token(i, window, inputs);
            window.advance(inputs);
        }
    }
    if (!writes) return;
    if (rows.end - rows.begin > HEAD_TOKENS) {
        #pragma unroll
        for (int i = 0; i < WINDOW_LEN; ++i) window.take(i, tokens.last[i]);
    }
    pool.store(window, slot);
}
