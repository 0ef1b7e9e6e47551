"""The CPU stand-in for CUDA, on tiny kernels of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gdn.backends import host
from gdn.backends.launch import Kernel
from gdn.errors import DeviceError

pytestmark = pytest.mark.skipif(
    host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}"
)

SEEDS = range(1, 9)


@pytest.fixture(autouse=True, scope="module")
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One empty cache for the kernels of this file, in a folder with a space and letters outside ASCII."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDN_CACHE_DIR", str(tmp_path_factory.mktemp("the cäche ☃")))
        yield


def description(*kinds: str) -> Kernel:
    return Kernel("kernel", tuple((f"parameter_{i}", kind) for i, kind in enumerate(kinds)))


def compiled(text: str, *kinds: str, defines: tuple[str, ...] = ()) -> host.Library:
    """The kernel `kernel` of `text`, whose parameters are of these kinds."""
    return host.build(description(*kinds), text, defines)


def run(library: host.Library, num_blocks: int, threads_per_block: int, *arguments: Any) -> None:
    addresses = [value.ctypes.data if isinstance(value, np.ndarray) else value for value in arguments]
    library.launch(num_blocks, threads_per_block, addresses)


# ---- Threads, blocks and the built-in variables ----


def test_every_thread_knows_its_place() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(unsigned int* places) {
            unsigned int* place = places + 4 * (blockIdx.x * blockDim.x + threadIdx.x);
            place[0] = blockIdx.x;
            place[1] = threadIdx.x;
            place[2] = gridDim.x * gridDim.y * gridDim.z;
            place[3] = blockDim.x + blockIdx.y + threadIdx.z;
        }""",
        "pointer",
    )
    places = np.zeros((5, 70, 4), np.uint32)
    run(library, 5, 70, places)
    block_idx, thread_idx = np.indices((5, 70), dtype=np.uint32)
    np.testing.assert_array_equal(places[..., 0], block_idx)
    np.testing.assert_array_equal(places[..., 1], thread_idx)
    np.testing.assert_array_equal(places[..., 2], 5)
    np.testing.assert_array_equal(places[..., 3], 70)


@pytest.mark.parametrize("threads_per_block", [0, 1025])
def test_block_size_out_of_range_is_refused(threads_per_block: int) -> None:
    library = compiled('extern "C" __global__ void kernel() {}')
    with pytest.raises(DeviceError, match=f"expected 1 to 1024, got {threads_per_block}"):
        run(library, 1, threads_per_block)


def test_parameters_arrive_in_full_width() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(long long low, long long high, long long* out) {
            out[0] = low;
            out[1] = high;
        }""",
        *("int64", "int64", "pointer"),
    )
    out = np.zeros(2, np.int64)
    run(library, 1, 1, -(2**63), 2**63 - 1, out)
    assert out.tolist() == [-(2**63), 2**63 - 1]


def test_declared_parameters_are_held_against_the_compiled_ones() -> None:
    text = 'extern "C" __global__ void kernel(float*, long long, float*) {}'
    compiled(text, "pointer", "int64", "pointer")
    for kinds in (("pointer", "pointer", "int64"), ("pointer", "int64"), ("int64", "int64", "pointer")):
        with pytest.raises(TypeError, match=r"compiled \(pointer, int64, pointer\)"):
            compiled(text, *kinds)
    for narrow in ("float", "unsigned int"):
        with pytest.raises(TypeError, match="unknown"):
            compiled(f'extern "C" __global__ void kernel({narrow}) {{}}', "int64")


# ---- Barriers ----

SHIFT = """
template <int LENGTH>  // shared memory inside a template is one variable per instance
__device__ void shift(const float* values, float* shifted) {
    __shared__ float shared[LENGTH];
    shared[threadIdx.x] = values[threadIdx.x];
    BARRIER;
    shifted[threadIdx.x] = shared[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}
extern "C" __global__ void kernel(const float* values, float* shifted) { shift<96>(values, shifted); }
"""


@pytest.mark.parametrize("defines", [(), ("-DGDN_USE_UCONTEXT",)], ids=["assembly", "ucontext"])
def test_barrier_holds_in_every_order(defines: tuple[str, ...]) -> None:
    library = compiled(SHIFT, "pointer", "pointer", defines=("-DBARRIER=__syncthreads()", *defines))
    values = np.arange(96, dtype=np.float32)
    for seed in (0, *SEEDS):
        shifted = np.full(96, np.nan, np.float32)
        with host.options(order_seed=seed):
            run(library, 1, 96, values, shifted)
        np.testing.assert_array_equal(shifted[1:], values[:-1])


def test_missing_barrier_shows_in_a_seeded_order() -> None:
    library = compiled(SHIFT, "pointer", "pointer", defines=("-DBARRIER=",))
    values = np.arange(96, dtype=np.float32)
    wrong = []
    for seed in (0, *SEEDS):
        shifted = np.full(96, np.nan, np.float32)
        with host.options(order_seed=seed):
            run(library, 1, 96, values, shifted)
        wrong.append(not np.array_equal(shifted[1:], values[:-1]))
    assert not wrong[0], "plain order is meant to hide this fault"
    assert any(wrong[1:])


def test_order_is_drawn_anew_as_a_block_proceeds() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(unsigned int* order) {
            __shared__ unsigned int num_passed;
            for (int step = 0; step < 4; ++step) {
                if (threadIdx.x == 0) num_passed = 0;
                __syncthreads();
                order[step * 64 + atomicAdd(&num_passed, 1)] = threadIdx.x;
                __syncthreads();
            }
        }""",
        "pointer",
    )
    order = np.zeros((4, 64), np.uint32)
    with host.options(order_seed=1):
        run(library, 1, 64, order)
    np.testing.assert_array_equal(np.sort(order), np.broadcast_to(np.arange(64), (4, 64)))
    assert len({tuple(step) for step in order.tolist()}) == 4


@pytest.mark.parametrize("barrier", ["__syncthreads()", "__syncwarp(); __syncthreads()"])
def test_barrier_does_not_wait_for_threads_that_returned(barrier: str) -> None:
    library = compiled(
        """extern "C" __global__ void kernel(unsigned int* out) {
            __shared__ unsigned int total;
            if (threadIdx.x == 0) total = 0;
            __syncthreads();
            if (threadIdx.x % 3 == 1 || threadIdx.x > 90) return;
            atomicAdd(&total, threadIdx.x);
            BARRIER;
            out[threadIdx.x] = total;
        }""",
        "pointer",
        defines=(f"-DBARRIER={barrier}",),
    )
    threads = np.arange(100)
    staying = (threads % 3 != 1) & (threads <= 90)
    for seed in (0, *SEEDS):
        out = np.zeros(100, np.uint32)
        with host.options(order_seed=seed):
            run(library, 1, 100, out)
        np.testing.assert_array_equal(out, np.where(staying, threads[staying].sum(), 0))


# ---- Warp collectives ----

SHUFFLES = """
extern "C" __global__ void kernel(float* floats, int* ints, unsigned int* votes) {
    const unsigned int lane = threadIdx.x % 32;
    const float value = threadIdx.x + 0.5f;
    float* row = floats + threadIdx.x * 6;
    row[0] = __shfl_sync(0xffffffffu, value, 5);
    row[1] = __shfl_sync(0xffffffffu, value, lane + 1, 8);
    row[2] = __shfl_xor_sync(0xffffffffu, value, 16);
    row[3] = __shfl_xor_sync(0xffffffffu, value, 3, 4);
    row[4] = __shfl_down_sync(0xffffffffu, value, 4);
    row[5] = __shfl_down_sync(0xffffffffu, value, 3, 16);
    // Two half warps that go different ways.
    const unsigned int half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    ints[threadIdx.x] = lane < 16 ? __shfl_xor_sync(half, -static_cast<int>(threadIdx.x), 1)
                                  : __shfl_down_sync(half, static_cast<int>(threadIdx.x), 1);
    votes[threadIdx.x * 5] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    votes[threadIdx.x * 5 + 1] = __any_sync(0xffffffffu, threadIdx.x == 40);
    votes[threadIdx.x * 5 + 2] = __ballot_sync(half, lane % 2);
    votes[threadIdx.x * 5 + 3] = __reduce_max_sync(0xffffffffu, 0x80000000u + (threadIdx.x * 7) % 64);
    votes[threadIdx.x * 5 + 4] = __reduce_max_sync(half, threadIdx.x);
}
"""


def expected_shuffles(thread: int) -> list[float]:
    warp, lane = thread - thread % 32, thread % 32
    sources = [
        5,
        lane // 8 * 8 + (lane + 1) % 8,
        lane ^ 16,
        lane ^ 3,
        lane + 4 if lane + 4 < 32 else lane,
        lane + 3 if lane % 16 + 3 < 16 else lane,
    ]
    return [warp + source + 0.5 for source in sources]


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_shuffles_and_votes(seed: int) -> None:
    library = compiled(SHUFFLES, "pointer", "pointer", "pointer")
    floats = np.zeros((64, 6), np.float32)
    ints = np.zeros(64, np.int32)
    votes = np.zeros((64, 5), np.uint32)
    with host.options(order_seed=seed):
        run(library, 1, 64, floats, ints, votes)
    threads = np.arange(64)
    lanes = threads % 32
    np.testing.assert_array_equal(floats, [expected_shuffles(thread) for thread in range(64)])
    np.testing.assert_array_equal(
        ints, np.where(lanes < 16, -(threads ^ 1), np.where(lanes < 31, threads + 1, threads))
    )
    np.testing.assert_array_equal(votes[:, 0], sum(1 << lane for lane in range(0, 32, 3)))
    np.testing.assert_array_equal(votes[:, 1], threads >= 32)
    np.testing.assert_array_equal(votes[:, 2], np.where(lanes < 16, 0x0000AAAA, 0xAAAA0000))
    largest = [max(7 * thread % 64 for thread in range(warp, warp + 32)) for warp in (0, 32)]
    np.testing.assert_array_equal(votes[:, 3], 2**31 + np.repeat(largest, 32))
    np.testing.assert_array_equal(votes[:, 4], threads | 15)


def test_a_warp_that_the_block_does_not_fill_shuffles_with_a_full_mask() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(float* out) {
            float sum = 1.0f;
            for (int distance = 1; distance < 8; distance *= 2)
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            out[threadIdx.x] = sum;
            out[threadIdx.x + 40] = __shfl_sync(0xffffffffu, sum, 20);
        }""",
        "pointer",
    )
    out = np.zeros(80, np.float32)
    run(library, 1, 40, out)
    np.testing.assert_array_equal(out[:72], 8)
    assert np.isnan(out[72:]).all(), "lane 20 of the second warp does not exist"


MISUSES = {
    "half a warp in a shuffle, half at the barrier": (
        "if (threadIdx.x < 16) __shfl_sync(0xffffffffu, 1.0f, 0); __syncthreads();",
        "thread 0 waits in __shfl_sync with mask 0xffffffff for lanes 0xffff0000 of its warp, "
        "of which 0x00000000 have returned; 48 threads wait in __syncthreads",
    ),
    "half a warp in a shuffle, half returned": (
        "if (threadIdx.x % 32 < 16) __shfl_xor_sync(0xffffffffu, 1.0f, 1); else return;",
        "lanes 0xffff0000 of its warp, of which 0xffff0000 have returned",
    ),
    "half a warp in a shuffle, half in a vote": (
        "if (threadIdx.x % 2) __shfl_down_sync(0xffffffffu, 1, 1); else __ballot_sync(0xffffffffu, 1);",
        "thread 0 waits in __ballot_sync with mask 0xffffffff for lanes 0xaaaaaaaa",
    ),
    "lanes of one warp that name different masks": (
        "__syncwarp(threadIdx.x == 0 ? 0x3u : 0xffffffffu);",
        "thread 0 waits in __syncwarp with mask 0x00000003 for lanes 0x00000002",
    ),
    "a mask without the lane that passes it": (
        "__any_sync(0x1u, 1);",
        "thread 1 calls __any_sync with mask 0x00000001, without its own lane",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misused_collective_is_an_error_and_no_hang(misuse: str) -> None:
    body, message = MISUSES[misuse]
    library = compiled(
        f"""extern "C" __global__ void kernel(long long misused) {{
            if (misused) {{ {body} }}
            __syncthreads();
        }}""",
        "int64",
    )
    with pytest.raises(DeviceError) as caught:
        run(library, 100, 64, 1)
    assert message in str(caught.value)
    assert str(caught.value).startswith("kernel: block 0")
    for seed in SEEDS:
        with host.options(order_seed=seed), pytest.raises(DeviceError):
            run(library, 3, 64, 1)
    run(library, 100, 64, 0)  # the abandoned fibers leave nothing behind


# ---- Shared memory, and blocks on several OS threads ----


def test_blocks_on_different_os_threads_share_nothing() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(unsigned int* out, unsigned long long* addresses) {
            __shared__ unsigned int total;
            if (threadIdx.x == 0) total = 0;
            __syncthreads();
            for (int i = 0; i < 2000; ++i) {
                if (threadIdx.x == i % 32) total += blockIdx.x;
                __syncthreads();
            }
            out[blockIdx.x] = total;
            addresses[blockIdx.x] = reinterpret_cast<unsigned long long>(&total);
        }""",
        *("pointer", "pointer"),
    )
    for max_os_threads in (1, 3):
        out = np.zeros(60, np.uint32)
        addresses = np.zeros(60, np.uint64)
        with host.options(max_os_threads=max_os_threads):
            run(library, 60, 32, out, addresses)
        np.testing.assert_array_equal(out, 2000 * np.arange(60))
        assert len(np.unique(addresses)) <= max_os_threads
    assert len(np.unique(addresses)) > 1, "60 blocks of about a millisecond are worth a second OS thread"


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_every_block_runs_once(seed: int) -> None:
    library = compiled(
        """extern "C" __global__ void kernel(unsigned int* turns, unsigned int* num_blocks) {
            turns[blockIdx.x] += 1 + atomicAdd(num_blocks, 1);
        }""",
        *("pointer", "pointer"),
    )
    for num_blocks in (1, 2, 6, 1000):
        turns = np.zeros(num_blocks, np.uint32)
        with host.options(order_seed=seed, max_os_threads=1):
            run(library, num_blocks, 1, turns, np.zeros(1, np.uint32))
        np.testing.assert_array_equal(np.sort(turns), np.arange(1, num_blocks + 1))
        in_order = bool((turns[:-1] < turns[1:]).all())
        assert in_order or seed != 0
        assert not in_order or seed == 0 or num_blocks < 1000


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(float* out) {
            __shared__ float shared[32];
            out[blockIdx.x * 32 + threadIdx.x] = shared[threadIdx.x];
            shared[threadIdx.x] = 1.0f;
        }""",
        "pointer",
    )
    out = np.zeros((4, 32), np.float32)
    with host.options(max_os_threads=1):
        run(library, 4, 32, out)
    assert np.isnan(out).all()


def test_two_kernels_of_one_name_keep_apart() -> None:
    text = """
    __device__ unsigned int* counter() { static unsigned int count = 0; return &count; }
    extern "C" __global__ void kernel(unsigned int* out) { out[0] = *counter() += STEP; }
    """
    first = compiled(text, "pointer", defines=("-DSTEP=1",))
    second = compiled(text, "pointer", defines=("-DSTEP=100",))
    out = np.zeros(1, np.uint32)
    for library, expected in ((first, 1), (second, 100), (first, 2), (second, 200)):
        run(library, 1, 1, out)
        assert out[0] == expected


# ---- The other built-ins ----


def test_arithmetic_and_memory_built_ins() -> None:
    library = compiled(
        """
        struct Pair { unsigned short low, high; };
        extern "C" __global__ void kernel(const float* in, float* out, unsigned int* bits, const Pair* pair) {
            const float a = __ldg(in), b = __ldcs(in + 1), c = in[2];
            out[0] = __fadd_rn(__fmul_rn(a, b), c);
            out[1] = __fmaf_rn(a, b, c) - fmaf(a, b, c);
            out[2] = fmaf(a, b, -__fmul_rn(a, b));
            out[3] = __fdiv_rn(__fsub_rn(a, b), __fsqrt_rn(c));
            out[4] = min(a, b) + max(2, 3) + min(4u, 5) + max(-1LL, 7);
            *reinterpret_cast<float4*>(out + 8) = make_float4(a, b, c, min(__uint_as_float(0x7fc00000u), a));
            __stcs(reinterpret_cast<float2*>(out + 12), make_float2(c, a));
            bits[0] = __float_as_uint(a);
            bits[1] = __clz(1) + 100 * __clz(0) + 10000 * __clz(-1);
            bits[2] = __popc(0xf0f0u);
            bits[3] = atomicOr(bits + 4, 0x10u);
            const Pair halves = __ldg(pair);
            bits[5] = halves.low + halves.high;
            const uint4 four = make_uint4(1, 2, 3, 4);
            const uint2 two = make_uint2(5, 6);
            bits[6] = four.x + four.y + four.z + four.w + two.x + two.y + warpSize;
        }""",
        *("pointer", "pointer", "pointer", "pointer"),
    )
    a, b, c = values = np.array([1.1, -2.3, 3.7], np.float32)
    buffer = np.zeros(20, np.float32)
    out = buffer[-buffer.ctypes.data % 16 // 4 :][:16]
    bits = np.array([0, 0, 0, 0, 3, 0, 0], np.uint32)
    run(library, 1, 1, values, out, bits, np.array([7, 9], np.uint16))
    assert out[0] == a * b + c
    assert out[1] == 0
    assert out[2] == np.float32(np.float64(a) * np.float64(b) - np.float64(a * b))
    assert out[3] == (a - b) / np.sqrt(c)
    assert out[4] == b + np.float32(3) + np.float32(4) + np.float32(7)
    np.testing.assert_array_equal(out[8:14], [a, b, c, a, c, a])
    assert bits.tolist() == [int(a.view(np.uint32)), 31 + 3200, 8, 3, 0x13, 16, 53]


def test_product_and_sum_round_separately() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(const float* in, float* out) {
            out[0] = __fadd_rn(__fmul_rn(in[0], in[0]), in[1]);
            out[1] = fmaf(in[0], in[0], in[1]);
        }""",
        *("pointer", "pointer"),
    )
    out = np.zeros(2, np.float32)
    run(library, 1, 1, np.array([1 + 2**-12, -1 - 2**-11], np.float32), out)
    assert out.tolist() == [0, 2**-24]


CONVERSIONS = """
extern "C" __global__ void kernel(const unsigned short* float16, float* widened, const float* values,
                                  unsigned short* to_float16, unsigned short* to_bfloat16, long long length) {
    for (long long i = threadIdx.x; i < length; i += blockDim.x) {
        widened[i] = float16_bits_to_float(float16[i]);
        to_float16[i] = float_to_float16_bits(values[i]);
        to_bfloat16[i] = float_to_bfloat16_bits(values[i]);
    }
}
"""


def convert(values: np.ndarray[Any, Any], float16: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    library = compiled(CONVERSIONS, *["pointer"] * 5, "int64")
    widened = np.zeros(values.size, np.float32)
    narrowed = [np.zeros(values.size, np.uint16) for _ in range(2)]
    run(library, 1, 32, float16, widened, values, *narrowed, values.size)
    return [widened, *narrowed]


def assert_same_bits(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Equal bits, where every NaN counts as one: a GPU writes 0x7fff for all of them."""
    unsigned = f"u{expected.itemsize}"
    with np.errstate(invalid="ignore"):  # from signalling NaN of bfloat16
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), is_nan)
    np.testing.assert_array_equal(actual.view(unsigned)[~is_nan], expected.view(unsigned)[~is_nan])


def test_every_16_bit_pattern_comes_back() -> None:
    patterns = np.arange(65536, dtype=np.uint16)
    for dtype, place in ((np.float16, 1), (ml_dtypes.bfloat16, 2)):
        values = patterns.view(dtype).astype(np.float32)
        converted = convert(values, patterns)
        assert_same_bits(converted[0], patterns.view(np.float16).astype(np.float32))
        assert_same_bits(converted[place].view(dtype), patterns.view(dtype))
        assert (converted[place][np.isnan(values)] == 0x7FFF).all()


def test_narrowing_rounds_to_nearest_even() -> None:
    random = np.random.default_rng(3).integers(0, 2**32, 200_000, np.uint64).astype(np.uint32).view(np.float32)
    small = np.random.default_rng(4).uniform(-(2**-13), 2**-13, 50_000).astype(np.float32)
    values = [
        random,
        small,
        np.array([65504, 65519.996, 65520, 1e10, 2**-25, 2**-25 * 1.0001, 0, -0.0], np.float32),
    ]
    for dtype in (np.float16, ml_dtypes.bfloat16):
        finite = np.arange(0x7C00 if dtype is np.float16 else 0x7F7F, dtype=np.uint16)
        ties = (finite.view(dtype).astype(np.float64) + (finite + 1).view(dtype).astype(np.float64)) / 2
        ties = ties[ties < np.finfo(np.float32).max].astype(np.float32)
        values += [ties, -ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))]
    everything = np.concatenate(values)
    _, to_float16, to_bfloat16 = convert(everything, np.zeros(everything.size, np.uint16))
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(to_float16.view(np.float16), everything.astype(np.float16))
        assert_same_bits(to_bfloat16.view(ml_dtypes.bfloat16), everything.astype(ml_dtypes.bfloat16))


# ---- Copies that are not waited for, and the shared memory of a launch ----

COPY = """
extern "C" __global__ void kernel(const char* in, float* before, float* after, long long shift) {
    __shared__ float4 shared[64][2];
    float* const row = &shared[threadIdx.x][0].x;
    for (int i = 0; i < 8; ++i) row[i] = -1.0f;
    start_copy_16<0, 16>(row, in + 32 * threadIdx.x + shift);
    start_copy_16<16, 0>(row, in + 32 * threadIdx.x + shift);
    for (int i = 0; i < 8; ++i) before[8 * threadIdx.x + i] = row[i];
    WAIT;
    for (int i = 0; i < 8; ++i) after[8 * threadIdx.x + i] = row[i];
}
"""


def aligned(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy that begins on a 16-byte boundary."""
    memory = np.empty(values.size + 4, values.dtype)
    result = memory[-memory.ctypes.data % 16 // values.itemsize :][: values.size].reshape(values.shape)
    result[...] = values
    return result


def test_copies_happen_when_they_are_waited_for() -> None:
    """In plain order a kernel that forgets to wait finds what was there before; in a seeded one sometimes."""
    values = aligned(np.arange(512, dtype=np.float32).reshape(64, 2, 4))
    exchanged = values[:, ::-1].reshape(-1)
    for wait in ("wait_for_copies()", ""):
        library = compiled(COPY, *["pointer"] * 3, "int64", defines=(f"-DWAIT={wait}",))
        early = []
        for seed in (0, *SEEDS):
            before, after = np.zeros((2, 512), np.float32)
            with host.options(order_seed=seed):
                run(library, 1, 64, values, before, after, 0)
            early.append(np.mean(before != -1))
            assert (before[before != -1] == exchanged[before != -1]).all()
            np.testing.assert_array_equal(after, exchanged if wait else before)
        assert early[0] == 0
        assert all(0.25 < share < 0.75 for share in early[1:])


def test_copies_off_their_boundary_are_refused() -> None:
    library = compiled(COPY, *["pointer"] * 3, "int64", defines=("-DWAIT=wait_for_copies()",))
    values, before, after = aligned(np.zeros(516, np.float32)), *np.zeros((2, 512), np.float32)
    run(library, 1, 64, values, before, after, 16)
    for shift in (4, 8):
        with pytest.raises(DeviceError, match=r"^kernel: block 0: thread 0 starts a copy that is not aligned$"):
            run(library, 1, 64, values, before, after, shift)


def test_a_thread_has_so_many_copies_under_way() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(const float* in, long long count) {
            __shared__ float4 shared;
            for (int round = 0; round < 2; ++round) {
                for (int i = 0; i < count; ++i) start_copy_16<0, 0>(&shared, in);
                wait_for_copies();
            }
        }""",
        *("pointer", "int64"),
    )
    run(library, 1, 1, aligned(np.zeros(4, np.float32)), 256)
    with pytest.raises(DeviceError, match="thread 0 has too many copies under way"):
        run(library, 1, 1, aligned(np.zeros(4, np.float32)), 257)


BULK_COPIES = """
extern "C" __global__ void kernel(const float* in, float* out) {
    __shared__ float4 places[16];
    float* const shared = &places[0].x;
    __shared__ CopyBarrier barrier;
    if (threadIdx.x == 0) prepare_barrier(barrier);
    __syncthreads();
    for (unsigned int round = 0; round < 3; ++round) {
        if (threadIdx.x == 0) {
            expect_bytes(barrier, EXPECTED);
            start_bulk_copy(shared, in + 64 * round + SHIFT, 128, barrier);
            start_bulk_copy(shared + 32, in + 64 * round + 32, 128, barrier);
        }
        BEFORE;
        wait_for_round(barrier, PARITY);
        out[64 * round + threadIdx.x] = shared[63 - threadIdx.x];
        BEHIND;
    }
}
"""


def bulk(
    expected: int = 256,
    shift: int = 0,
    before: str = "__syncthreads()",
    parity: str = "round % 2",
    behind: str = "__syncthreads()",
) -> host.Library:
    macros = {"EXPECTED": expected, "SHIFT": shift, "BEFORE": before, "PARITY": parity, "BEHIND": behind}
    defines = tuple(f"-D{name}={value}" for name, value in macros.items())
    return compiled(BULK_COPIES, "pointer", "pointer", defines=defines)


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_bulk_copies_reach_every_thread_that_waits(seed: int) -> None:
    values = aligned(np.arange(192, dtype=np.float32))
    out = np.zeros(192, np.float32)
    with host.options(order_seed=seed):
        run(bulk(), 1, 64, values, out)
    np.testing.assert_array_equal(out.reshape(3, 64), values.reshape(3, 64)[:, ::-1])


REFUSED_ROUNDS: dict[str, dict[str, Any]] = {
    "a round that was over before": {"parity": "(round + 1) % 2"},
    "always the first round": {"parity": "0"},
    "without meeting who begins it": {"before": "if (threadIdx.x < 32) __syncwarp()"},
    "for more bytes than are copied": {"expected": 272},
    "for fewer bytes than are copied": {"expected": 128},
}


@pytest.mark.parametrize("fault", REFUSED_ROUNDS)
def test_a_wait_for_a_round_that_nobody_began_is_refused(fault: str) -> None:
    """Some order of threads shows each of them; on a GPU they are hangs, or reads of what is not yet there."""
    library = bulk(**REFUSED_ROUNDS[fault])
    messages = {message_of(library, seed) for seed in (0, *SEEDS)} - {""}
    assert {message.partition(" waits ")[2] for message in messages} == {"for a round of copies that nobody began"}


def message_of(library: host.Library, seed: int) -> str:
    """What is refused of a run of the kernel above in an order; empty where nothing is."""
    try:
        with host.options(order_seed=seed):
            run(library, 1, 64, aligned(np.zeros(192, np.float32)), np.zeros(192, np.float32))
    except DeviceError as error:
        return str(error)
    return ""


def test_a_bulk_copy_off_its_boundary_is_refused() -> None:
    with pytest.raises(DeviceError, match="thread 0 starts a copy that is not aligned"):
        run(bulk(shift=1), 1, 64, aligned(np.zeros(196, np.float32)), np.zeros(192, np.float32))


def test_the_next_round_that_overtakes_a_reader_shows_in_a_seeded_order() -> None:
    """Refused, because a thread that has yet to wait for its round finds another under way, or seen in the values."""
    values = aligned(np.arange(192, dtype=np.float32))
    library = bulk(behind="__syncwarp()")
    outs = np.zeros((len(SEEDS), 192), np.float32)
    for seed, out in zip(SEEDS, outs, strict=True):
        with host.options(order_seed=seed), suppress(DeviceError):
            run(library, 1, 64, values, out)
    assert not np.array_equal(
        outs.reshape(-1, 3, 64), np.broadcast_to(values.reshape(3, 64)[:, ::-1], (len(SEEDS), 3, 64))
    )


def test_shared_memory_of_a_launch_is_one_place_and_starts_as_nan_in_every_block() -> None:
    """More than the 48 KiB of a __shared__ variable."""
    library = compiled(
        """
        __device__ float* place() { return reinterpret_cast<float*>(launch_shared_memory<80000>()); }
        extern "C" __global__ void kernel(float* out, unsigned int* is_right) {
            float* const shared = place();
            __shared__ float other[32];
            out[blockIdx.x * 32 + threadIdx.x] = shared[19968 + threadIdx.x];
            shared[19968 + threadIdx.x] = threadIdx.x;
            other[threadIdx.x] = -1.0f;
            __syncthreads();
            const bool is_seen = place()[19968 + 31 - threadIdx.x] == 31 - threadIdx.x;
            is_right[blockIdx.x * 32 + threadIdx.x] = is_seen && reinterpret_cast<unsigned long long>(shared) % 16 == 0;
        }""",
        *("pointer", "pointer"),
    )
    for max_os_threads in (1, 3):
        out, is_right = np.zeros((6, 32), np.float32), np.zeros((6, 32), np.uint32)
        with host.options(max_os_threads=max_os_threads):
            run(library, 6, 32, out, is_right)
        assert np.isnan(out).all()
        assert is_right.all()


def test_a_load_that_is_not_wanted_reads_nothing() -> None:
    library = compiled(
        """extern "C" __global__ void kernel(const unsigned int* in, unsigned int* out) {
            out[0] = out[1] = 7;
            load_if(true, in, out[0]);
            load_if(false, reinterpret_cast<const unsigned int*>(16), out[1]);
        }""",
        *("pointer", "pointer"),
    )
    out = np.zeros(2, np.uint32)
    run(library, 1, 1, np.array([3], np.uint32), out)
    assert out.tolist() == [3, 7]


def test_reciprocal_square_root_is_as_near_as_the_gpus() -> None:
    """Within 2^-22, over the numbers that sums of squares can be."""
    library = compiled(
        """extern "C" __global__ void kernel(const float* in, float* out, long long length) {
            for (long long i = threadIdx.x; i < length; i += blockDim.x) out[i] = reciprocal_square_root(in[i]);
        }""",
        *("pointer", "pointer", "int64"),
    )
    values = np.exp(np.random.default_rng(0).uniform(np.log(1e-6), np.log(3e38), 10_000)).astype(np.float32)
    out = np.zeros_like(values)
    run(library, 1, 32, values, out, values.size)
    assert np.abs(out * np.sqrt(values.astype(np.float64)) - 1).max() <= 2**-22
    run(library, 1, 1, np.array([np.inf], np.float32), out, 1)
    assert out[0] == 0


# ---- Sanitizers ----

SANITIZED = """
import numpy as np
from gdn.backends import host
from gdn.backends.launch import Kernel
text = '''extern "C" __global__ void kernel(float* out, long long place) {
    __shared__ float shared[64];
    shared[threadIdx.x + SHARED_PLACE] = threadIdx.x;
    FIRST_BARRIER;
    out[threadIdx.x + place] = shared[63 - threadIdx.x];
    SECOND_BARRIER;
    shared[threadIdx.x] = 0;
    __syncthreads();
    reinterpret_cast<float*>(launch_shared_memory<256>())[static_cast<int>(threadIdx.x) + LAUNCH_PLACE] = 0;
}'''
kernel = Kernel("kernel", (("out", "pointer"), ("place", "int64")))
with host.options(sanitize=SANITIZE, order_seed=SEED):
    library = host.build(kernel, text, DEFINES)
    for _ in range(2):
        out = np.zeros(64, np.float32)
        library.launch(3, 64, (out.ctypes.data, OUT_PLACE))
print("finished")
"""
SANITIZERS = ("address,undefined", "thread")
RunSanitized = Callable[..., tuple[int, str]]


def sanitized_script(
    sanitize: str,
    *,
    barriers: tuple[str, str] = ("__syncthreads()", "__syncthreads()"),
    shared_place: int = 0,
    launch_place: int = 0,
    out_place: int = 0,
    seed: int = 0,
) -> tuple[str, str, str]:
    """What `run_sanitized` takes to run the kernel above."""
    first, second = barriers
    places = f"-DSHARED_PLACE={shared_place}", f"-DLAUNCH_PLACE={launch_place}"
    defines = (f"-DFIRST_BARRIER={first}", f"-DSECOND_BARRIER={second}", *places)
    constants = f"SANITIZE, SEED, DEFINES, OUT_PLACE = {sanitize!r}, {seed}, {defines!r}, {out_place}\n"
    return sanitize, "-c", constants + SANITIZED


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("seed", [0, 5])
def test_sanitizers_are_silent_about_a_right_kernel(run_sanitized: RunSanitized, sanitize: str, seed: int) -> None:
    assert run_sanitized(*sanitized_script(sanitize, seed=seed)) == (0, "finished\n")


def test_overrun_of_shared_memory_is_reported(run_sanitized: RunSanitized) -> None:
    code, output = run_sanitized(*sanitized_script("address,undefined", shared_place=1))
    assert code != 0
    assert "kernel.cu:3" in output
    assert "index 64 out of bounds" in output


@pytest.mark.parametrize("launch_place", [-1, 1])
def test_overrun_of_the_shared_memory_of_a_launch_is_reported(run_sanitized: RunSanitized, launch_place: int) -> None:
    """Its size is known to the launch alone: no bounds of an array are there to be checked."""
    code, output = run_sanitized(*sanitized_script("address,undefined", launch_place=launch_place))
    assert code != 0
    assert "use-after-poison" in output
    assert "kernel.cu:9" in output


def test_overrun_of_an_array_is_reported(run_sanitized: RunSanitized) -> None:
    code, output = run_sanitized(*sanitized_script("address,undefined", out_place=1))
    assert code != 0
    assert "heap-buffer-overflow" in output
    assert "kernel.cu:5" in output


@pytest.mark.parametrize(
    ("barriers", "line"),
    [(("", "__syncthreads()"), 3), (("__syncthreads()", ""), 7)],
    ids=["first", "second"],
)
def test_missing_barrier_is_reported_at_its_lines(
    run_sanitized: RunSanitized, barriers: tuple[str, str], line: int
) -> None:
    code, output = run_sanitized(*sanitized_script("thread", barriers=barriers))
    assert code == 66
    assert "data race" in output
    assert f"kernel.cu:{line}" in output
    assert "kernel.cu:5" in output


def test_sanitizer_without_its_runtime_is_refused() -> None:
    with host.options(sanitize="address"), pytest.raises(DeviceError, match="LD_PRELOAD"):
        compiled('extern "C" __global__ void kernel() {}')
