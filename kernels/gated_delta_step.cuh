// The per-token arithmetic of the Gated DeltaNet recurrence. Every kernel that must agree bit for bit
// with another calls these functions; none of them repeats a formula from here.
//
// For one value head, with S the state [KEY_HEAD_DIM, VALUE_HEAD_DIM] before the token, all in float32:
//
//   |x|          = sqrt(sum_k x[k]^2 + 1e-6)                        for the raw key and the raw query
//   memory[v]    = sum_k S[k,v] * key[k]                            on the old state
//   readout[v]   = sum_k S[k,v] * query[k]                          on the old state
//   delta[v]     = beta/|key| * (value[v] - decay/|key| * memory[v])        the delta factor
//   S[k,v]       = fma(key[k], delta[v], decay * S[k,v])
//   out[v]       = (decay * readout[v] + (query.key) * delta[v]) / (|query| sqrt(KEY_HEAD_DIM))
//
// This is the definition (decay, memory, delta, update, readout of the new state) with both sums moved to
// the old state, so that a token needs one reduction instead of two that wait for each other. A decay of 0 erases
// the state before the sums, so there they count as 0 even if a huge state made them overflow.
//
// THE REDUCTION TREE. Bits depend on the order of a sum, so one order serves every sum over the key head
// dimension and it is a function of KEY_HEAD_DIM alone: NUM_CHAINS chains of CHAIN_LENGTH neighbouring
// rows, each chain a product followed by fused multiply-adds in row order; then neighbouring chains are
// added in pairs, pairs of pairs, and so on. A kernel may give any power-of-two number of neighbouring
// chains to a thread and add across threads by shuffles or through shared memory: a + b = b + a, so only
// the pairing matters, and it is always the tree's.
#pragma once
#include "intrinsics.cuh"

constexpr int NUM_CHAINS = KEY_HEAD_DIM % 16 == 0 ? 16 : 8;
constexpr int CHAIN_LENGTH = KEY_HEAD_DIM / NUM_CHAINS;
constexpr float NORM_EPSILON = 1e-6f;

static_assert(KEY_HEAD_DIM % 8 == 0 && KEY_HEAD_DIM >= 8 && KEY_HEAD_DIM <= 256, "KEY_HEAD_DIM");
static_assert(VALUE_HEAD_DIM % 8 == 0 && VALUE_HEAD_DIM >= 8 && VALUE_HEAD_DIM <= 256, "VALUE_HEAD_DIM");

// What a token means to every column of a value head.
struct TokenScalars {
    float decay;
    float decay_over_key_norm;
    float beta_over_key_norm;
    float query_dot_key;
    float readout_scale;  // 1 / (|query| sqrt(KEY_HEAD_DIM))
};

// 1 / sqrt(sum_of_squares + NORM_EPSILON), within an ulp or two: the machine's estimate and one step of Newton's method.
// Root and division rounded to nearest take several times as long, and their rare cases a branch.
__device__ __forceinline__ float inverse_norm(float sum_of_squares) {
    const float square = __fadd_rn(sum_of_squares, NORM_EPSILON);
    const float estimate = reciprocal_square_root(square);
    const float error = fmaf(-__fmul_rn(square, estimate), estimate, 1.0f);
    return estimate == 0.0f ? 0.0f : fmaf(__fmul_rn(0.5f, estimate), error, estimate);  // 0 of an infinite sum
}

__device__ __forceinline__ TokenScalars token_scalars(
    float inverse_key_norm, float inverse_query_norm, float query_dot_key, float decay, float beta) {
    const float root = __fsqrt_rn(static_cast<float>(KEY_HEAD_DIM));
    return {decay, __fmul_rn(decay, inverse_key_norm), __fmul_rn(beta, inverse_key_norm), query_dot_key,
            __fmul_rn(inverse_query_norm, __fdiv_rn(1.0f, root))};
}

// A sum over the old state, memory or readout, as it counts: a decay of 0 has erased that state, even if it was so large
// that the sum overflowed.
__device__ __forceinline__ float counted_sum(float sum, float decay) { return decay == 0.0f ? 0.0f : sum; }

// `memory` and `readout` are counted sums.
__device__ __forceinline__ float delta_factor(const TokenScalars& scalars, float memory, float value) {
    return __fmul_rn(scalars.beta_over_key_norm, fmaf(-scalars.decay_over_key_norm, memory, value));
}

// The state update of a token, and of a record that a token left: raw key, delta factor, decay. In two halves, because
// the first does not wait for the token's sums.
__device__ __forceinline__ float decayed_element(float element, float decay) { return __fmul_rn(decay, element); }

__device__ __forceinline__ float updated_element(float decayed, float key, float delta) {
    return fmaf(key, delta, decayed);
}

__device__ __forceinline__ float token_readout(const TokenScalars& scalars, float readout, float delta) {
    return __fmul_rn(fmaf(scalars.query_dot_key, delta, __fmul_rn(scalars.decay, readout)), scalars.readout_scale);
}

// The part of the tree over CHAINS neighbouring chains that one thread holds: sum of left[i] * right[i].
template <int CHAINS, int FIRST_ROW = 0>
__device__ __forceinline__ float thread_dot(const float* left, const float* right) {
    if constexpr (CHAINS == 1) {
        float sum = __fmul_rn(left[FIRST_ROW], right[FIRST_ROW]);
        #pragma unroll
        for (int i = 1; i < CHAIN_LENGTH; ++i) sum = fmaf(left[FIRST_ROW + i], right[FIRST_ROW + i], sum);
        return sum;
    } else {
        return __fadd_rn(thread_dot<CHAINS / 2, FIRST_ROW>(left, right),
                         thread_dot<CHAINS / 2, FIRST_ROW + CHAINS / 2 * CHAIN_LENGTH>(left, right));
    }
}

// The same for the two sums over the old state, memory and readout, of each of the thread's columns.
// `state` is [CHAINS * CHAIN_LENGTH][COLUMNS] in registers.
template <int CHAINS, int FIRST_ROW = 0, int ROWS, int COLUMNS>
__device__ __forceinline__ void thread_sums(
    const float (&state)[ROWS][COLUMNS], const float* key, const float* query, float (&memory)[COLUMNS],
    float (&readout)[COLUMNS]) {
    if constexpr (CHAINS == 1) {
        #pragma unroll
        for (int i = 0; i < CHAIN_LENGTH; ++i) {
            const float key_row = key[FIRST_ROW + i];
            const float query_row = query[FIRST_ROW + i];
            #pragma unroll
            for (int column = 0; column < COLUMNS; ++column) {
                const float element = state[FIRST_ROW + i][column];
                memory[column] = i == 0 ? __fmul_rn(element, key_row) : fmaf(element, key_row, memory[column]);
                readout[column] = i == 0 ? __fmul_rn(element, query_row) : fmaf(element, query_row, readout[column]);
            }
        }
    } else {
        float upper_memory[COLUMNS];
        float upper_readout[COLUMNS];
        thread_sums<CHAINS / 2, FIRST_ROW>(state, key, query, memory, readout);
        thread_sums<CHAINS / 2, FIRST_ROW + CHAINS / 2 * CHAIN_LENGTH>(state, key, query, upper_memory, upper_readout);
        #pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            memory[column] = __fadd_rn(memory[column], upper_memory[column]);
            readout[column] = __fadd_rn(readout[column], upper_readout[column]);
        }
    }
}

// Levels of the tree whose branches lie `first` lanes apart, then 2 * first, ... up to below `end`.
__device__ __forceinline__ float add_across_lanes(float sum, int first, int end) {
    #pragma unroll
    for (int distance = first; distance < end; distance *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, distance));
    return sum;
}
