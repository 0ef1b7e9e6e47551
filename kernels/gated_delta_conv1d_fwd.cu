// gated_delta_conv1d_fwd: the causal convolution of every channel over the tokens of each sequence, with the window of
// inputs that came before; advances the windows.
//
//   out[t,c] = act(bias[c] + sum over j of conv_weight[c,j] x[t - (CONV_WIDTH - 1) + j, c]),   j ascending, fused
//
// MACROS     those of conv1d.cuh; WEIGHT_TYPE, WEIGHT_IS_PACKED (conv_weight); BIAS_TYPE, HAS_BIAS; IS_SILU; OUT_TYPE;
//            TILE_TOKENS: 1 to 32 rows of a tile; TOKENS_AT_ONCE: those of them that are under way together
// BLOCK      NUM_THREADS * CHANNELS channels of either
//              the head of a sequence: its first HEAD_TOKENS rows, of which some look back into the slot's window, and that
//              window, which nobody else reads or writes; or
//              a tile of TILE_TOKENS rows, whosever they are: those of them behind the heads, which look back on rows alone,
//              and zeros for those that no live sequence owns.
// GRID       (batch_size + ceil(total_seq_len / TILE_TOKENS)) * ceil(conv_dim / (NUM_THREADS * CHANNELS)) blocks,
//            channels fastest, heads first
// SHAPES     qkv, out [total_seq_len, conv_dim]; conv_weight [conv_dim, CONV_WIDTH]; bias [conv_dim]; conv_state
//            [max_slots, conv_dim, CONV_WIDTH - 1], oldest input first; slot_idx [batch_size]; input_row_offsets
//            [batch_size + 1]. Strides in elements.
// MUTATES    out, every row; with writes_state the slots of live sequences that have tokens
// CALLER     guarantees that arrays do not overlap and that two live sequences never name one slot.
#include "conv1d.cuh"

static_assert(TILE_TOKENS >= 1 && TILE_TOKENS <= 32 && TILE_TOKENS % TOKENS_AT_ONCE == 0, "TILE_TOKENS");

using Weights = ChannelColumns<WEIGHT_TYPE, CONV_WIDTH, WEIGHT_IS_PACKED, WEIGHT_IS_PACKED>;

// The weights and biases, at the thread's first channel.
struct StoredFilter {
    const WEIGHT_TYPE* weights;
    long long channel_stride;
    long long tap_stride;
    const BIAS_TYPE* biases;
    long long bias_stride;
};

struct Filter {
    float weights[CONV_WIDTH][CHANNELS];
    float biases[CHANNELS];

    __device__ __forceinline__ explicit Filter(const StoredFilter& stored) {
        Weights taps;
        taps.load(stored.weights, stored.channel_stride, stored.tap_stride);
        taps.widen(weights);
        #pragma unroll
        for (int tap = 0; tap < CONV_WIDTH; ++tap)
            #pragma unroll
            for (int channel = 0; channel < CHANNELS; ++channel) hold(weights[tap][channel]);
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel)
            biases[channel] = HAS_BIAS ? to_float(stored.biases[channel * stored.bias_stride]) : 0.0f;
    }

    __device__ __forceinline__ void output(const Window& window, const Inputs& newest, float (&outputs)[CHANNELS]) const {
        #pragma unroll
        for (int channel = 0; channel < CHANNELS; ++channel) {
            float sum = biases[channel];
            #pragma unroll
            for (int tap = 0; tap < WINDOW_LEN; ++tap)
                sum = __fmaf_rn(weights[tap][channel], window.inputs[tap][channel], sum);
            sum = __fmaf_rn(weights[WINDOW_LEN][channel], newest.of[channel], sum);
            outputs[channel] = IS_SILU ? __fmul_rn(sum, sigmoid(sum)) : sum;
        }
    }
};

// out, at the thread's first channel.
struct OutColumn {
    OUT_TYPE* first;
    long long token_stride;
    long long channel_stride;

    __device__ __forceinline__ void store(long long row, const float (&outputs)[CHANNELS]) const {
        store_run<IS_PACKED>(first + row * token_stride, channel_stride, outputs);
    }
};

// Which rows of a tile belong to live sequences, and which of those are behind the head of their sequence.
struct TileRows {
    unsigned int owned;
    unsigned int inner;
};

// The bits of the rows [begin, end) that lie in a tile of TILE_TOKENS.
__device__ __forceinline__ unsigned int tile_bits(long long begin, long long end, long long first_row) {
    const int low = begin > first_row ? static_cast<int>(begin - first_row) : 0;
    const int high = end < first_row + TILE_TOKENS ? static_cast<int>(end - first_row) : TILE_TOKENS;
    return low >= high ? 0u : (0xFFFFFFFFu >> (32 - (high - low))) << low;
}

// By a whole block: it looks at every sequence, which stays right whatever the offsets hold.
__device__ __forceinline__ TileRows tile_rows(const Batch& batch, long long first_row) {
    __shared__ TileRows rows;
    if (threadIdx.x == 0) rows = {0u, 0u};
    __syncthreads();
    #pragma unroll 1
    for (long long sequence = threadIdx.x; sequence < batch.batch_size; sequence += NUM_THREADS) {
        const TableEntries entries = table_entries(batch, sequence);
        const RowRange of_sequence = sequence_rows(batch, entries);
        if (of_sequence.begin >= first_row + TILE_TOKENS || of_sequence.end <= first_row) continue;
        if (live_slot(batch, entries) < 0) continue;
        atomicOr(&rows.owned, tile_bits(of_sequence.begin, of_sequence.end, first_row));
        atomicOr(&rows.inner, tile_bits(of_sequence.begin + HEAD_TOKENS, of_sequence.end, first_row));
    }
    __syncthreads();
    return rows;
}

// The first rows of a sequence, and its window.
__device__ __forceinline__ void convolve_head(
    const RowRange& rows, long long slot, bool writes_state, const TokenColumn& column, const WindowPool& pool,
    const Filter& filter, const OutColumn& out) {
    move_window(pool, slot, column, rows, writes_state, [&](int i, const Window& window, const Inputs& newest) {
        float outputs[CHANNELS];
        filter.output(window, newest, outputs);
        out.store(rows.begin + i, outputs);
    });
}

// The inner and the unowned ones of `num_rows` rows from first_row on, at most a tile.
__device__ __forceinline__ void convolve_tile(
    const TileRows& tile, long long first_row, int num_rows, const TokenColumn& column, const Filter& filter,
    const OutColumn& out) {
    Window window;
    #pragma unroll
    for (int place = 0; place < WINDOW_LEN; ++place) {
        const long long row = first_row - WINDOW_LEN + place;
        Token token;
        column.load(row > 0 ? row : 0, token);
        window.take(place, token);
    }
    // Each token makes room for the one TOKENS_AT_ONCE rows on. Behind the last row that one is read again.
    const WORK_TYPE* next = column.first + first_row * column.token_stride;
    int num_left = num_rows - 1;
    const auto load_next = [&](Token& token) {
        token.load(next, column.channel_stride);
        if (num_left > 0) next += column.token_stride;
        --num_left;
    };
    Token tokens[TOKENS_AT_ONCE];
    #pragma unroll
    for (int i = 0; i < TOKENS_AT_ONCE; ++i) load_next(tokens[i]);
    #pragma unroll 1
    for (int chunk = 0; chunk < TILE_TOKENS; chunk += TOKENS_AT_ONCE) {
        #pragma unroll
        for (int i = 0; i < TOKENS_AT_ONCE; ++i) {
            const Inputs newest(tokens[i]);
            if constexpr (TILE_TOKENS > TOKENS_AT_ONCE) load_next(tokens[i]);
            const unsigned int bit = 1u << (chunk + i);
            const bool is_inner = (tile.inner & bit) != 0;
            float outputs[CHANNELS] = {};
            if (is_inner) filter.output(window, newest, outputs);
            if (is_inner || (tile.owned & bit) == 0) out.store(first_row + chunk + i, outputs);
            window.advance(newest);
        }
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) gated_delta_conv1d_fwd(
    const WORK_TYPE* __restrict__ qkv, long long qkv_token_stride, long long qkv_channel_stride,
    const WEIGHT_TYPE* __restrict__ conv_weight, long long weight_channel_stride, long long weight_tap_stride,
    STATE_TYPE* __restrict__ conv_state, long long state_slot_stride, long long state_channel_stride,
    long long state_place_stride,
    const unsigned int* __restrict__ slot_idx, long long slot_idx_stride,
    const unsigned int* __restrict__ input_row_offsets, long long input_row_offsets_stride,
    long long offsets_are_signed,
    const BIAS_TYPE* __restrict__ bias, long long bias_stride,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    long long batch_size, long long total_seq_len, long long max_slots, long long conv_dim,
    long long channel_blocks, long long writes_state) {
    const Batch batch{slot_idx,   slot_idx_stride, input_row_offsets, input_row_offsets_stride, offsets_are_signed != 0,
                      batch_size, total_seq_len,   max_slots};
    const long long part = blockIdx.x / static_cast<unsigned int>(channel_blocks);
    const long long channel = first_channel(blockIdx.x % static_cast<unsigned int>(channel_blocks));
    const TokenColumn column{qkv + channel * qkv_channel_stride, qkv_token_stride, qkv_channel_stride};
    const StoredFilter stored_filter{conv_weight + channel * weight_channel_stride, weight_channel_stride,
                                     weight_tap_stride, bias + channel * bias_stride, bias_stride};
    const OutColumn out_column{out + channel * out_channel_stride, out_token_stride, out_channel_stride};
    if (part < batch_size) {
        const TableEntries entries = table_entries(batch, part);
        if (channel >= conv_dim) return;
        const Filter filter(stored_filter);  // under way together with the entries
        const long long slot = live_slot(batch, entries);
        const RowRange rows = sequence_rows(batch, entries);
        if (slot < 0 || rows.begin >= rows.end) return;
        const WindowPool pool{conv_state + channel * state_channel_stride, state_slot_stride, state_channel_stride,
                              state_place_stride};
        convolve_head(rows, slot, writes_state != 0, column, pool, filter, out_column);
    } else {
        const long long first_row = (part - batch_size) * TILE_TOKENS;
        const long long rows_left = total_seq_len - first_row;
        TileRows tile = tile_rows(batch, first_row);
        tile.owned |= ~tile_bits(first_row, total_seq_len, first_row);  // rows behind the last are nobody's to clear
        if (channel >= conv_dim || (tile.inner == 0 && tile.owned == 0xFFFFFFFFu)) return;
        convolve_tile(tile, first_row, static_cast<int>(rows_left < TILE_TOKENS ? rows_left : TILE_TOKENS), column,
                      Filter(stored_filter), out_column);
    }
}
