// gated_delta_chunk_walk: the states and readouts of a slab's chunks, from what gated_delta_chunk_prepare made of them.
//
// Per row and value head, chunk after chunk, with S the state before the chunk, K, Q, T, P, r, s and G as there (T with beta):
//   1. R = V - exp(G) r (K S)         2. V' = T R, the delta factors of the chunk's tokens
//   3. out = s (exp(G) (Q S) + P V')  4. S <- exp(G_last) S + K^T (exp(G_last - G) r V')
// The first state comes from the pool, and the last goes there. Where a row goes on in another slab, a pool of float32 holds
// its state in between; other pools hold rounded states, so there it goes to `carry_out` and comes from `carry_in`.
//
// A warp has 16 columns of the state for the whole piece of a row, transposed, as sums of products (tensor_core.cuh). So
// S, R and V' are left operands without leaving the registers, and keys, queries, T and P are right operands.
//
// Operands are float16, so powers of two are taken out of each column: of S its largest element's, of R and V' the larger
// one of the chunk's values and S. The sums stay float32, S as 2^state_power times what the registers hold. A column
// whose values or state are not finite is NaN from the first token on where that is so, and 0 in all products.
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM: multiples of 32 up to 256; CHUNK_LEN: 64 or 32; OPERAND_TERMS: 1 or 2
//            WORK_TYPE (qkv), STATE_TYPE (pool), OUT_TYPE: float, float16, bfloat16; IS_PACKED: channels of qkv and out are dense
//            WALK_STAGES: 1 or 2, chunks in shared memory; SHARED_BYTES of a block
// BLOCK      128 threads for tiles of 64 columns where VALUE_HEAD_DIM is a multiple of 64, else 64 for 32
// GRID       any number of blocks: they share the pieces, value heads and tiles
// SHAPES     qkv_conv_output [total_seq_len, conv_dim]; recurrent_state [max_slots, num_value_heads, KEY_HEAD_DIM,
//            VALUE_HEAD_DIM]; out [total_seq_len, num_value_heads * VALUE_HEAD_DIM]; carry_in, carry_out [rows_at_once,
//            num_value_heads, KEY_HEAD_DIM, VALUE_HEAD_DIM] unless STATE_TYPE is float; chunk_plan, slab: chunk_workspace.cuh
// MUTATES    slots of rows that end here, with float those of all rows of the slab; rows of out; carry_out
// OVERLAP    may begin before the grid in front has ended, which makes the slab ready and ends behind the walk before; the
//            next grid may begin when this one has, so it must not write this slab
// CALLER     carry_in and carry_out are two arrays. No row has chunks in two slabs and none in one between them.
#include "chunk_pieces.cuh"
#include "grid_order.cuh"

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

    // From what products with the state are to what values are.
    __device__ __forceinline__ float memory_scale() const { return whole_power(state - values); }

    // For one turn of a loop, so that what is made from powers does not take registers in all others.
    __device__ __forceinline__ ColumnPowers in_turn(int turn) const {
        ColumnPowers held = *this;
        hold_in_turn(held.sums, turn);
        hold_in_turn(held.state, turn);
        hold_in_turn(held.values, turn);
        return held;
    }
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

// Products are made for 16 tokens at once, in a turn of a loop.
using SomeSums = float[2][4];

__device__ __forceinline__ void clear(SomeSums& sums) {
    #pragma unroll
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0.0f;
}

// K S or Q S, transposed, of 16 tokens; the product of 16 keys of the state at a time.
struct StateProduct {
    SomeSums sums;
    const unsigned char* tiles;

    __device__ __forceinline__ StateProduct(const unsigned char* tiles_of_tokens) : tiles(tiles_of_tokens) { clear(sums); }

    __device__ __forceinline__ void add(const LeftOperand<OPERANDS>& left, int first, int step, int lane_offset) {
        RightOperands<OPERANDS> right;
        load_rows<KEY_ROW_BYTES>(right, tiles + step / 4 * KEY_TILE_BYTES, KEY_TERM_BYTES, first, step % 4 * 2, lane_offset);
        right.multiply(sums[0], left, 0);
        right.multiply(sums[1], left, 1);
    }
};

// The state of a warp as the left operand of its products, with the columns' powers taken out.
struct RoundedState {
    static constexpr bool IS_KEPT = KEY_HEAD_DIM * OPERANDS <= 128;  // or made again for each product
    LeftOperand<OPERANDS> steps[IS_KEPT ? KEY_HEAD_DIM / 16 : 1];

    __device__ __forceinline__ RoundedState(const ColumnState& state, const ColumnPowers (&powers)[2]) {
        if constexpr (IS_KEPT) {
            #pragma unroll
            for (int step = 0; step < KEY_HEAD_DIM / 16; ++step) round(step, state, powers);
        }
    }

    __device__ __forceinline__ LeftOperand<OPERANDS>& round(
        int step, const ColumnState& state, const ColumnPowers (&powers)[2]) {
        LeftOperand<OPERANDS>& left = steps[IS_KEPT ? step : 0];
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
            const float(&sums)[4] = state.sums[2 * step + word / 2];
            const float scale = whole_power(-powers[word % 2].sums);
            left.set(word, sums[word % 2 * 2] * scale, sums[word % 2 * 2 + 1] * scale);
        }
        return left;
    }

    // For the tokens from `first` on.
    template <typename... Products>
    __device__ __forceinline__ void multiply(
        const ColumnState& state, const ColumnPowers (&powers)[2], int first, Products&... products) {
        const int lane_offset = row_first_offset<KEY_ROW_BYTES>(lane_in_turn(first));
        #pragma unroll
        for (int step = 0; step < KEY_HEAD_DIM / 16; ++step) {
            const LeftOperand<OPERANDS>& left = IS_KEPT ? steps[IS_KEPT ? step : 0] : round(step, state, powers);
            (products.add(left, first, step, lane_offset), ...);
        }
    }
};

// sums += operand * tile^T for the tokens from `first` on, the tile lower triangular: solver or scores.
__device__ __forceinline__ void multiply_triangle(
    SomeSums& sums, const ChunkOperand& operand, const unsigned char* tile, int first) {
    const int lane_offset = row_first_offset<SCORE_ROW_BYTES>(lane_in_turn(first));
    #pragma unroll
    for (int step = 0; step < CHUNK_LEN / 16; ++step) {
        if (16 * step > first) break;
        RightOperands<OPERANDS> right;
        load_rows<SCORE_ROW_BYTES>(right, tile, SCORE_TERM_BYTES, first, 2 * step, lane_offset);
        right.multiply(sums[0], operand[step], 0);
        right.multiply(sums[1], operand[step], 1);
    }
}

// Calls visit(token, half, sum) for what a lane holds of the tokens from `first` on.
template <typename Visit>
__device__ __forceinline__ void for_each_token(SomeSums& sums, int first, const Visit& visit) {
    const int token = first + lane_in_turn(first) % 4 * 2;
    #pragma unroll
    for (int tile = 0; tile < 2; ++tile)
        #pragma unroll
        for (int i = 0; i < 4; ++i) visit(token + 8 * tile + i % 2, i / 2, sums[tile][i]);
}

// The part of an operand for the tokens from `first` on. Registers have no index, so each asks whether it is the one.
__device__ __forceinline__ void set_operand(ChunkOperand& operand, const SomeSums& sums, int first) {
    LeftOperand<OPERANDS> part;
    part.set(sums[0], sums[1]);
    #pragma unroll
    for (int step = 0; step < CHUNK_LEN / 16; ++step)
        #pragma unroll
        for (int i = 0; i < 4 * OPERANDS; ++i) {
            unsigned int& word = operand[step].words[i / 4][i % 4];
            word = first == 16 * step ? part.words[i / 4][i % 4] : word;
        }
}

__device__ __forceinline__ LeftOperand<OPERANDS> part_of(const ChunkOperand& operand, int first) {
    LeftOperand<OPERANDS> part = operand[0];
    #pragma unroll
    for (int step = 1; step < CHUNK_LEN / 16; ++step)
        #pragma unroll
        for (int i = 0; i < 4 * OPERANDS; ++i) {
            unsigned int& word = part.words[i / 4][i % 4];
            word = first == 16 * step ? operand[step].words[i / 4][i % 4] : word;
        }
    return part;
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
// pointer moves along the tokens: addresses of their own would take more registers than there are. UNROLLED: how many of the
// tiles are read without waiting.
template <int TILES, int UNROLLED = TILES, typename Visit>
__device__ __forceinline__ void for_each_value(const ChunkTokens& tokens, int first, const Visit& visit) {
    int token = first + lane_in_turn(tokens.length + first) % 4 * 2;
    const WORK_TYPE* source = tokens.value + token * tokens.value_token_stride;
    long long channel_stride = tokens.value_channel_stride;
    if (!IS_PACKED) hold_in_turn(channel_stride, first);
    #pragma unroll UNROLLED
    for (int tile = 0; tile < TILES; ++tile) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const long long offset = i % 2 * tokens.value_token_stride + i / 2 * 8 * channel_stride;
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
        find_largest<TOKEN_TILES>(tokens, CHUNK_LEN, CHUNK_LEN);
        first_bad[0] = state.is_bad[0] ? 0 : num_good;
        first_bad[1] = state.is_bad[1] ? 0 : num_good;
        if (!__any_sync(0xFFFFFFFFu, !is_finite(largest.first) || !is_finite(largest.second) || num_good < CHUNK_LEN)) return;
        for_each_value<TOKEN_TILES, 1>(tokens, 0, [&](int token, int half, float value, int) {
            if (!is_finite(value)) first_bad[half] = min(first_bad[half], token);
        });
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            #pragma unroll
            for (int distance = 1; distance <= 2; distance *= 2)
                first_bad[half] = min(first_bad[half], __shfl_xor_sync(0xFFFFFFFFu, first_bad[half], distance));
            state.is_bad[half] = first_bad[half] < CHUNK_LEN;
        }
        find_largest<1>(tokens, first_bad[0], first_bad[1]);
    }

    // Of the tokens before these ends. Bits that are infinite or NaN count as the largest of all.
    template <int UNROLLED>
    __device__ __forceinline__ void find_largest(const ChunkTokens& tokens, int first_end, int second_end) {
        unsigned int bits[2] = {0, 0};
        for_each_value<TOKEN_TILES, UNROLLED>(tokens, 0, [&](int token, int half, float value, int) {
            if (token < (half == 0 ? first_end : second_end)) bits[half] = max(bits[half], __float_as_uint(value) & 0x7FFFFFFFu);
        });
        largest = largest_across_lanes(bits[0], bits[1]);
    }
};

// Write the readout of the tokens from `first` on.
__device__ __forceinline__ void store_readout(const SomeSums& readout, const ChunkTokens& tokens, int first) {
    int token = first + lane_in_turn(tokens.length + first) % 4 * 2;
    OUT_TYPE* target = tokens.out + token * tokens.out_token_stride;
    long long channel_stride = tokens.out_channel_stride;
    if (!IS_PACKED) hold_in_turn(channel_stride, first);
    #pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const long long offset = i % 2 * tokens.out_token_stride + i / 2 * 8 * channel_stride;
            if (token + i % 2 < tokens.length) from_float(readout[tile][i], target[offset]);
        }
        token += 8;
        target += 8 * tokens.out_token_stride;
        hold_pointer(target);
    }
}

// R of the tokens from `first` on. sums: K S.
__device__ __forceinline__ void set_remainders(
    ChunkOperand& remainders, SomeSums& sums, const ChunkTokens& tokens, const ColumnValues& values,
    const ColumnPowers (&powers)[2], const ChunkScalars& scalars, int first) {
    const float memory_scales[2] = {powers[0].memory_scale(), powers[1].memory_scale()};
    const float value_scales[2] = {whole_power(-powers[0].values), whole_power(-powers[1].values)};
    for_each_token(sums, first, [&](int token, int half, float& sum) {
        sum *= memory_scales[half] * scalars.decayed_key[token];
    });
    for_each_value<2>(tokens, first, [&](int token, int half, float value, int i) {
        const float counted = token < values.first_bad[half] ? value : 0.0f;
        sums[i / 4][i % 4] = fmaf(counted, value_scales[half], sums[i / 4][i % 4]);
    });
    set_operand(remainders, sums, first);
}

// V' = T R of the tokens from `first` on, and what the state takes of it.
__device__ __forceinline__ void set_deltas(
    ChunkOperand& deltas, ChunkOperand& updates, const ChunkOperand& remainders, const Stage& stage, int first) {
    const ChunkScalars& scalars = stage.scalars();
    SomeSums sums;
    clear(sums);
    multiply_triangle(sums, remainders, stage.solver(), first);
    set_operand(deltas, sums, first);
    const float update_unit = whole_power(-scalars.update_power);
    for_each_token(sums, first, [&](int token, int, float& sum) { sum *= scalars.update[token] * update_unit; });
    set_operand(updates, sums, first);
}

// Finish and store the readout of the tokens from `first` on. sums: Q S.
__device__ __forceinline__ void make_readout(
    SomeSums& sums, const ChunkOperand& deltas, const ChunkTokens& tokens, const ColumnValues& values,
    const ColumnPowers (&powers)[2], const Stage& stage, int first) {
    const ChunkScalars& scalars = stage.scalars();
    const float memory_scales[2] = {powers[0].memory_scale(), powers[1].memory_scale()};
    const float out_scales[2] = {whole_power(powers[0].values), whole_power(powers[1].values)};
    for_each_token(sums, first, [&](int token, int half, float& sum) {
        sum *= scalars.decayed[token] * memory_scales[half];
    });
    multiply_triangle(sums, deltas, stage.scores(), first);
    for_each_token(sums, first, [&](int token, int half, float& sum) {
        sum *= scalars.query[token] * out_scales[half];
        if (token >= values.first_bad[half]) sum = __uint_as_float(0x7FFFFFFFu);
    });
    store_readout(sums, tokens, first);
}

// S behind the chunk. What it holds is in units of the updates' operand from then on.
__device__ __forceinline__ void update_state(
    ColumnState& state, const ChunkOperand& updates, const ColumnPowers (&powers)[2], const Stage& stage) {
    const ChunkScalars& scalars = stage.scalars();
    float decays[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int power = powers[half].values + scalars.update_power;
        decays[half] = scalars.decay * whole_power(powers[half].state - powers[half].sums - power);
        state.power[half] = power;
    }
    state.for_each([&](int, int half, float& sum) { sum *= decays[half]; });
    #pragma unroll 1
    for (int first = 0; first < CHUNK_LEN; first += 16) {
        const LeftOperand<OPERANDS> part = part_of(updates, first);
        const int lane_offset = column_first_offset<KEY_ROW_BYTES>(lane_in_turn(first));
        #pragma unroll
        for (int pair = 0; pair < KEY_TILES / 2; ++pair) {
            RightOperands<OPERANDS> right;
            load_block<KEY_ROW_BYTES>(right, stage.keys() + pair / 4 * KEY_TILE_BYTES, KEY_TERM_BYTES, first, pair % 4 * 2,
                                      lane_offset);
            right.multiply(state.sums[2 * pair], part, 0);
            right.multiply(state.sums[2 * pair + 1], part, 1);
        }
    }
}

// Calls visit(first, powers) for 16 tokens after the other. Not unrolled: what one turn needs beside the state and the
// operands is a few registers, of all together it would be more than there are.
template <typename Visit>
__device__ __forceinline__ void for_each_turn(const ColumnPowers (&powers)[2], const Visit& visit) {
    #pragma unroll 1
    for (int first = 0; first < CHUNK_LEN; first += 16) visit(first, {powers[0].in_turn(first), powers[1].in_turn(first)});
}

// Run one chunk: its readout, and the state behind it.
__device__ __forceinline__ void run_chunk(ColumnState& state, const ChunkTokens& tokens, const Stage& stage) {
    using PowersInTurn = const ColumnPowers(&)[2];
    const ChunkScalars& scalars = stage.scalars();
    const ColumnPair largest_sum = largest_of(state.sums);
    const ColumnValues values(tokens, state, scalars.num_good);
    const float largest_decay = scalars.first_decay;
    const ColumnPowers powers[2] = {
        column_powers(largest_sum.first, state.power[0], values.largest.first, largest_decay),
        column_powers(largest_sum.second, state.power[1], values.largest.second, largest_decay)};
    RoundedState rounded(state, powers);
    ChunkOperand deltas = {}, updates = {};
    if constexpr (RoundedState::IS_KEPT) {  // products of keys and queries side by side keep tensor cores busy
        ChunkOperand remainders = {};
        for_each_turn(powers, [&](int first, PowersInTurn in_turn) {
            StateProduct keys(stage.keys()), queries(stage.queries());
            rounded.multiply(state, in_turn, first, keys, queries);
            set_remainders(remainders, keys.sums, tokens, values, in_turn, scalars, first);
            set_deltas(deltas, updates, remainders, stage, first);
            make_readout(queries.sums, deltas, tokens, values, in_turn, stage, first);
        });
    } else {  // and so much at once would be too much
        for_each_turn(powers, [&](int first, PowersInTurn in_turn) {
            StateProduct keys(stage.keys());
            rounded.multiply(state, in_turn, first, keys);
            set_remainders(deltas, keys.sums, tokens, values, in_turn, scalars, first);
        });
        for_each_turn(powers, [&](int turn, PowersInTurn) {  // the last tokens first, so that V' can take the place of R
            set_deltas(deltas, updates, deltas, stage, CHUNK_LEN - 16 - turn);
        });
        for_each_turn(powers, [&](int first, PowersInTurn in_turn) {
            StateProduct queries(stage.queries());
            rounded.multiply(state, in_turn, first, queries);
            make_readout(queries.sums, deltas, tokens, values, in_turn, stage, first);
        });
    }
    update_state(state, updates, powers, stage);
}

// ---- A piece of a row, for 64 or 32 columns of a value head ----

// Which of the 16 columns of a value head a warp has, as one of the items that blocks share.
struct WalkColumns {
    unsigned int value_head;
    unsigned int column;  // the lane's first

    // The lane's first key and column of a state.
    __device__ __forceinline__ long long state_offset() const {
        const unsigned int key = threadIdx.x % 4 * 2;
        return (static_cast<long long>(value_head) * KEY_HEAD_DIM + key) * VALUE_HEAD_DIM + column;
    }
};

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
    ChunkPlan plan;
    ChunkSlab slab;
    int first_place;  // of the slab
    int slab_chunks;
    int rows_at_once;

    __device__ __forceinline__ unsigned int value_heads() const {
        return static_cast<unsigned int>(slab.num_key_heads * slab.group_size);
    }
    __device__ __forceinline__ SlabPieces pieces() const { return {plan, first_place, slab_chunks, rows_at_once}; }
    // Of all blocks. Each has a part of a state in memory to itself, so 31 bits count them.
    __device__ __forceinline__ unsigned int num_items() const { return pieces().num_pieces * value_heads() * NUM_TILES; }
    __device__ __forceinline__ RowPiece piece(unsigned int item) const {
        return pieces().piece(plan, item / NUM_TILES / value_heads());
    }
    __device__ __forceinline__ WalkColumns columns(unsigned int item) const {
        const unsigned int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return {item / NUM_TILES % value_heads(), item % NUM_TILES * TILE_COLUMNS + warp * 16 + lane / 4};
    }

    __device__ __forceinline__ STATE_TYPE* pooled(unsigned int slot, const WalkColumns& columns) const {
        return recurrent_state + static_cast<long long>(slot) * state_slot_stride + columns.state_offset();
    }
    // From the start of a carry.
    __device__ __forceinline__ long long carried(unsigned int row, const WalkColumns& columns) const {
        const long long place = row % static_cast<unsigned int>(rows_at_once);
        return place * value_heads() * KEY_HEAD_DIM * VALUE_HEAD_DIM + columns.state_offset();
    }
    __device__ __forceinline__ ChunkTokens tokens(unsigned int chunk, const WalkColumns& columns) const {
        const long long token = plan.chunk(chunk).token;
        int column = static_cast<int>(columns.column);
        hold_in_turn(column, static_cast<int>(chunk));
        const long long channel = static_cast<long long>(columns.value_head) * VALUE_HEAD_DIM + static_cast<unsigned int>(column);
        const long long value_channel = 2 * slab.num_key_heads * KEY_HEAD_DIM + channel;
        return {qkv_conv_output + token * qkv_token_stride + value_channel * qkv_channel_stride,
                qkv_token_stride,
                qkv_channel_stride,
                out + token * out_token_stride + channel * out_channel_stride,
                out_token_stride,
                out_channel_stride,
                static_cast<int>(plan.chunk(chunk).length)};
    }

    // For what is read of the plan in one place, so that it takes no registers in others: chunks need them all.
    __device__ __forceinline__ Walk in_turn(unsigned int turn) const {
        Walk held = *this;
        hold_pointer(held.plan.entries);
        hold_in_turn(held.first_place, static_cast<int>(turn));
        hold_in_turn(held.slab_chunks, static_cast<int>(turn));
        return held;
    }
};

__device__ __forceinline__ void walk_chunks(
    ColumnState& state, const Walk& walk, const RowPiece& piece, const WalkColumns& columns, unsigned char* shared) {
    const auto stage = [&](unsigned int chunk) { return Stage{shared + (chunk % WALK_STAGES) * STAGE_BYTES}; };
    const auto start = [&](unsigned int chunk) {
        const long long in_slab = walk.plan.chunk(chunk).place - static_cast<unsigned int>(walk.first_place);
        const unsigned int key_head = columns.value_head / static_cast<unsigned int>(walk.slab.group_size);
        stage(chunk).start_copies(walk.slab.key_head(in_slab, key_head), walk.slab.value_head(in_slab, columns.value_head));
    };
    __syncthreads();  // all are done with what the shared memory held
    start(piece.begin);
    if (!HAS_CARRIES || piece.is_first) {
        state.load(walk.pooled(piece.slot, columns));
    } else {
        state.load(walk.carry_in + walk.carried(piece.row, columns));
    }
    for (unsigned int chunk = piece.begin; chunk < piece.end; ++chunk) {
        wait_for_copies();
        __syncthreads();
        if (WALK_STAGES == 2 && chunk + 1 < piece.end) start(chunk + 1);
        run_chunk(state, walk.tokens(chunk, columns), stage(chunk));
        if (WALK_STAGES == 1 && chunk + 1 < piece.end) {
            __syncthreads();
            start(chunk + 1);
        }
    }
}

// Where the state of an item goes is found again, not kept: while chunks are walked they need all registers.
__device__ __forceinline__ void store_state(
    ColumnState& state, const Walk& walk, unsigned int item, unsigned int row, unsigned int end) {
    int held_item = static_cast<int>(item);
    hold_in_turn(held_item, static_cast<int>(end));
    const WalkColumns columns = walk.columns(static_cast<unsigned int>(held_item));
    const PlannedRow planned = walk.in_turn(end).plan.row(row);
    if (!HAS_CARRIES || end == planned.end_chunk) {
        state.store(walk.pooled(planned.slot, columns));
    } else {
        state.store(walk.carry_out + walk.carried(row, columns));
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 2) gated_delta_chunk_walk(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    const unsigned int* __restrict__ chunk_plan, unsigned char* __restrict__ slab,
    const float* __restrict__ carry_in, float* __restrict__ carry_out, long long first_place,
    long long slab_chunks, long long max_chunks, long long rows_at_once, long long num_key_heads, long long group_size) {
    wait_for_grid_before();
    let_next_grid_begin();
    unsigned char* const shared = launch_shared_memory<SHARED_BYTES>();
    const Walk walk = {qkv_conv_output, qkv_token_stride, IS_PACKED ? 1 : qkv_channel_stride, recurrent_state,
                       state_slot_stride, out, out_token_stride, IS_PACKED ? 1 : out_channel_stride, carry_in, carry_out,
                       {chunk_plan, max_chunks}, {slab, num_key_heads, group_size}, static_cast<int>(first_place),
                       static_cast<int>(slab_chunks), static_cast<int>(rows_at_once)};
    for (unsigned int item = blockIdx.x; item < walk.in_turn(item).num_items(); item += gridDim.x) {
        const RowPiece piece = walk.in_turn(item).piece(item);
        if (piece.begin >= piece.end) continue;
        ColumnState state;
        walk_chunks(state, walk, piece, walk.columns(item), shared);
        store_state(state, walk, item, piece.row, piece.end);
    }
}
