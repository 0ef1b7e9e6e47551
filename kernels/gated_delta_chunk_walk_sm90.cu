// gated_delta_chunk_walk_sm90: gated_delta_chunk_walk for compute capability 9.0, with the products of warpgroups.
//
// What is computed stands at the head of gated_delta_chunk_walk.cu. Here a warpgroup has 64 columns of the state, so that
// each right operand is read once for all of them, and blocks are divided into roles that meet at barriers alone:
//
//   walkers   WARPGROUPS of them, with 64 columns each: run the chunks; leave the readout in a stage of its own
//   loaders   one warp for each walker: bring what the slab has of a chunk, and the walker's values, into one of
//             WALK_STAGES stages
//   storers   one warp for each walker: write the readout to memory
//
// A walker's chain from one chunk to the next is the state as an operand, K S, R, V' = T R, the update. Everything else is
// done while products of that chain run: Q S, the largest elements of state and values, the values of the next chunk.
//
// The sums hold the state as S / 2^power, with a power for each column, and what is made from it has the same units. When
// these no longer fit, which is rare, the sums are moved to others between chunks. What the units are thus depends on the
// chunks before, so a state passes from slab to slab as its sums, with their units at the end of the carry.
//
// MACROS     KEY_HEAD_DIM: 64 or 128; VALUE_HEAD_DIM: a multiple of 64 * WARPGROUPS; CHUNK_LEN: 64; OPERAND_TERMS: 1
//            WORK_TYPE (qkv): float16, bfloat16; STATE_TYPE (pool), OUT_TYPE: float, float16, bfloat16
//            WARPGROUPS: 1 or 2; WALK_STAGES; SHARED_BYTES of a block, which begin on a multiple of 1024
// BLOCK      WARPGROUPS = 1: 192 threads; 2: 384
// GRID       any number of blocks: they share the pieces, value heads and tiles
// SHAPES, MUTATES, OVERLAP as gated_delta_chunk_walk; behind the states of a carry (none if STATE_TYPE is float)
//            ColumnUnits [rows_at_once, num_value_heads, VALUE_HEAD_DIM]
// CALLER     values and readouts lie in rows of neighbours that start on 16-byte boundaries
#include "chunk_pieces.cuh"
#include "grid_order.cuh"
#include "warpgroup.cuh"

constexpr int TILE_COLUMNS = 64 * WARPGROUPS;
constexpr int NUM_TILES = VALUE_HEAD_DIM / TILE_COLUMNS;
constexpr int WALKING_WARPS = 4 * WARPGROUPS;
constexpr int NUM_THREADS = WARPGROUPS == 1 ? 192 : 384;
constexpr int TOKEN_TILES = CHUNK_LEN / 8;
constexpr int KEY_TILES = KEY_HEAD_DIM / 8;
constexpr int KEY_STEPS = KEY_HEAD_DIM / 16;
constexpr int TOKEN_STEPS = CHUNK_LEN / 16;

// Rows of values and of readouts in shared memory, 16 bytes apart from a multiple of all banks.
constexpr int VALUE_PITCH = 64 * 2 + 16;
constexpr int OUT_PITCH = 64 * static_cast<int>(sizeof(OUT_TYPE)) + 16;
constexpr int VALUES_OFFSET = KEY_HEAD_BYTES + VALUE_HEAD_BYTES;
constexpr int VALUES_BYTES = CHUNK_LEN * VALUE_PITCH;  // of a walker
constexpr int STAGE_BYTES = (VALUES_OFFSET + WARPGROUPS * VALUES_BYTES + 1023) / 1024 * 1024;
constexpr int OUT_OFFSET = WALK_STAGES * STAGE_BYTES;
constexpr int OUT_BYTES = CHUNK_LEN * OUT_PITCH;  // of a walker
constexpr int BARRIERS_OFFSET = OUT_OFFSET + WARPGROUPS * OUT_BYTES;

static_assert(OPERANDS == 1 && CHUNK_LEN == 64 && sizeof(WORK_TYPE) == 2, "what products of a warpgroup take");
static_assert(KEY_HEAD_DIM == 64 || KEY_HEAD_DIM == 128, "KEY_HEAD_DIM");

// What the roles have in common in shared memory.
struct Barriers {
    CopyBarrier full[WALK_STAGES];   // a stage holds its chunk
    CopyBarrier empty[WALK_STAGES];  // ... and is no longer needed
    SlabPieces pieces;               // the same for all, who have few registers
};
static_assert(BARRIERS_OFFSET + sizeof(Barriers) <= SHARED_BYTES, "SHARED_BYTES");

// The block's shared memory. (A pointer to it in a register would make its accesses generic ones.)
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char shared[];
    return shared;
}
__device__ __forceinline__ Barriers& barriers() {
    return *reinterpret_cast<Barriers*>(shared_memory() + BARRIERS_OFFSET);
}
__device__ __forceinline__ unsigned char* readout_stage(int group) {
    return shared_memory() + OUT_OFFSET + group * OUT_BYTES;
}
__device__ __forceinline__ int own_warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }  // of a walker
// In a stage, the values of the calling warp's columns.
__device__ __forceinline__ int values_offset(int group) {
    return VALUES_OFFSET + group * VALUES_BYTES + own_warp() * 32;
}

// Barriers of a walker and its storer: a readout is staged; its stage is free.
constexpr int READOUT_THREADS = 128 + 32;
__device__ __forceinline__ int staged_barrier(int group) { return 1 + 2 * group; }
__device__ __forceinline__ int free_barrier(int group) { return 2 + 2 * group; }

// A place in a ring of stages, and the parity of the round.
struct Turn {
    unsigned int stage = 0;
    unsigned int parity = 0;

    __device__ __forceinline__ Turn next() const {
        return stage + 1 == WALK_STAGES ? Turn{0, parity ^ 1} : Turn{stage + 1, parity};
    }
};

__device__ __forceinline__ unsigned char* stage_of(const Turn& turn) {
    return shared_memory() + turn.stage * STAGE_BYTES;
}

// Of a column of a state in passing from slab to slab: what Columns says of it.
struct ColumnUnits {
    int power;
    float largest;
};

struct Walk {
    const WORK_TYPE* qkv_conv_output;
    long long qkv_token_stride;
    STATE_TYPE* recurrent_state;
    long long state_slot_stride;
    OUT_TYPE* out;
    long long out_token_stride;
    float* carry_in;
    float* carry_out;
    ChunkSlab slab;
    ChunkPlan plan;

    __device__ __forceinline__ const SlabPieces& pieces() const { return barriers().pieces; }
    __device__ __forceinline__ unsigned int num_value_heads() const {
        return static_cast<unsigned int>(slab.num_key_heads * slab.group_size);
    }
    __device__ __forceinline__ unsigned int tiles_of_piece() const { return num_value_heads() * NUM_TILES; }

    __device__ __forceinline__ unsigned int num_items() const { return pieces().num_pieces * tiles_of_piece(); }

    // Ask for the state that a piece begins with, where it lies in one piece: loaders are ahead of walkers, which ask for it
    // when they need it.
    __device__ __forceinline__ void prefetch_state(const RowPiece& piece, long long head) const {
        const STATE_TYPE* const state = recurrent_state + piece.slot * state_slot_stride + head * KEY_HEAD_DIM * VALUE_HEAD_DIM;
        if (TILE_COLUMNS == VALUE_HEAD_DIM && reinterpret_cast<unsigned long long>(state) % 16 == 0)
            start_prefetch(state, KEY_HEAD_DIM * VALUE_HEAD_DIM * static_cast<int>(sizeof(STATE_TYPE)));
    }

    // Calls visit(piece, value head, first column of the tile) for each item of the block that has chunks.
    template <typename Visit>
    __device__ __forceinline__ void for_each_item(const Visit& visit) const {
        for (unsigned int item = blockIdx.x; item < num_items(); item += gridDim.x) {
            const unsigned int tile = item % tiles_of_piece();
            const RowPiece piece = pieces().piece(plan, item / tiles_of_piece());
            if (piece.begin < piece.end)
                visit(piece, static_cast<long long>(tile / NUM_TILES), static_cast<int>(tile % NUM_TILES) * TILE_COLUMNS);
        }
    }
};

// ---- Loaders: a warp for each walker ----

// Bring a walker's values of a chunk into its part of a stage. 8 lanes move a token, of which `source` is the first, so that
// pointers move from token to token: one warp has to keep up with four.
__device__ __forceinline__ void start_value_copies(
    unsigned char* target, const WORK_TYPE* source, long long token_stride, int length) {
    const int row = static_cast<int>(threadIdx.x) % 32 / 8;
    source += row * token_stride;
    target += row * VALUE_PITCH + static_cast<int>(threadIdx.x) % 8 * 16;
    const WORK_TYPE* const first = source - row * token_stride;
    #pragma unroll 8
    for (int step = 0; step < CHUNK_LEN / 4; ++step) {
        const bool is_there = 4 * step + row < length;
        start_copy_16_or_zeros(target + 4 * step * VALUE_PITCH, is_there ? source : first, is_there);
        source += 4 * token_stride;
    }
}

// The first of them brings what the slab has of the chunks, too.
__device__ __forceinline__ void load_chunks(const Walk& walk, int group) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Turn turn;
    walk.for_each_item([&](const RowPiece& piece, long long head, int column) {
        const WORK_TYPE* const values = walk.qkv_conv_output + 2 * walk.slab.num_key_heads * KEY_HEAD_DIM +
                                        head * VALUE_HEAD_DIM + column + group * 64 + lane % 8 * 8;
        if (group == 0 && lane == 0 && (piece.is_first || !HAS_CARRIES)) walk.prefetch_state(piece, head);
        PlannedChunk next = walk.plan.chunk(piece.begin);
        for (unsigned int chunk = piece.begin; chunk < piece.end; ++chunk) {
            const WORK_TYPE* const source = values + next.token * walk.qkv_token_stride;
            const unsigned int in_slab = next.place - walk.pieces().begin;
            const int length = static_cast<int>(next.length);
            if (chunk + 1 < piece.end) next = walk.plan.chunk(chunk + 1);  // asked for before anything is waited for
            wait_for_round(barriers().empty[turn.stage], turn.parity ^ 1);
            CopyBarrier& full = barriers().full[turn.stage];
            unsigned char* const stage = stage_of(turn);
            if (group == 0 && lane == 0) {
                const unsigned int key_head =
                    static_cast<unsigned int>(head) / static_cast<unsigned int>(walk.slab.group_size);
                expect_bytes(full, KEY_HEAD_BYTES + VALUE_HEAD_BYTES);
                start_bulk_copy(stage, walk.slab.key_head(in_slab, key_head), KEY_HEAD_BYTES, full);
                start_bulk_copy(stage + KEY_HEAD_BYTES, walk.slab.value_head(in_slab, head), VALUE_HEAD_BYTES, full);
            }
            start_value_copies(stage + VALUES_OFFSET + group * VALUES_BYTES, source, walk.qkv_token_stride, length);
            arrive_behind_copies(full);
            turn = turn.next();
        }
    });
    // Walkers look at the values of the chunk behind the one they run, so there is one behind the last, with any values.
    wait_for_round(barriers().empty[turn.stage], turn.parity ^ 1);
    arrive(barriers().full[turn.stage]);
    if (group == 0 && lane == 0) arrive(barriers().full[turn.stage]);
}

// ---- Storers: a warp for each walker ----

__device__ __forceinline__ void store_readouts(const Walk& walk, int group) {
    constexpr int LANES_OF_ROW = 64 * sizeof(OUT_TYPE) / 16;
    constexpr int ROWS_AT_ONCE = 32 / LANES_OF_ROW;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = lane / LANES_OF_ROW;
    const unsigned char* const staged = readout_stage(group) + lane % LANES_OF_ROW * 16 + row * OUT_PITCH;
    walk.for_each_item([&](const RowPiece& piece, long long head, int column) {
        OUT_TYPE* const readouts = walk.out + head * VALUE_HEAD_DIM + column + group * 64 +
                                   lane % LANES_OF_ROW * (16 / static_cast<int>(sizeof(OUT_TYPE)));
        for (unsigned int chunk = piece.begin; chunk < piece.end; ++chunk) {
            const PlannedChunk own = walk.plan.chunk(chunk);
            OUT_TYPE* target = readouts + (static_cast<long long>(own.token) + row) * walk.out_token_stride;
            const int length = static_cast<int>(own.length);
            announce(free_barrier(group), READOUT_THREADS);
            wait_for_all(staged_barrier(group), READOUT_THREADS);
            #pragma unroll 4
            for (int step = 0; step < CHUNK_LEN / ROWS_AT_ONCE; ++step) {
                if (step * ROWS_AT_ONCE + row < length)
                    *reinterpret_cast<uint4*>(target) =
                        *reinterpret_cast<const uint4*>(staged + step * ROWS_AT_ONCE * OUT_PITCH);
                target += ROWS_AT_ONCE * walk.out_token_stride;
            }
        }
    });
}

// ---- Walkers ----

__device__ __forceinline__ float max_across_column(float value) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 1));
    return fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, 2));
}

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < __uint_as_float(0x7F800000u); }

// The values of a chunk that a lane has: of tokens 8 i + 2 * place and the next one, column `group` (words 2 i) or
// `group` + 8 (2 i + 1) of the warp's 16.
struct ChunkValues {
    unsigned int words[2 * TOKEN_TILES];
    float largest[2];  // magnitude of the two columns, infinite or NaN if one of them is

    __device__ __forceinline__ void load(const unsigned char* values) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const unsigned char* const row =
            values + (lane / 16 * 8 + lane % 8) * VALUE_PITCH + lane / 8 % 2 * 16;
        #pragma unroll
        for (int pair = 0; pair < TOKEN_TILES / 2; ++pair)
            load_matrices_transposed(reinterpret_cast<unsigned int(&)[4]>(words[4 * pair]), row + 16 * pair * VALUE_PITCH);
    }

    __device__ __forceinline__ float get(int tile, int half, int next) const {
        return float_of_word(&words[2 * tile + half], next, WORK_TYPE{});
    }

    // Nothing is made of them before here: they come from memory, and a warp that waits for them does nothing else.
    __device__ __forceinline__ void hold() {
        #pragma unroll
        for (int i = 0; i < 2 * TOKEN_TILES; ++i) asm volatile("" : "+r"(words[i]));
    }

    __device__ __forceinline__ void find_largest() {
        unsigned int pairs[2] = {words[0], words[1]};
        #pragma unroll
        for (int i = 2; i < 2 * TOKEN_TILES; ++i) pairs[i % 2] = larger_pair(pairs[i % 2], words[i], WORK_TYPE{});
        largest_of_pairs(largest, pairs[0], pairs[1], WORK_TYPE{});
    }
};

using State = float[KEY_TILES][4];
using TokenSums = float[TOKEN_TILES][4];

// What a lane knows of its two columns.
struct Columns {
    int power[2];      // the state is 2^power times the sums
    float largest[2];  // what the sums held at most before the last chunk, and its decay
    bool is_bad[2];    // NaN
    int first_bad[2];  // token of this chunk from which on it is
    bool some_bad;     // of the warp
    bool need_care;    // whether anything is to be seen to before the next chunk; of the warp
};

__device__ __forceinline__ const ChunkScalars& scalars_of(const unsigned char* stage) {
    return *reinterpret_cast<const ChunkScalars*>(stage + KEY_HEAD_BYTES + SCALARS_OFFSET);
}

// Where values, keys or gates of a chunk are not finite: their columns are NaN from that token on, and 0 in products.
__device__ __forceinline__ void set_bad_apart(ChunkValues& values, Columns& columns, int num_good) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        int first = columns.is_bad[half] ? 0 : num_good;
        #pragma unroll
        for (int tile = TOKEN_TILES - 1; tile >= 0; --tile)
            #pragma unroll
            for (int next = 1; next >= 0; --next)
                if (!is_finite(values.get(tile, half, next))) first = min(first, 8 * tile + lane % 4 * 2 + next);
        first = min(first, __shfl_xor_sync(0xFFFFFFFFu, first, 1));
        first = min(first, __shfl_xor_sync(0xFFFFFFFFu, first, 2));
        #pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile) {
            const int token = 8 * tile + lane % 4 * 2;
            const unsigned int kept = (token < first ? 0xFFFFu : 0u) | (token + 1 < first ? 0xFFFF0000u : 0u);
            values.words[2 * tile + half] &= kept;
        }
        columns.first_bad[half] = first;
        columns.is_bad[half] = first < CHUNK_LEN;
    }
    values.find_largest();
}

// Units. Values, R and V' have those of the sums, so that nothing but the decay comes between chunks. That fits while what
// is largest of state and values lies between these powers: no product overflows float16 then, whatever the keys are. The
// state is that of a chunk earlier, which is known in time. With m the larger one of it and of values: a step of the
// recurrence with beta <= 2 lengthens no column but by what it adds, so the state before the chunk is at most 139 m, its
// columns 1,600 m long, and |V'| <= 2 (129 m + 1,600 m), 55,000 for m = 2^4.
constexpr int LOWEST_POWER = -3;
constexpr int HIGHEST_POWER = 4;
constexpr int WANTED_POWER = 0;  // where new units put it
__device__ __forceinline__ float largest_in_units(const ChunkValues& values, const Columns& columns, int half) {
    // Neither is below 0, so that their order is that of their bits, of which those of NaN are the largest.
    return __uint_as_float(max(__float_as_uint(columns.largest[half]),
                               __float_as_uint(values.largest[half] * whole_power(-columns.power[half]))));
}

// Of NaN and 0 false, too.
__device__ __forceinline__ bool fits_units(float largest) {
    return __float_as_uint(largest) - __float_as_uint(whole_power(LOWEST_POWER)) <
           __float_as_uint(whole_power(HIGHEST_POWER)) - __float_as_uint(whole_power(LOWEST_POWER));
}

// Whether anything is to be seen to before the warp runs a chunk; the same in all its lanes.
__device__ __forceinline__ bool needs_care(const ChunkValues& values, const Columns& columns, const ChunkScalars& scalars) {
    const bool is_plain = fits_units(largest_in_units(values, columns, 0)) &&
                          fits_units(largest_in_units(values, columns, 1)) && scalars.is_plain;
    return __any_sync(0xFFFFFFFFu, !is_plain) || columns.some_bad;
}

// See to it: what is not finite, a state that the chunk does not see, units that do not fit.
__device__ __forceinline__ void take_care(
    State& state, ChunkValues& values, Columns& columns, const ChunkScalars& scalars) {
    set_bad_apart(values, columns, scalars.num_good);
    columns.some_bad = __any_sync(0xFFFFFFFFu, columns.is_bad[0] || columns.is_bad[1]) != 0;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (scalars.first_decay == 0.0f) columns.largest[half] = 0.0f;
        const float largest = largest_in_units(values, columns, half);
        int change = 0;
        if (largest != 0.0f && !fits_units(largest)) {
            // In two steps, because 2^-power may be more than a float holds.
            const int own = columns.largest[half] > 0.0f ? columns.power[half] + exponent_of(columns.largest[half]) : -200;
            const int other = values.largest[half] > 0.0f ? exponent_of(values.largest[half]) : -200;
            change = max(own, other) - WANTED_POWER - columns.power[half];
        }
        const float scale = scalars.first_decay == 0.0f ? 0.0f : whole_power(-change);
        columns.power[half] += change;
        columns.largest[half] *= scale;
        #pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile) {
            state[tile][2 * half] *= scale;
            state[tile][2 * half + 1] *= scale;
        }
    }
}

// The two numbers that a lane needs of a scalar for its tokens of a tile.
__device__ __forceinline__ float2 of_tokens(const float* scalar, int tile) {
    return *reinterpret_cast<const float2*>(scalar + 8 * tile);
}

// Read sums, the largest of the lane's part of each column, and which columns are not finite.
template <typename Stored>
__device__ __forceinline__ void load_sums(State& state, const Stored* source, Columns& columns, float (&largest)[2]) {
    bool is_bad[2] = {false, false};
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = to_float(source[(8 * tile + i % 2) * VALUE_HEAD_DIM + i / 2 * 8]);
            state[tile][i] = value;
            largest[i / 2] = fmaxf(largest[i / 2], fabsf(value));
            is_bad[i / 2] |= !is_finite(value);
        }
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        int bad = is_bad[half];
        bad |= __shfl_xor_sync(0xFFFFFFFFu, bad, 1);
        bad |= __shfl_xor_sync(0xFFFFFFFFu, bad, 2);
        columns.is_bad[half] = bad != 0;
        columns.first_bad[half] = CHUNK_LEN;
    }
}

// Columns that are not finite become 0.
__device__ __forceinline__ void scale_sums(State& state, const Columns& columns, const float (&scales)[2]) {
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& value = state[tile][i];
            value = columns.is_bad[i / 2] ? 0.0f : value * scales[i / 2];
            hold(value);  // or what was read of a 16-bit pool would be kept along with it
        }
}

// The state that a row begins with.
template <typename Stored>
__device__ __forceinline__ void load_state(State& state, const Stored* source, Columns& columns) {
    float largest[2] = {0.0f, 0.0f}, scales[2];
    load_sums(state, source, columns, largest);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool bad = columns.is_bad[half];
        const float most = max_across_column(largest[half]);
        columns.power[half] = most == 0.0f || bad ? 0 : exponent_of(most) - WANTED_POWER;
        scales[half] = whole_power(-columns.power[half]);
        columns.largest[half] = bad ? 0.0f : most * scales[half];
    }
    scale_sums(state, columns, scales);
}

// The state of a row that goes on, as `leave_state` left it: in the units that it had, because small elements round to
// float16 differently in others, and it would show where a slab ends.
__device__ __forceinline__ void resume_state(
    State& state, const float* source, const ColumnUnits* units, Columns& columns) {
    float largest[2] = {0.0f, 0.0f};
    load_sums(state, source, columns, largest);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        columns.power[half] = units[half * 8].power;
        columns.largest[half] = columns.is_bad[half] ? 0.0f : units[half * 8].largest;
    }
    const float scales[2] = {1.0f, 1.0f};
    scale_sums(state, columns, scales);
}

template <typename Stored>
__device__ __forceinline__ void store_sums(
    const State& state, Stored* target, const Columns& columns, const float (&scales)[2]) {
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile)
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float value = columns.is_bad[i / 2] ? __uint_as_float(0x7FFFFFFFu) : state[tile][i] * scales[i / 2];
            from_float(value, target[(8 * tile + i % 2) * VALUE_HEAD_DIM + i / 2 * 8]);
        }
}

// The state that a row ends with.
template <typename Stored>
__device__ __forceinline__ void store_state(const State& state, Stored* target, const Columns& columns) {
    const float scales[2] = {whole_power(columns.power[0]), whole_power(columns.power[1])};
    store_sums(state, target, columns, scales);
}

// The state of a row that goes on in the next slab: its sums, and their units beside them.
__device__ __forceinline__ void leave_state(const State& state, float* target, ColumnUnits* units, const Columns& columns) {
    const float scales[2] = {1.0f, 1.0f};
    store_sums(state, target, columns, scales);
    if (threadIdx.x % 4 == 0) {
        units[0] = {columns.power[0], columns.largest[0]};
        units[8] = {columns.power[1], columns.largest[1]};
    }
}

__device__ __forceinline__ unsigned int rounded_pair(float first, float second, float16) {
    return float16_pair(first, second);
}
template <typename Stored>
__device__ __forceinline__ unsigned int rounded_pair(float first, float second, Stored) {
    Stored pair[2];
    from_float(first, pair[0]);
    from_float(second, pair[1]);
    return *reinterpret_cast<const unsigned short*>(&pair[0]) |
           static_cast<unsigned int>(*reinterpret_cast<const unsigned short*>(&pair[1])) << 16;
}

// Leave a readout, transposed sums, where the storer finds it. `staged`: the walker's, from the warp's first column on.
__device__ __forceinline__ void stage_readout(const TokenSums& readout, unsigned char* staged) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (sizeof(OUT_TYPE) == 2) {
        const auto word = [&](int tile, int half) {
            return rounded_pair(readout[tile][2 * half], readout[tile][2 * half + 1], OUT_TYPE{});
        };
        unsigned char* const row = staged + (lane / 16 * 8 + lane % 8) * OUT_PITCH + lane / 8 % 2 * 16;
        #pragma unroll
        for (int pair = 0; pair < TOKEN_TILES / 2; ++pair)
            store_matrices_transposed(row + 16 * pair * OUT_PITCH, word(2 * pair, 0), word(2 * pair, 1),
                                      word(2 * pair + 1, 0), word(2 * pair + 1, 1));
    } else {
        unsigned char* const first = staged + lane % 4 * 2 * OUT_PITCH + lane / 4 * 4;
        #pragma unroll
        for (int tile = 0; tile < TOKEN_TILES; ++tile)
            #pragma unroll
            for (int i = 0; i < 4; ++i)
                *reinterpret_cast<float*>(first + (8 * tile + i % 2) * OUT_PITCH + i / 2 * 32) = readout[tile][i];
    }
}

// The readout of tokens from a column's first bad one on is NaN.
__device__ __forceinline__ void overwrite_bad(unsigned char* staged, const Columns& columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        for (int token = columns.first_bad[half] + lane % 4; token < CHUNK_LEN; token += 4)
            from_float(__uint_as_float(0x7FFFFFFFu),
                       reinterpret_cast<OUT_TYPE*>(staged + token * OUT_PITCH)[8 * half + lane / 4]);
}

// What a walker has of the chunk it runs, and of the next one. Addresses are made where they are used: they would take more
// registers than there are.
struct ChunkPlace {
    Turn turn;
    Turn next_turn;
    int group;

    __device__ __forceinline__ const unsigned char* stage() const { return stage_of(turn); }
    __device__ __forceinline__ const unsigned char* next_values() const {
        return stage_of(next_turn) + values_offset(group);
    }
    __device__ __forceinline__ unsigned char* staged() const { return readout_stage(group) + own_warp() * 16 * static_cast<int>(sizeof(OUT_TYPE)); }
};

// Run one chunk: the readout is left in its stage, the state is that behind the chunk, `values` are the next chunk's.
// HAS_OWN_UNITS: whether values, R and V' have units of their own.
template <bool HAS_OWN_UNITS>
__device__ __forceinline__ void run_chunk(State& state, ChunkValues& values, Columns& columns, const ChunkPlace& place) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const ChunkScalars& scalars = scalars_of(place.stage());

    // K S and Q S
    unsigned int rounded[KEY_STEPS][4];
    #pragma unroll
    for (int step = 0; step < KEY_STEPS; ++step)
        #pragma unroll
        for (int word = 0; word < 4; ++word)
            rounded[step][word] = float16_pair(state[2 * step + word / 2][word % 2 * 2],
                                               state[2 * step + word / 2][word % 2 * 2 + 1]);
    const unsigned int keys = operand_at(place.stage(), KEY_TILE_BYTES);
    const unsigned int queries = moved(keys, KEY_TERM_BYTES);
    TokenSums memory, readout;
    fence_products();
    multiply_group<false, false>(memory, rounded[0], keys);
    #pragma unroll
    for (int step = 1; step < KEY_STEPS; ++step)
        multiply_group<false, true>(memory, rounded[step], moved(keys, step / 4 * KEY_TILE_BYTES + step % 4 * 32));
    commit_products();
    multiply_group<false, false>(readout, rounded[0], queries);
    #pragma unroll
    for (int step = 1; step < KEY_STEPS; ++step)
        multiply_group<false, true>(readout, rounded[step], moved(queries, step / 4 * KEY_TILE_BYTES + step % 4 * 32));
    commit_products();

    // Of the rounded state: the compiler would wait for the products if sums were read now.
    float largest_sums[2];
    unsigned int pairs[2] = {rounded[0][0], rounded[0][1]};
    #pragma unroll
    for (int i = 2; i < 4 * KEY_STEPS; ++i) pairs[i % 2] = larger_pair(pairs[i % 2], rounded[i / 4][i % 4], float16{});
    largest_of_pairs(largest_sums, pairs[0], pairs[1], float16{});
    float value_scales[2], memory_scales[2], out_scales[2], decays[2], update_units[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float largest = largest_sums[half];
        int value_power = columns.power[half];
        decays[half] = scalars.decay;
        columns.largest[half] = largest * scalars.decay;
        if constexpr (HAS_OWN_UNITS) {
            const int seen = columns.power[half] + exponent_of(largest * scalars.first_decay);
            value_power = exponent_of(values.largest[half]);
            if (largest * scalars.first_decay > 0.0f && (seen > value_power || values.largest[half] == 0.0f))
                value_power = seen;
            value_power = max(value_power, -100);
            // The larger one of what is left of the state and what is added
            int power = value_power + scalars.update_power;
            const float left = largest * scalars.decay;
            if (left > 0.0f) power = max(power, columns.power[half] + exponent_of(left));
            power -= WANTED_POWER;
            memory_scales[half] = whole_power(columns.power[half] - value_power);
            update_units[half] = whole_power(value_power - power);
            decays[half] *= whole_power(columns.power[half] - power);
            columns.power[half] = power;
            columns.largest[half] = whole_power(WANTED_POWER);
        }
        value_scales[half] = whole_power(-value_power);
        out_scales[half] = whole_power(value_power);
    }
    wait_for_products<1>();

    // R, then V' = T R
    unsigned int operand[TOKEN_STEPS][4];
    #pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        const float2 decayed_key = of_tokens(scalars.decayed_key + lane % 4 * 2, tile);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (HAS_OWN_UNITS) {
                memory[tile][2 * half] *= memory_scales[half];
                memory[tile][2 * half + 1] *= memory_scales[half];
            }
            operand[tile / 2][tile % 2 * 2 + half] = float16_pair(
                fmaf(memory[tile][2 * half], decayed_key.x, values.get(tile, half, 0) * value_scales[half]),
                fmaf(memory[tile][2 * half + 1], decayed_key.y, values.get(tile, half, 1) * value_scales[half]));
        }
    }
    TokenSums deltas;
    const unsigned int solver = moved(keys, KEY_HEAD_BYTES);
    fence_products();
    multiply_group<false, false>(deltas, operand[0], solver);
    #pragma unroll
    for (int step = 1; step < TOKEN_STEPS; ++step)
        multiply_group<false, true>(deltas, operand[step], moved(solver, step * 32));
    commit_products();
    wait_for_products<0>();

    // The state decays before any other product begins: the compiler would wait for that.
    #pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile)
        #pragma unroll
        for (int i = 0; i < 4; ++i) state[tile][i] *= decays[i / 2];

    // exp(G) (Q S) + P V'
    #pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        const float2 decayed = of_tokens(scalars.decayed + lane % 4 * 2, tile);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            readout[tile][2 * half] *= decayed.x;
            readout[tile][2 * half + 1] *= decayed.y;
            if constexpr (HAS_OWN_UNITS) {
                readout[tile][2 * half] *= memory_scales[half];
                readout[tile][2 * half + 1] *= memory_scales[half];
            }
            operand[tile / 2][tile % 2 * 2 + half] = float16_pair(deltas[tile][2 * half], deltas[tile][2 * half + 1]);
        }
    }
    const unsigned int scores = moved(solver, SCORE_TERM_BYTES);
    fence_products();
    #pragma unroll
    for (int step = 0; step < TOKEN_STEPS; ++step)
        multiply_group<false, true>(readout, operand[step], moved(scores, step * 32));
    commit_products();

    // S <- S + K^T (...)
    unsigned int update[TOKEN_STEPS][4];
    #pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        const float2 update_of = of_tokens(scalars.update + lane % 4 * 2, tile);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float first = deltas[tile][2 * half] * update_of.x;
            float second = deltas[tile][2 * half + 1] * update_of.y;
            if constexpr (HAS_OWN_UNITS) {
                first *= update_units[half];
                second *= update_units[half];
            }
            update[tile / 2][tile % 2 * 2 + half] = float16_pair(first, second);
        }
    }
    fence_products();
    #pragma unroll
    for (int step = 0; step < TOKEN_STEPS; ++step)
        multiply_group<true, true>(state, update[step], moved(keys, step * 16 * KEY_ROW_BYTES));
    commit_products();

    // While the state is updated: the values of the next chunk, the readout of this one
    wait_for_round(barriers().full[place.next_turn.stage], place.next_turn.parity);
    values.load(place.next_values());
    wait_for_all(free_barrier(place.group), READOUT_THREADS);
    wait_for_products<1>();
    #pragma unroll
    for (int tile = 0; tile < TOKEN_TILES; ++tile) {
        const float2 query = of_tokens(scalars.query + lane % 4 * 2, tile);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            readout[tile][2 * half] *= query.x * out_scales[half];
            readout[tile][2 * half + 1] *= query.y * out_scales[half];
        }
    }
    stage_readout(readout, place.staged());
    values.hold();
    values.find_largest();
    columns.need_care = needs_care(values, columns, scalars_of(stage_of(place.next_turn)));
    wait_for_products<0>();
}

// Where a lane's part of the state of an item is: in the pool, or in passing from slab to slab.
struct StatePlace {
    const Walk& walk;
    const RowPiece& piece;
    long long head;
    int column;  // the first of the lane's two

    __device__ __forceinline__ long long offset(long long states) const {
        const int row = static_cast<int>(threadIdx.x) % 4 * 2;
        return ((states + head) * KEY_HEAD_DIM + row) * VALUE_HEAD_DIM + column;
    }
    __device__ __forceinline__ long long states_before() const { return walk.pieces().carried(piece) * walk.num_value_heads(); }

    __device__ __forceinline__ STATE_TYPE* pool() const {
        return walk.recurrent_state + static_cast<long long>(piece.slot) * walk.state_slot_stride + offset(0);
    }
    __device__ __forceinline__ float* passing(float* carry) const {
        if constexpr (!HAS_CARRIES) return reinterpret_cast<float*>(pool());
        return carry + offset(states_before());
    }
    // The units stand behind all states of a carry.
    __device__ __forceinline__ ColumnUnits* units(float* carry) const {
        const long long num_states = HAS_CARRIES ? static_cast<long long>(walk.pieces().rows_at_once) * walk.num_value_heads() : 0;
        return reinterpret_cast<ColumnUnits*>(carry + num_states * KEY_HEAD_DIM * VALUE_HEAD_DIM) +
               (states_before() + head) * VALUE_HEAD_DIM + column;
    }
};

// Run the chunks of one item.
__device__ __forceinline__ void walk_piece(
    const Walk& walk, const RowPiece& piece, long long head, int tile_column, int group, Turn& turn,
    ChunkValues& values) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    StatePlace state_place = {walk, piece, head, tile_column + group * 64 + own_warp() * 16 + lane / 4};
    State state;
    Columns columns;
    if (piece.is_first) {
        load_state(state, state_place.pool(), columns);
    } else {
        resume_state(state, state_place.passing(walk.carry_in), state_place.units(walk.carry_in), columns);
    }
    columns.some_bad = __any_sync(0xFFFFFFFFu, columns.is_bad[0] || columns.is_bad[1]) != 0;
    columns.need_care = needs_care(values, columns, scalars_of(stage_of(turn)));
    unsigned int num_left = piece.end - piece.begin;
    do {
        const ChunkPlace place = {turn, turn.next(), group};
        const bool is_careful = columns.need_care;
        bool has_own_units = false;  // the same in all warps that multiply together, unlike `is_careful`
        if (is_careful) {
            const ChunkScalars& scalars = scalars_of(stage_of(turn));
            take_care(state, values, columns, scalars);
            has_own_units = __any_sync(0xFFFFFFFFu, scalars.has_own_units()) != 0;
        }
        if (has_own_units) {
            run_chunk<true>(state, values, columns, place);
        } else {
            run_chunk<false>(state, values, columns, place);
        }
        if (is_careful) {
            __syncwarp();
            overwrite_bad(place.staged(), columns);
        }
        arrive(barriers().empty[turn.stage]);
        announce(staged_barrier(group), READOUT_THREADS);
        turn = place.next_turn;
    } while (--num_left > 0);

    hold_in_turn(state_place.column, static_cast<int>(num_left));  // or the places would be kept from before the loop
    if (piece.is_last) {
        store_state(state, state_place.pool(), columns);
    } else {
        leave_state(state, state_place.passing(walk.carry_out), state_place.units(walk.carry_out), columns);
    }
}

__device__ __forceinline__ void walk_chunks(const Walk& walk, int group) {
    Turn turn;
    ChunkValues values;
    const unsigned int num_items = walk.num_items();
    if (blockIdx.x >= num_items) return;
    wait_for_round(barriers().full[0], 0);
    values.load(stage_of(turn) + values_offset(group));
    values.find_largest();
    walk.for_each_item([&](const RowPiece& piece, long long head, int column) {
        walk_piece(walk, piece, head, column, group, turn, values);
    });
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) gated_delta_chunk_walk_sm90(
    const WORK_TYPE* __restrict__ qkv_conv_output, long long qkv_token_stride, long long qkv_channel_stride,
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    OUT_TYPE* __restrict__ out, long long out_token_stride, long long out_channel_stride,
    const unsigned int* __restrict__ chunk_plan, unsigned char* __restrict__ slab,
    float* __restrict__ carry_in, float* __restrict__ carry_out, long long first_place,
    long long slab_chunks, long long max_chunks, long long rows_at_once, long long num_key_heads, long long group_size) {
    wait_for_grid_before();
    let_next_grid_begin();
    const ChunkPlan plan = {chunk_plan, max_chunks};
    const Walk walk = {qkv_conv_output, qkv_token_stride, recurrent_state, state_slot_stride, out, out_token_stride,
                       carry_in, carry_out, {slab, num_key_heads, group_size}, plan};
    if (threadIdx.x == 0) {
        barriers().pieces = SlabPieces(plan, first_place, slab_chunks, rows_at_once);
        for (int stage = 0; stage < WALK_STAGES; ++stage) {
            // Who expects the bytes, and lanes with copies of their own.
            prepare_barrier_of(barriers().full[stage], 1 + 32 * WARPGROUPS);
            prepare_barrier_of(barriers().empty[stage], 32 * WALKING_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp >= WALKING_WARPS) {
        if constexpr (WARPGROUPS == 2) keep_registers<56>();
        const int helper = warp - WALKING_WARPS;
        if (helper < WARPGROUPS) {
            load_chunks(walk, helper);
        } else {
            store_readouts(walk, helper - WARPGROUPS);
        }
    } else {
        if constexpr (WARPGROUPS == 2) take_registers<224>();
        walk_chunks(walk, warp / 4);
    }
}
