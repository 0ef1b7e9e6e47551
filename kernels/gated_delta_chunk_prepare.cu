// gated_delta_chunk_prepare: what the walk along a row needs of its chunks, for a slab of chunks at once.
//
// For a chunk of CHUNK_LEN tokens (the last of a row may have fewer) and a key head, with k, q the raw key and query:
//   1. K = k / 2^a, Q = q / 2^b, as float16: a power of two for each token brings them near a norm of 1, so that 16-bit
//      keys and queries stay exact; r and s are what normalising leaves to do: k/|k| = r K
//   2. KK = K K^T, QK = Q K^T, once for two value heads of the group
// and for each of these, with G_i the sum of log2(decay) up to token i:
//   3. A[i,j] = beta_i r_i r_j exp(G_i - G_j) KK[i,j] for j < i    T = (I + A)^-1, unit lower triangular
//   4. solver[i,j] = T[i,j] beta_j      scores[i,j] = exp(G_i - G_j) r_j QK[i,j] for j <= i
//   5. the scalars of chunk_workspace.cuh
// Powers of two are taken out of solver and scores, from the largest beta and r of the chunk, so that they fit float16.
//
// Decays of 0: G sums the logarithms of the others, and the place of the last zero up to i says for which j the factor
// exp(G_i - G_j) is 0. So no infinity ever appears, and differences are taken before the power.
//
// Tokens that hold what is not finite (a key, a decay, a beta): their key and beta become 0 and `num_good` says where the
// first of them is; the walk writes NaN from there on.
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM: multiples of 32 up to 256; CHUNK_LEN: 64 or 32; OPERAND_TERMS: 1 or 2
//            WORK_TYPE (qkv), GATE_TYPE (decay, beta): float, float16, bfloat16
//            IS_PACKED: whether qkv takes the widest accesses (numeric_types.cuh); SHARED_BYTES of a block
// BLOCK      256 threads: half of the warps for KK and what follows, half for QK
// GRID       slab_chunks * num_key_heads * ceil(group_size / 2) + 1: a block for each two value heads of a key head, which
//            are neighbours; the first of them writes keys and queries. The last block keeps the grid from ending before the
//            one in front
// SHAPES     qkv_conv_output [total_seq_len, conv_dim]; decay_per_token, beta_per_token [total_seq_len, num_value_heads];
//            chunk_plan, slab: chunk_workspace.cuh. The slab has the chunks of the plan's places from first_place on.
// MUTATES    slab
// OVERLAP    may begin before the grid in front has ended, which is the walk over another slab: this one is free, as that walk
//            began behind the one over it
#include "chunk_workspace.cuh"
#include "chunk_solver.cuh"
#include "gated_delta_step.cuh"
#include "grid_order.cuh"

constexpr int NUM_THREADS = 256;
constexpr int STRIPS = CHUNK_LEN / 16;  // of 16 tokens
constexpr int SCORE_TILES = CHUNK_LEN / 8;
constexpr int HEADS_AT_ONCE = 2;
constexpr int GATES_STRIP = STRIPS == 4 ? 0 : 3;  // warps of it make the gates: they have the fewest products, or none
constexpr int LANES_OF_TOKEN = OPERANDS == 1 && CHUNK_LEN == 64 && PADDED_KEY_DIM <= 128 ? 4 : 8;  // that share its key
constexpr int PIECES_OF_LANE = PADDED_KEY_DIM / 8 / LANES_OF_TOKEN;

// Of a token: what is left of the inverse norms. A key that is not finite has NaN here.
struct TokenNorms {
    float key[CHUNK_LEN];
    float query[CHUNK_LEN];
};

// Of a chunk and a value head, what A and the scores are made from.
struct Gates {
    float log_decay[CHUNK_LEN];  // G_i
    int last_zero[CHUNK_LEN];    // the last token up to i whose decay is 0, -1 if none
    float beta[CHUNK_LEN];
    float key[CHUNK_LEN];        // r_i
    int score_power;
    int solve_power;
};

// Tiles of keys and queries; when these are multiplied, solvers and scores take their place.
constexpr int TILES_BYTES = max_of(KEY_HEAD_BYTES, HEADS_AT_ONCE * 2 * OPERANDS * SCORE_TERM_BYTES);
struct Shared {
    alignas(16) unsigned char tiles[TILES_BYTES];
    Triangle triangles[HEADS_AT_ONCE];
    Gates gates[HEADS_AT_ONCE];
    TokenNorms norms;

    __device__ __forceinline__ unsigned char* solver(int head) { return tiles + head * 2 * OPERANDS * SCORE_TERM_BYTES; }
    __device__ __forceinline__ unsigned char* scores(int head) { return solver(head) + OPERANDS * SCORE_TERM_BYTES; }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES");

// ---- Keys and queries ----

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __uint_as_float(0x7F800000u); }

__device__ __forceinline__ float add_across_lanes_of_token(float value) {
    #pragma unroll
    for (int distance = 1; distance < LANES_OF_TOKEN; distance *= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    return value;
}

// 8 values, each rounded to a term, and what that leaves over to the next. `global`: nullptr where it is not needed.
__device__ __forceinline__ void store_piece(
    const float (&values)[8], unsigned char* shared, unsigned char* global, int offset) {
    unsigned int words[OPERANDS][4];
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[0][i] = float16_pair(values[2 * i], values[2 * i + 1]);
        if constexpr (OPERANDS == 2) words[1][i] = left_over(values[2 * i], values[2 * i + 1], words[0][i]);
    }
    #pragma unroll
    for (int term = 0; term < OPERANDS; ++term) {
        const uint4 pack = make_uint4(words[term][0], words[term][1], words[term][2], words[term][3]);
        *reinterpret_cast<uint4*>(shared + term * KEY_TERM_BYTES + offset) = pack;
        if (global != nullptr) *reinterpret_cast<uint4*>(global + term * KEY_TERM_BYTES + offset) = pack;
    }
}

constexpr int TOKENS_AT_ONCE = NUM_THREADS / LANES_OF_TOKEN;
constexpr int PASSES = CHUNK_LEN / TOKENS_AT_ONCE;

// The keys, or the queries, of the chunk's tokens as they lie in memory: what a lane has of them.
struct RawRows {
    Run<WORK_TYPE, 8, IS_PACKED> runs[PASSES][PIECES_OF_LANE];

    __device__ __forceinline__ void load(
        const WORK_TYPE* source, long long token_stride, long long channel_stride, int length) {
        const int lane = static_cast<int>(threadIdx.x) % LANES_OF_TOKEN;
        const int token = static_cast<int>(threadIdx.x) / LANES_OF_TOKEN;
        const WORK_TYPE* const first = source + token * token_stride + lane * 8 * channel_stride;
        #pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            #pragma unroll
            for (int i = 0; i < PIECES_OF_LANE; ++i) {
                runs[pass][i] = {};
                if (token + pass * TOKENS_AT_ONCE < length && (i * LANES_OF_TOKEN + lane) * 8 < KEY_HEAD_DIM)
                    runs[pass][i].load(first + pass * TOKENS_AT_ONCE * token_stride + i * LANES_OF_TOKEN * 8 * channel_stride,
                                       channel_stride);
            }
    }
};

// Bring raw rows into their tiles, and leave what remains of their inverse norms.
__device__ __forceinline__ void make_tiles(
    const RawRows& rows, unsigned char* shared, unsigned char* global, float* norms) {
    const int lane = static_cast<int>(threadIdx.x) % LANES_OF_TOKEN;
    #pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
        float values[PIECES_OF_LANE][8];
        float sum = 0.0f;
        #pragma unroll
        for (int i = 0; i < PIECES_OF_LANE; ++i)
            #pragma unroll
            for (int j = 0; j < 8; ++j) {
                values[i][j] = rows.runs[pass][i][j];
                sum = fmaf(values[i][j], values[i][j], sum);
            }
        sum = add_across_lanes_of_token(sum);
        const int power = exponent_of(sum) >> 1;  // rounded down
        const float scale = whole_power(-power);
        float left = sum == 0.0f ? 0.0f : whole_power(power) * inverse_norm(sum);  // of 0 it would decide all powers
        if (__any_sync(0xFFFFFFFFu, !is_finite(sum))) {
            // A sum of finite squares that overflowed makes the inverse norm 0; anything else makes it NaN.
            float rest = 0.0f;
            #pragma unroll
            for (int i = 0; i < PIECES_OF_LANE; ++i)
                #pragma unroll
                for (int j = 0; j < 8; ++j) {
                    rest += values[i][j] * 0.0f;
                    if (!is_finite(sum)) values[i][j] = 0.0f;
                }
            rest = add_across_lanes_of_token(rest);
            if (!is_finite(sum)) left = rest;
        }
        const int token = pass * TOKENS_AT_ONCE + static_cast<int>(threadIdx.x) / LANES_OF_TOKEN;
        #pragma unroll
        for (int i = 0; i < PIECES_OF_LANE; ++i) {
            #pragma unroll
            for (int j = 0; j < 8; ++j) values[i][j] *= scale;
            store_piece(values[i], shared, global, key_piece_offset(token, i * LANES_OF_TOKEN + lane));
        }
        if (lane == 0) norms[token] = left;
    }
}

// The products of 16 rows of the left tiles with all rows of the key tiles up to the last of those 16.
__device__ __forceinline__ void multiply_tiles(
    float (&products)[SCORE_TILES][4], const unsigned char* left_tiles, const unsigned char* keys, int strip) {
    #pragma unroll
    for (int i = 0; i < SCORE_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < 4; ++j) products[i][j] = 0.0f;
    const int lane = lane_in_turn(strip);
    const int left_offset = column_first_offset<KEY_ROW_BYTES>(lane), right_offset = row_first_offset<KEY_ROW_BYTES>(lane);
    #pragma unroll 2  // more would take too many registers
    for (int step = 0; step < PADDED_KEY_DIM / 16; ++step) {
        const int tile = step / 4 * KEY_TILE_BYTES;
        LeftOperand<OPERANDS> left;
        load_block<KEY_ROW_BYTES>(left, left_tiles + tile, KEY_TERM_BYTES, 16 * strip, step % 4 * 2, left_offset);
        #pragma unroll
        for (int other = 0; other < STRIPS; ++other) {
            if (other > strip) continue;
            RightOperands<OPERANDS> right;
            load_rows<KEY_ROW_BYTES>(right, keys + tile, KEY_TERM_BYTES, 16 * other, step % 4 * 2, right_offset);
            right.multiply(products[2 * other], left, 0);
            right.multiply(products[2 * other + 1], left, 1);
        }
    }
}

// ---- Gates ----

constexpr int TOKENS_OF_LANE = CHUNK_LEN / 32;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// Of numbers that are neither below 0 nor NaN: their order is that of their bits.
__device__ __forceinline__ float max_across_lanes(float value) {
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(value)));
}

__device__ __forceinline__ int held_power(float largest) {
    const int power = exponent_of(largest);
    return power < -MAX_POWER ? -MAX_POWER : power;
}

// Gates of the chunk's tokens as they lie in memory: what a lane has of them, neighbouring tokens.
struct RawGates {
    float decay[TOKENS_OF_LANE];
    float beta[TOKENS_OF_LANE];

    __device__ __forceinline__ void load(
        const GATE_TYPE* decays, long long decay_token_stride, const GATE_TYPE* betas, long long beta_token_stride,
        int length) {
        #pragma unroll
        for (int i = 0; i < TOKENS_OF_LANE; ++i) {
            const int token = static_cast<int>(threadIdx.x) % 32 * TOKENS_OF_LANE + i;
            decay[i] = 1.0f;
            beta[i] = 0.0f;
            if (token < length) {
                decay[i] = to_float(decays[token * decay_token_stride]);
                beta[i] = to_float(betas[token * beta_token_stride]);
            }
        }
    }

    // Until make_gates, which has them replaced: products in between need the registers.
    __device__ __forceinline__ void leave_in(Gates& gates) const {
        #pragma unroll
        for (int i = 0; i < TOKENS_OF_LANE; ++i) {
            const int token = static_cast<int>(threadIdx.x) % 32 * TOKENS_OF_LANE + i;
            gates.log_decay[token] = decay[i];
            gates.beta[token] = beta[i];
        }
    }
};

// One warp makes the gates and scalars of a value head, each lane from raw gates that it left.
__device__ __forceinline__ void make_gates(const TokenNorms& norms, Gates& gates, ChunkScalars& scalars) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float sums[TOKENS_OF_LANE], keys[TOKENS_OF_LANE], betas[TOKENS_OF_LANE];
    int zeros[TOKENS_OF_LANE];
    float sum = 0.0f;
    int zero = -1;
    unsigned int num_bad = 0;  // CHUNK_LEN minus the first token that is not finite
    #pragma unroll
    for (int i = 0; i < TOKENS_OF_LANE; ++i) {
        const int token = lane * TOKENS_OF_LANE + i;
        float decay = gates.log_decay[token];
        float beta = gates.beta[token];
        float key = norms.key[token];
        // A decay below 0 has no logarithm.
        if (!is_finite(key) || !is_finite(beta) || !is_finite(decay) || decay < 0.0f) {
            num_bad = max(num_bad, static_cast<unsigned int>(CHUNK_LEN - token));
            decay = 1.0f;
            beta = 0.0f;
            key = 0.0f;
        }
        const bool is_zero = decay < SMALLEST_NORMAL;
        sum += is_zero ? 0.0f : log2f(decay);
        if (is_zero) zero = token;
        sums[i] = sum;
        zeros[i] = zero;
        keys[i] = key;
        betas[i] = beta;
    }
    // From lane to lane: what the lanes before add up to.
    float before = sum;
    int zero_before = zero;
    #pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const float added = __shfl_sync(0xFFFFFFFFu, before, lane - distance);
        const int found = __shfl_sync(0xFFFFFFFFu, zero_before, lane - distance);
        if (lane >= distance) {
            before += added;
            zero_before = max(zero_before, found);
        }
    }
    const float total = __shfl_sync(0xFFFFFFFFu, before, 31);
    const int last_zero = __shfl_sync(0xFFFFFFFFu, zero_before, 31);
    before = __shfl_sync(0xFFFFFFFFu, before, lane - 1);
    zero_before = __shfl_sync(0xFFFFFFFFu, zero_before, lane - 1);
    float updates[TOKENS_OF_LANE];
    float largest_update = 0.0f, largest_key = 0.0f, largest_beta = 0.0f;
    #pragma unroll
    for (int i = 0; i < TOKENS_OF_LANE; ++i) {
        const int token = lane * TOKENS_OF_LANE + i;
        if (lane > 0) {
            sums[i] += before;
            zeros[i] = max(zeros[i], zero_before);
        }
        updates[i] = last_zero <= token ? power_of_two(total - sums[i]) * keys[i] : 0.0f;
        largest_update = max(largest_update, updates[i]);
        largest_key = max(largest_key, keys[i]);
        largest_beta = max(largest_beta, fabsf(betas[i]));
    }
    const int update_power = held_power(max_across_lanes(largest_update));
    const int score_power = held_power(max_across_lanes(largest_key));
    const int solve_power = held_power(max_across_lanes(largest_beta));
    const int num_good = CHUNK_LEN - static_cast<int>(__reduce_max_sync(0xFFFFFFFFu, num_bad));
    const float root = __fsqrt_rn(static_cast<float>(KEY_HEAD_DIM));
    #pragma unroll
    for (int i = 0; i < TOKENS_OF_LANE; ++i) {
        const int token = lane * TOKENS_OF_LANE + i;
        gates.log_decay[token] = sums[i];
        gates.last_zero[token] = zeros[i];
        gates.beta[token] = betas[i];
        gates.key[token] = keys[i];
        const float decayed = zeros[i] < 0 ? power_of_two(sums[i]) : 0.0f;
        scalars.decayed[token] = decayed * whole_power(-score_power - solve_power);
        scalars.decayed_key[token] = -decayed * keys[i];
        scalars.query[token] = __fdiv_rn(norms.query[token], root) * whole_power(score_power + solve_power);
        scalars.update[token] = updates[i] * whole_power(solve_power);
    }
    if (lane < ChunkScalars::NUM_UNUSED) scalars.unused[lane] = 0;  // they are copied with the others
    if (lane == 0) {
        gates.score_power = score_power;
        gates.solve_power = solve_power;
        scalars.decay = last_zero < 0 ? power_of_two(total) : 0.0f;
        const float first_decay = zeros[0] < 0 ? power_of_two(sums[0]) : 0.0f;
        scalars.update_power = update_power + solve_power;
        scalars.num_good = num_good;
        scalars.first_decay = first_decay;
        scalars.is_plain = num_good == CHUNK_LEN && first_decay >= ChunkScalars::LEAST_DECAY &&
                           update_power + solve_power >= ChunkScalars::LEAST_UPDATE_POWER;
    }
}

// ---- A and the scores, from the products that a warp holds ----

// The two rows that a lane has of a strip of products: row lane / 4 and the eighth after it.
struct ProductRow {
    int token;
    int last_zero;
    float log_decay;

    __device__ __forceinline__ ProductRow(const Gates& gates, int strip, int half)
        : token(16 * strip + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4),
          last_zero(gates.last_zero[token]),
          log_decay(gates.log_decay[token]) {}

    // product * exp(G_i - G_j) * factor, i being the row, where j is not before the last zero and before `end`; else 0.
    // Without branches: the power may overflow where it does not count.
    __device__ __forceinline__ float entry(float product, float other_log_decay, float factor, int j, int end) const {
        const float value = product * (power_of_two(log_decay - other_log_decay) * factor);
        return j >= last_zero && j < end ? value : 0.0f;
    }
};

// The two numbers that a lane needs of `values` for its columns of a tile.
__device__ __forceinline__ float2 of_columns(const float* values, int tile) {
    return *reinterpret_cast<const float2*>(values + 8 * tile + static_cast<int>(threadIdx.x) % 4 * 2);
}

__device__ __forceinline__ void make_scores(
    const float (&products)[SCORE_TILES][4], int strip, const Gates& gates, unsigned char* scores, int lane) {
    const float unit = whole_power(-gates.score_power);
    const ProductRow rows[2] = {ProductRow(gates, strip, 0), ProductRow(gates, strip, 1)};
    #pragma unroll
    for (int tile = 0; tile < SCORE_TILES; ++tile) {
        const int j = 8 * tile + lane % 4 * 2;
        float entries[2][2] = {};
        if (tile / 2 <= strip) {
            const float2 log_decay = of_columns(gates.log_decay, tile);
            const float2 key = of_columns(gates.key, tile);
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const ProductRow& row = rows[half];
                entries[half][0] = row.entry(products[tile][2 * half], log_decay.x, key.x * unit, j, row.token + 1);
                entries[half][1] = row.entry(products[tile][2 * half + 1], log_decay.y, key.y * unit, j + 1, row.token + 1);
            }
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            store_score_pair(scores, 16 * strip + 8 * half, lane / 4, tile, lane % 4, entries[half][0], entries[half][1]);
    }
}

__device__ __forceinline__ void make_triangle(
    const float (&products)[SCORE_TILES][4], int strip, const Gates& gates, Triangle& triangle, int lane) {
    const ProductRow rows[2] = {ProductRow(gates, strip, 0), ProductRow(gates, strip, 1)};
    const float factors[2] = {gates.beta[rows[0].token] * gates.key[rows[0].token],
                              gates.beta[rows[1].token] * gates.key[rows[1].token]};
    #pragma unroll
    for (int tile = 0; tile < SCORE_TILES; ++tile) {
        if (tile / 2 > strip) continue;
        const int j = 8 * tile + lane % 4 * 2;
        const float2 log_decay = of_columns(gates.log_decay, tile);
        const float2 key = of_columns(gates.key, tile);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const ProductRow& row = rows[half];
            triangle.store_pair(
                strip, tile / 2, 8 * half + lane / 4, tile % 2, lane % 4,
                row.entry(products[tile][2 * half], log_decay.x, key.x * factors[half], j, row.token),
                row.entry(products[tile][2 * half + 1], log_decay.y, key.y * factors[half], j + 1, row.token));
        }
    }
}

// Solvers or scores of the heads from shared memory to the slab.
__device__ __forceinline__ void copy_tiles(
    const unsigned char* shared, unsigned char* global, int first_thread, int num_threads) {
    for (int i = static_cast<int>(threadIdx.x) - first_thread; i < OPERANDS * SCORE_TERM_BYTES / 16; i += num_threads)
        reinterpret_cast<uint4*>(global)[i] = reinterpret_cast<const uint4*>(shared)[i];
}

// Of a multiprocessor; raw rows of wide keys are too many registers for three.
constexpr int BLOCKS_AT_ONCE = SHARED_BYTES <= 75 * 1024 && KEY_HEAD_DIM <= 128 ? 3 : 2;

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_AT_ONCE) gated_delta_chunk_prepare(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    const GATE_TYPE* __restrict__ decay_per_token, long long decay_token_stride, long long decay_head_stride,
    const GATE_TYPE* __restrict__ beta_per_token, long long beta_token_stride, long long beta_head_stride,
    const unsigned int* __restrict__ chunk_plan, unsigned char* __restrict__ slab, long long first_place,
    long long slab_chunks, long long max_chunks, long long num_key_heads, long long group_size) {
    Shared& shared = *reinterpret_cast<Shared*>(launch_shared_memory<SHARED_BYTES>());
    const ChunkPlan plan = {chunk_plan, max_chunks};
    const ChunkSlab out = {slab, num_key_heads, group_size};
    const unsigned int pairs = (static_cast<unsigned int>(group_size) + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE;
    const unsigned int first_head = blockIdx.x % pairs * HEADS_AT_ONCE;  // of the group
    const unsigned int key_head = blockIdx.x / pairs % static_cast<unsigned int>(num_key_heads);
    const unsigned int in_slab = blockIdx.x / pairs / static_cast<unsigned int>(num_key_heads);
    const unsigned int place = static_cast<unsigned int>(first_place) + in_slab;
    let_next_grid_begin();
    if (in_slab >= slab_chunks) return wait_for_grid_before();
    if (place >= plan.num_chunks()) return;
    const unsigned int chunk = plan.chunk_at(place);
    const long long token = plan.chunk(chunk).token;
    const int length = static_cast<int>(plan.chunk(chunk).length);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int strip = warp % 4;
    const bool multiplies_queries = warp >= 4;
    const bool multiplies = strip < STRIPS;
    const int gates_head = strip == GATES_STRIP ? warp / 4 : HEADS_AT_ONCE;  // whose gates the warp makes, if there is one

    unsigned char* const queries = shared.tiles + OPERANDS * KEY_TERM_BYTES;
    unsigned char* const key_out = first_head == 0 ? out.key_head(in_slab, key_head) : nullptr;
    const int num_heads = min(static_cast<int>(group_size - first_head), HEADS_AT_ONCE);
    const long long first_value_head = key_head * group_size + first_head;
    const auto head_out = [&](int head) { return out.value_head(in_slab, first_value_head + head); };

    // Every load is under way before the first value is used.
    const WORK_TYPE* const query = qkv_conv_output + token * qkv_token_stride + key_head * KEY_HEAD_DIM * qkv_channel_stride;
    RawRows key_rows, query_rows;
    key_rows.load(query + num_key_heads * KEY_HEAD_DIM * qkv_channel_stride, qkv_token_stride, qkv_channel_stride, length);
    query_rows.load(query, qkv_token_stride, qkv_channel_stride, length);
    RawGates raw_gates;
    if (gates_head < num_heads) {
        const long long head = first_value_head + gates_head;
        raw_gates.load(decay_per_token + token * decay_token_stride + head * decay_head_stride, decay_token_stride,
                       beta_per_token + token * beta_token_stride + head * beta_head_stride, beta_token_stride, length);
    }
    make_tiles(key_rows, shared.tiles, key_out, shared.norms.key);
    make_tiles(query_rows, queries, key_out == nullptr ? nullptr : key_out + OPERANDS * KEY_TERM_BYTES,
               shared.norms.query);
    if (gates_head < num_heads) raw_gates.leave_in(shared.gates[gates_head]);
    __syncthreads();
    float products[SCORE_TILES][4];
    if (multiplies) multiply_tiles(products, multiplies_queries ? queries : shared.tiles, shared.tiles, strip);

    if (gates_head < num_heads)
        make_gates(shared.norms, shared.gates[gates_head],
                   *reinterpret_cast<ChunkScalars*>(head_out(gates_head) + SCALARS_OFFSET));
    __syncthreads();  // now the tiles of keys and queries are free
    for (int head = 0; head < num_heads && multiplies; ++head) {
        const Gates& gates = shared.gates[head];
        const int lane = lane_in_turn(head);
        if (multiplies_queries) make_scores(products, strip, gates, shared.scores(head), lane);
        if (!multiplies_queries) make_triangle(products, strip, gates, shared.triangles[head], lane);
    }
    __syncthreads();
    if (warp < 4) {
        const int block = static_cast<int>(threadIdx.x) / 16;  // a half-warp each
        const int head = block / STRIPS;
        if (head < num_heads) invert_block(shared.triangles[head], block % STRIPS);
    } else {
        for (int head = 0; head < num_heads; ++head)
            copy_tiles(shared.scores(head), head_out(head) + OPERANDS * SCORE_TERM_BYTES, 128, 128);
    }
    __syncthreads();
    const int head = warp / STRIPS;
    if (head < num_heads) {
        const Gates& gates = shared.gates[head];
        solve_column(shared.triangles[head], warp % STRIPS, gates.beta, whole_power(-gates.solve_power),
                     shared.solver(head));
    }
    __syncthreads();
    for (int i = 0; i < num_heads; ++i) copy_tiles(shared.solver(i), head_out(i), 0, NUM_THREADS);
}
