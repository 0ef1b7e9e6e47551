// gated_delta_chunk_walk: the states and readouts of a slab's chunks, from what gated_delta_chunk_prepare made of them.
//
// Per row and value head, chunk after chunk, with S the state before the chunk, K, Q, T, P, r, s and G as there (T with beta):
//   1. R = V - exp(G) r (K S)         2. V' = T R, the delta factors of the chunk's tokens
//   3. out = s (exp(G) (Q S) + P V')  4. S <- exp(G_last) S + K^T (exp(G_last - G) r V')
// The first state comes from the pool, or where the row began in an earlier slab from `carry_in`; the last goes to the
// pool, rounded, or where the row goes on to `carry_out`.
//
// A warp has 16 columns of the state for the whole piece of a row, transposed, as sums of products (tensor_core.cuh). So
// S, R and V' are left operands without leaving the registers, and keys, queries, T and P are right operands.
//
// Operands are float16, so powers of two are taken out of each column: of S its largest element's, of R and V' the larger
// one of the chunk's values and S. The sums stay float32, S as 2^state_power times what the registers hold. A column
// whose values or state are not finite is NaN from the first token on where that is so, and 0 in all products.
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM: multiples of 32 up to 256; CHUNK_LEN: 64 or 32; OPERAND_TERMS: 1 or 2
//            WORK_TYPE (qkv), STATE_TYPE (pool), OUT_TYPE: float, float16, bfloat16; IS_PACKED: unused here
//            WALK_STAGES: 1 or 2, chunks in shared memory; SHARED_BYTES of a block
// BLOCK      128 threads for tiles of 64 columns where VALUE_HEAD_DIM is a multiple of 64, else 64 for 32
// GRID       any number of blocks: they share the pieces, value heads and tiles
// SHAPES     qkv_conv_output [total_seq_len, conv_dim]; recurrent_state [max_slots, num_value_heads, KEY_HEAD_DIM,
//            VALUE_HEAD_DIM]; out [total_seq_len, num_value_heads * VALUE_HEAD_DIM]; carry_in, carry_out [num_value_heads,
//            KEY_HEAD_DIM, VALUE_HEAD_DIM]; chunk_plan, slab: chunk_workspace.cuh
// MUTATES    slots of rows that end here; rows of out; carry_out
// CALLER     carry_in and carry_out are two arrays
#include "chunk_pieces.cuh"

constexpr int TILE_COLUMNS = VALUE_HEAD_DIM % 64 == 0 ? 64 : 32;
constexpr int NUM_THREADS = TILE_COLUMNS * 2;
constexpr int NUM_TILES = VALUE_HEAD_DIM / TILE_COLUMNS;
constexpr int TOKEN_TILES = CHUNK_LEN / 8;
constexpr int KEY_TILES = KEY_HEAD_DIM / 8;
constexpr int STAGE_BYTES = KEY_HEAD_BYTES + VALUE_HEAD_BYTES;
static_assert(WALK_STAGES * STAGE_BYTES <= SHARED_BYTES, "SHARED_BYTES");

// Sums of products: 16 columns of the value head (rows group and group + 8) by tokens, or by keys.
using TokenSums = float[TOKEN_TILES][4];
using ChunkOperand = LeftOperand<OPERANDS>[CHUNK_LEN / 16];

// A stage of shared memory: what the slab has of one chunk for a value head.
struct Stage {
    unsigned char* bytes;

    __device__ __forceinline__ const unsigned char* keys() const { return bytes; }
    __device__ __forceinline__ const unsigned char* queries() const { return bytes + OPERANDS * KEY_TERM_BYTES; }
    __device__ __forceinline__ const unsigned char* solver() const { return bytes + KEY_HEAD_BYTES; }
    __device__ __forceinline__ const unsigned char* scores() const { return solver() + OPERANDS * SCORE_TERM_BYTES; }
    __device__ __forceinline__ const ChunkScalars& scalars() const {
        return *reinterpret_cast<const ChunkScalars*>(solver() + SCALARS_OFFSET);
    }

    __device__ __forceinline__ void start_copies(const unsigned char* key_head, const unsigned char* value_head) const {
        for (int i = static_cast<int>(threadIdx.x) * 16; i < KEY_HEAD_BYTES; i += NUM_THREADS * 16)
            start_copy_16<0, 0>(bytes + i, key_head + i);
        for (int i = static_cast<int>(threadIdx.x) * 16; i < VALUE_HEAD_BYTES; i += NUM_THREADS * 16)
            start_copy_16<0, 0>(bytes + KEY_HEAD_BYTES + i, value_head + i);
    }
};

// What the lanes of a column have in common: of its rows `group` and `group + 8`.
struct ColumnPair {
    float first;
    float second;
};

__device__ __forceinline__ ColumnPair largest_across_lanes(unsigned int first, unsigned int second) {
    #pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
        first = max(first, __shfl_xor_sync(0xFFFFFFFFu, first, distance));
        second = max(second, __shfl_xor_sync(0xFFFFFFFFu, second, distance));
    }
    return {__uint_as_float(first), __uint_as_float(second)};
}

// The largest magnitude in each of a lane's two columns; infinite or NaN bits count as the largest of all.
template <int TILES>
__device__ __forceinline__ ColumnPair largest_of(const float (&values)[TILES][4]) {
    unsigned int first = 0, second = 0;
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            first = max(first, __float_as_uint(values[tile][i]) & 0x7FFFFFFFu);
            second = max(second, __float_as_uint(values[tile][2 + i]) & 0x7FFFFFFFu);
        }
    return largest_across_lanes(first, second);
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __uint_as_float(0x7F800000u); }

// ---- The state of a warp: 16 columns by all keys ----

struct ColumnState {
    float sums[KEY_TILES][4];
    int power[2];   // of the two columns: the state is 2^power times the sums
    bool is_bad[2];  // NaN, and 0 in the sums

    // Calls visit(key, half, sum), the key counted from the lane's first.
    template <typename Visit>
    __device__ __forceinline__ void for_each(const Visit& visit) {
        #pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile)
            #pragma unroll
            for (int i = 0; i < 4; ++i) visit(8 * tile + i % 2, i / 2, sums[tile][i]);
    }

    // From [KEY_HEAD_DIM, VALUE_HEAD_DIM] in memory, `source` being the lane's first key and column.
    template <typename Stored>
    __device__ __forceinline__ void load(const Stored* source) {
        for_each([&](int key, int half, float& sum) { sum = to_float(source[key * VALUE_HEAD_DIM + 8 * half]); });
        power[0] = power[1] = 0;
        const ColumnPair largest = largest_of(sums);
        is_bad[0] = !is_finite(largest.first);
        is_bad[1] = !is_finite(largest.second);
        for_each([&](int, int half, float& sum) { sum = is_bad[half] ? 0.0f : sum; });
    }

    template <typename Stored>
    __device__ __forceinline__ void store(Stored* target) {
        const float scales[2] = {whole_power(power[0]), whole_power(power[1])};
        for_each([&](int key, int half, float& sum) {
            const float value = is_bad[half] ? __uint_as_float(0x7FFFFFFFu) : sum * scales[half];
            from_float(value, target[key * VALUE_HEAD_DIM + 8 * half]);
        });
    }
};

// ---- A chunk ----

// The powers of two of a lane's two columns in one chunk.
struct ColumnPowers {
    int sums;    // taken out of what the registers hold of the state
    int state;   // of the state as an operand, in all
    int values;  // taken out of values, R and V'
};

__device__ __forceinline__ ColumnPowers column_powers(
    float largest_sum, int state_power, float largest_value, float largest_decay) {
    const int sums = exponent_of(largest_sum);
    const int state = state_power + sums;
    int values = exponent_of(largest_value);
    // The state counts as much as the first token sees of it, nothing behind a decay of 0.
    const int seen = state + exponent_of(largest_decay);
    if (largest_sum > 0.0f && largest_decay > 0.0f && (seen > values || largest_value == 0.0f)) values = seen;
    values = values < -100 ? -100 : values;
    return {sums, state, values};
}

// Products are made for as many tokens at once as registers allow, and keep tensor cores busy.
constexpr int PAIRS_AT_ONCE = KEY_HEAD_DIM <= 128 ? 2 : 1;  // of token tiles
constexpr int TILES_AT_ONCE = 2 * PAIRS_AT_ONCE;
using SomeSums = float[TILES_AT_ONCE][4];

// The state of a warp as the left operand of its products, with the columns' powers taken out.
struct RoundedState {
    static constexpr bool IS_KEPT = KEY_HEAD_DIM * OPERANDS <= 128;  // or made again for each product
    LeftOperand<OPERANDS> steps[IS_KEPT ? KEY_HEAD_DIM / 16 : 1];
    float scales[2];

    __device__ __forceinline__ RoundedState(const ColumnState& state, const ColumnPowers (&powers)[2]) {
        scales[0] = whole_power(-powers[0].sums);
        scales[1] = whole_power(-powers[1].sums);
        if constexpr (IS_KEPT) {
            #pragma unroll
            for (int step = 0; step < KEY_HEAD_DIM / 16; ++step) round(steps[step], state, step);
        }
    }

    __device__ __forceinline__ void round(LeftOperand<OPERANDS>& left, const ColumnState& state, int step) const {
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float(&sums)[4] = state.sums[2 * step + word / 2];
            left.set(word, sums[word % 2 * 2] * scales[word % 2], sums[word % 2 * 2 + 1] * scales[word % 2]);
        }
    }

    // K S or Q S, transposed, of the tokens from `first` on.
    __device__ __forceinline__ void multiply(
        SomeSums& sums, const ColumnState& state, const unsigned char* tiles, int first) {
        #pragma unroll
        for (int tile = 0; tile < TILES_AT_ONCE; ++tile)
            #pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
        if constexpr (!IS_KEPT) {  // the compiler would keep all that it can make from the same scales
            hold(scales[0]);
            hold(scales[1]);
        }
        #pragma unroll
        for (int step = 0; step < KEY_HEAD_DIM / 16; ++step) {
            if constexpr (!IS_KEPT) round(steps[0], state, step);
            #pragma unroll
            for (int pair = 0; pair < PAIRS_AT_ONCE; ++pair) {
                RightOperands<OPERANDS> right;
                load_rows<KEY_ROW_BYTES>(right, tiles + step / 4 * KEY_TILE_BYTES, KEY_TERM_BYTES, first + 16 * pair,
                                         step % 4 * 2);
                right.multiply(sums[2 * pair], steps[IS_KEPT ? step : 0], 0);
                right.multiply(sums[2 * pair + 1], steps[IS_KEPT ? step : 0], 1);
            }
        }
    }
};

// sums += operand * tile^T for the tokens from `first` on, the tile lower triangular: solver or scores.
__device__ __forceinline__ void multiply_triangle(
    SomeSums& sums, const ChunkOperand& operand, const unsigned char* tile, int first) {
    #pragma unroll
    for (int step = 0; step < CHUNK_LEN / 16; ++step)
        #pragma unroll
        for (int pair = 0; pair < PAIRS_AT_ONCE; ++pair) {
            if (16 * step > first + 16 * pair) continue;
            RightOperands<OPERANDS> right;
            load_rows<SCORE_ROW_BYTES>(right, tile, SCORE_TERM_BYTES, first + 16 * pair, 2 * step);
            right.multiply(sums[2 * pair], operand[step], 0);
            right.multiply(sums[2 * pair + 1], operand[step], 1);
        }
}

// Call visit(token, half, sum) for what a lane holds.
template <int TILES, typename Visit>
__device__ __forceinline__ void for_each_token(float (&sums)[TILES][4], const Visit& visit) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        #pragma unroll
        for (int i = 0; i < 4; ++i) visit(8 * tile + lane % 4 * 2 + i % 2, i / 2, sums[tile][i]);
}

// The part of an operand for the tokens from `first` on.
__device__ __forceinline__ void set_operand(ChunkOperand& operand, const SomeSums& sums, int first) {
    #pragma unroll
    for (int pair = 0; pair < PAIRS_AT_ONCE; ++pair)
        operand[first / 16 + pair].set(sums[2 * pair], sums[2 * pair + 1]);
}

struct ChunkTokens {
    const WORK_TYPE* value;  // of the chunk's first token and the lane's first column
    long long value_token_stride;
    long long value_channel_stride;
    OUT_TYPE* out;
    long long out_token_stride;
    long long out_channel_stride;
    int length;
};

// Calls visit(token, half, value) for a lane's values of TILES tiles of tokens from `first` on; 0 beyond the chunk. One
// pointer moves along the tokens: addresses of their own would take more registers than there are.
template <int TILES, typename Visit>
__device__ __forceinline__ void for_each_value(const ChunkTokens& tokens, int first, const Visit& visit) {
    int token = first + static_cast<int>(threadIdx.x) % 4 * 2;
    const WORK_TYPE* source = tokens.value + token * tokens.value_token_stride;
    #pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const long long offset = i % 2 * tokens.value_token_stride + i / 2 * 8 * tokens.value_channel_stride;
            visit(token + i % 2, i / 2, token + i % 2 < tokens.length ? to_float(source[offset]) : 0.0f, 4 * tile + i);
        }
        token += 8;
        source += 8 * tokens.value_token_stride;
        hold_pointer(source);
    }
}

// Of each of a lane's columns in a chunk: the largest magnitude of its values, and the first token from which on it is NaN.
struct ColumnValues {
    ColumnPair largest;
    int first_bad[2];

    __device__ __forceinline__ ColumnValues(const ChunkTokens& tokens, ColumnState& state, int num_good) {
        find_largest(tokens, CHUNK_LEN, CHUNK_LEN);
        first_bad[0] = state.is_bad[0] ? 0 : num_good;
        first_bad[1] = state.is_bad[1] ? 0 : num_good;
        if (!__any_sync(0xFFFFFFFFu, !is_finite(largest.first) || !is_finite(largest.second) || num_good < CHUNK_LEN)) return;
        for_each_value<TOKEN_TILES>(tokens, 0, [&](int token, int half, float value, int) {
            if (!is_finite(value)) first_bad[half] = min(first_bad[half], token);
        });
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            #pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                first_bad[half] = min(first_bad[half], __shfl_xor_sync(0xFFFFFFFFu, first_bad[half], distance));
            state.is_bad[half] = first_bad[half] < CHUNK_LEN;
        }
        find_largest(tokens, first_bad[0], first_bad[1]);
    }

    // Of the tokens before these ends. Bits that are infinite or NaN count as the largest of all.
    __device__ __forceinline__ void find_largest(const ChunkTokens& tokens, int first_end, int second_end) {
        unsigned int bits[2] = {0, 0};
        for_each_value<TOKEN_TILES>(tokens, 0, [&](int token, int half, float value, int) {
            if (token < (half == 0 ? first_end : second_end)) bits[half] = max(bits[half], __float_as_uint(value) & 0x7FFFFFFFu);
        });
        largest = largest_across_lanes(bits[0], bits[1]);
    }
};

// Write the readout of the tokens from `first` on.
__device__ __forceinline__ void store_readout(const SomeSums& readout, const ChunkTokens& tokens, int first) {
    int token = first + static_cast<int>(threadIdx.x) % 4 * 2;
    OUT_TYPE* target = tokens.out + token * tokens.out_token_stride;
    #pragma unroll
    for (int tile = 0; tile < TILES_AT_ONCE; ++tile) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const long long offset = i % 2 * tokens.out_token_stride + i / 2 * 8 * tokens.out_channel_stride;
            if (token + i % 2 < tokens.length) from_float(readout[tile][i], target[offset]);
        }
        token += 8;
        target += 8 * tokens.out_token_stride;
        hold_pointer(target);
    }
}

// Run one chunk: its readout, and the state behind it.
__device__ __forceinline__ void run_chunk(ColumnState& state, const ChunkTokens& tokens, const Stage& stage) {
    const ChunkScalars& scalars = stage.scalars();
    const ColumnPair largest_sum = largest_of(state.sums);
    const ColumnValues values(tokens, state, scalars.num_good);
    const float largest_decay = scalars.first_decay;
    const ColumnPowers powers[2] = {
        column_powers(largest_sum.first, state.power[0], values.largest.first, largest_decay),
        column_powers(largest_sum.second, state.power[1], values.largest.second, largest_decay)};
    RoundedState rounded(state, powers);

    // R, then V' = T R
    const float memory_scales[2] = {whole_power(powers[0].state - powers[0].values),
                                    whole_power(powers[1].state - powers[1].values)};
    const float value_scales[2] = {whole_power(-powers[0].values), whole_power(-powers[1].values)};
    ChunkOperand operand;
    SomeSums sums;
    #pragma unroll
    for (int first = 0; first < CHUNK_LEN; first += 8 * TILES_AT_ONCE) {
        rounded.multiply(sums, state, stage.keys(), first);
        for_each_token(sums, [&](int token, int half, float& sum) {
            sum *= memory_scales[half] * scalars.decayed_key[first + token];
        });
        for_each_value<TILES_AT_ONCE>(tokens, first, [&](int token, int half, float value, int i) {
            const float counted = token < values.first_bad[half] ? value : 0.0f;
            sums[i / 4][i % 4] = fmaf(counted, value_scales[half], sums[i / 4][i % 4]);
        });
        set_operand(operand, sums, first);
    }
    const float update_unit = whole_power(-scalars.update_power);
    ChunkOperand deltas, updates;
    #pragma unroll
    for (int first = 0; first < CHUNK_LEN; first += 8 * TILES_AT_ONCE) {
        #pragma unroll
        for (int tile = 0; tile < TILES_AT_ONCE; ++tile)
            #pragma unroll
            for (int i = 0; i < 4; ++i) sums[tile][i] = 0.0f;
        multiply_triangle(sums, operand, stage.solver(), first);
        set_operand(deltas, sums, first);
        for_each_token(sums, [&](int token, int, float& sum) { sum *= scalars.update[first + token] * update_unit; });
        set_operand(updates, sums, first);
    }

    // The readout
    const float out_scales[2] = {whole_power(powers[0].values), whole_power(powers[1].values)};
    #pragma unroll
    for (int first = 0; first < CHUNK_LEN; first += 8 * TILES_AT_ONCE) {
        rounded.multiply(sums, state, stage.queries(), first);
        for_each_token(sums, [&](int token, int half, float& sum) {
            sum *= scalars.decayed[first + token] * memory_scales[half];
        });
        multiply_triangle(sums, deltas, stage.scores(), first);
        for_each_token(sums, [&](int token, int half, float& sum) {
            sum *= scalars.query[first + token] * out_scales[half];
            if (first + token >= values.first_bad[half]) sum = __uint_as_float(0x7FFFFFFFu);
        });
        store_readout(sums, tokens, first);
    }

    // The state: what it holds is in units of the deltas' operand from here on.
    float decays[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int power = powers[half].values + scalars.update_power;
        decays[half] = scalars.decay * whole_power(state.power[half] - power);
        state.power[half] = power;
    }
    state.for_each([&](int, int half, float& sum) { sum *= decays[half]; });
    #pragma unroll
    for (int step = 0; step < CHUNK_LEN / 16; ++step)
        #pragma unroll
        for (int pair = 0; pair < KEY_TILES / 2; ++pair) {
            RightOperands<OPERANDS> right;
            load_block<KEY_ROW_BYTES>(right, stage.keys() + pair / 4 * KEY_TILE_BYTES, KEY_TERM_BYTES, 16 * step,
                                      pair % 4 * 2);
            right.multiply(state.sums[2 * pair], updates[step], 0);
            right.multiply(state.sums[2 * pair + 1], updates[step], 1);
        }
}

// ---- A piece of a row ----

struct Walk {
    const WORK_TYPE* qkv_conv_output;
    long long qkv_token_stride;
    long long qkv_channel_stride;
    STATE_TYPE* recurrent_state;
    long long state_slot_stride;
    OUT_TYPE* out;
    long long out_token_stride;
    long long out_channel_stride;
    const float* carry_in;
    float* carry_out;
    ChunkSlab slab;
};

__device__ __forceinline__ void walk_piece(
    const Walk& walk, const ChunkPlan& plan, const RowPiece& piece, unsigned int first_chunk, long long value_head,
    int tile, unsigned char* shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int column = tile * TILE_COLUMNS + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    const long long key_head = value_head / walk.slab.group_size;
    const long long head_offset = (value_head * KEY_HEAD_DIM + lane % 4 * 2) * VALUE_HEAD_DIM + column;
    const long long channel = value_head * VALUE_HEAD_DIM + column;
    const long long value_channel = 2 * walk.slab.num_key_heads * KEY_HEAD_DIM + channel;
    STATE_TYPE* const pool = walk.recurrent_state + plan.slot(piece.row) * walk.state_slot_stride + head_offset;
    const auto stage = [&](unsigned int chunk) { return Stage{shared + (chunk % WALK_STAGES) * STAGE_BYTES}; };
    const auto start = [&](unsigned int chunk) {
        const long long place = chunk - first_chunk;
        stage(chunk).start_copies(walk.slab.key_head(place, key_head), walk.slab.value_head(place, value_head));
    };

    __syncthreads();  // all are done with what the shared memory held
    start(piece.begin);
    ColumnState state;
    if (piece.is_first) {
        state.load(pool);
    } else {
        state.load(walk.carry_in + head_offset);
    }
    for (unsigned int chunk = piece.begin; chunk < piece.end; ++chunk) {
        wait_for_copies();
        __syncthreads();
        if (WALK_STAGES == 2 && chunk + 1 < piece.end) start(chunk + 1);
        const long long token = plan.token(chunk);
        const ChunkTokens tokens = {
            walk.qkv_conv_output + token * walk.qkv_token_stride + value_channel * walk.qkv_channel_stride,
            walk.qkv_token_stride,
            walk.qkv_channel_stride,
            walk.out + token * walk.out_token_stride + channel * walk.out_channel_stride,
            walk.out_token_stride,
            walk.out_channel_stride,
            plan.length(chunk)};
        run_chunk(state, tokens, stage(chunk));
        if (WALK_STAGES == 1 && chunk + 1 < piece.end) {
            __syncthreads();
            start(chunk + 1);
        }
    }
    if (piece.is_last) {
        state.store(pool);
    } else {
        state.store(walk.carry_out + head_offset);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) gated_delta_chunk_walk(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    const unsigned int* __restrict__ chunk_plan, unsigned char* __restrict__ slab,
    const float* __restrict__ carry_in, float* __restrict__ carry_out, long long first_chunk,
    long long slab_chunks, long long max_chunks, long long num_key_heads, long long group_size) {
    unsigned char* const shared = launch_shared_memory<SHARED_BYTES>();
    const ChunkPlan plan = {chunk_plan, max_chunks};
    const SlabPieces pieces(plan, first_chunk, slab_chunks);
    const Walk walk = {qkv_conv_output, qkv_token_stride, qkv_channel_stride, recurrent_state, state_slot_stride,
                       out, out_token_stride, out_channel_stride, carry_in, carry_out,
                       {slab, num_key_heads, group_size}};
    const unsigned int tiles_of_piece = static_cast<unsigned int>(num_key_heads * group_size * NUM_TILES);
    const unsigned long long num_items = static_cast<unsigned long long>(pieces.num_pieces) * tiles_of_piece;
    for (unsigned long long item = blockIdx.x; item < num_items; item += gridDim.x) {
        const unsigned int tile = static_cast<unsigned int>(item % tiles_of_piece);
        walk_piece(walk, plan, pieces.piece(plan, static_cast<unsigned int>(item / tiles_of_piece)),
                   static_cast<unsigned int>(first_chunk), tile / NUM_TILES, static_cast<int>(tile % NUM_TILES), shared);
    }
}
