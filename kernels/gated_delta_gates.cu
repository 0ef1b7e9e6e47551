// gated_delta_gates: decay and step size of every token and value head, from the projections of a model.
//
//   decay[t,h] = exp(-exp(A_log[h]) softplus(a[t,h] + dt_bias[h]))      softplus(x) = log(1 + exp(x)), x itself above 20
//   beta[t,h]  = 1 / (1 + exp(-b[t,h])), twice that with allow_neg_eigval
//
// MACROS     INPUT_TYPE (a, b), RATE_TYPE (A_log), BIAS_TYPE (dt_bias): float, float16, bfloat16
// BLOCK      256 threads, a token and value head each
// GRID       ceil(total_seq_len * num_value_heads / 256) blocks
// SHAPES     a, b, decay, beta [total_seq_len, num_value_heads]; A_log, dt_bias [num_value_heads]. Strides in elements.
// MUTATES    decay, beta
// CALLER     guarantees that these overlap nothing.
#include "numeric_types.cuh"

// exp(A_log) softplus(step). Far below 0 softplus is an exponential too: there one exponential of the sum can be right
// where of two factors one vanishes and the other is infinite.
__device__ __forceinline__ float negative_log_decay(float A_log, float step) {
    if (step < -20.0f) return expf(__fadd_rn(A_log, step));
    return __fmul_rn(expf(A_log), step > 20.0f ? step : log1pf(expf(step)));
}

extern "C" __global__ void __launch_bounds__(256) gated_delta_gates(
    const INPUT_TYPE* __restrict__ a, long long a_token_stride, long long a_head_stride,
    const INPUT_TYPE* __restrict__ b, long long b_token_stride, long long b_head_stride,
    const RATE_TYPE* __restrict__ A_log, long long A_log_stride,
    const BIAS_TYPE* __restrict__ dt_bias, long long dt_bias_stride,
    float* __restrict__ decay, long long decay_token_stride, long long decay_head_stride,
    float* __restrict__ beta, long long beta_token_stride, long long beta_head_stride,
    long long total_seq_len, long long num_value_heads, long long allow_neg_eigval) {
    const long long place = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (place >= total_seq_len * num_value_heads) return;
    const long long token = place / num_value_heads;
    const long long head = place % num_value_heads;

    const float step = __fadd_rn(to_float(a[token * a_token_stride + head * a_head_stride]),
                                 to_float(dt_bias[head * dt_bias_stride]));
    const float log_rate = to_float(A_log[head * A_log_stride]);
    decay[token * decay_token_stride + head * decay_head_stride] = expf(-negative_log_decay(log_rate, step));

    const float logit = to_float(b[token * b_token_stride + head * b_head_stride]);
    const float sigmoid = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-logit)));
    beta[token * beta_token_stride + head * beta_head_stride] = allow_neg_eigval != 0 ? 2.0f * sigmoid : sigmoid;
}
