// gated_delta_state_fold: advance states over the first accepted records of their windows, all layers in one launch.
//
// For each layer and row with 1 <= num_accepted[row] <= RING_LEN, for each value head and accepted record in order:
//   S[k, v] <- fma(key[k], delta_factor[v], decay * S[k, v])
// which is the state update of the token that left the record, to the bit for a float32 ring. The state is read once,
// kept in float32 and rounded once, at its store.
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM, RING_LEN, STATE_TYPE, RING_TYPE, IS_PACKED; MIN_BLOCKS and the thread map of
//            row_tile.cuh
// BLOCK      one row of one layer, one value head, one tile of columns, split among threads as row_tile.cuh says
// GRID       num_layers * batch_size * num_value_heads * NUM_TILES blocks, tile fastest, then head, row, layer
// SHAPES     recurrent_state [max_slots, num_value_heads, KEY_HEAD_DIM, VALUE_HEAD_DIM], the last three dense;
//            row_ids, ring_row_ids [num_layers, batch_size]; ring [ring_rows, num_key_heads, RING_LEN, record_stride],
//            dense; num_accepted [batch_size]. Strides in elements.
// MUTATES    the slots row_ids names, of rows whose count is 1 to RING_LEN. Other rows are not even read.
// CALLER     guarantees that arrays do not overlap and that two rows never name one slot; IS_PACKED only where slots
//            start on 16-byte boundaries. A slot or ring row out of range makes its row padding.
#include "ring_record.cuh"
#include "row_tile.cuh"

// A thread holds its share of a stage in registers while it loads.
constexpr int MAX_STAGE_RECORDS = NUM_THREADS >= 128 ? 4 : 2;
constexpr int STAGE_RECORDS = RING_LEN < MAX_STAGE_RECORDS ? RING_LEN : MAX_STAGE_RECORDS;

// Accepted records of one value head, widened to float32 and shared by the block.
struct Stage {
    alignas(16) float key[STAGE_RECORDS][KEY_HEAD_DIM];
    alignas(16) float delta[STAGE_RECORDS][TILE_COLUMNS];
    float decay[STAGE_RECORDS];
};

// What one thread brings of a stage. All its loads are under way before the first value is used.
struct StagePart {
    static constexpr int RECORD_VALUES = KEY_HEAD_DIM + TILE_COLUMNS + 1;
    static constexpr int VALUES = (STAGE_RECORDS * RECORD_VALUES + NUM_THREADS - 1) / NUM_THREADS;
    RING_TYPE values[VALUES];

    // `first` is the first record to stage; offsets are those of the tile's delta factors and the head's decay.
    __device__ __forceinline__ void load(
        const RING_TYPE* first, int num_records, long long record_stride, long long tile_delta_offset,
        long long head_decay_offset) {
        #pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int place = static_cast<int>(i * NUM_THREADS + threadIdx.x) / RECORD_VALUES;
            const int value = static_cast<int>(i * NUM_THREADS + threadIdx.x) % RECORD_VALUES;
            if (place >= num_records || place >= STAGE_RECORDS) continue;
            const long long offset = value < KEY_HEAD_DIM ? value
                                     : value < RECORD_VALUES - 1 ? tile_delta_offset + (value - KEY_HEAD_DIM)
                                                                 : head_decay_offset;
            values[i] = first[place * record_stride + offset];
        }
    }

    __device__ __forceinline__ void store(Stage& stage, int num_records) const {
        #pragma unroll
        for (int i = 0; i < VALUES; ++i) {
            const int place = static_cast<int>(i * NUM_THREADS + threadIdx.x) / RECORD_VALUES;
            const int value = static_cast<int>(i * NUM_THREADS + threadIdx.x) % RECORD_VALUES;
            if (place >= num_records || place >= STAGE_RECORDS) continue;
            if (value < KEY_HEAD_DIM) {
                stage.key[place][value] = to_float(values[i]);
            } else if (value < RECORD_VALUES - 1) {
                stage.delta[place][value - KEY_HEAD_DIM] = to_float(values[i]);
            } else {
                stage.decay[place] = to_float(values[i]);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, MIN_BLOCKS) gated_delta_state_fold(
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    long long max_slots,
    const unsigned int* __restrict__ row_ids, long long row_ids_layer_stride, long long row_ids_row_stride,
    const RING_TYPE* __restrict__ ring, long long ring_rows, long long record_stride,
    const unsigned int* __restrict__ ring_row_ids, long long ring_row_ids_layer_stride,
    long long ring_row_ids_row_stride,
    const unsigned int* __restrict__ num_accepted, long long num_accepted_stride,
    long long batch_size, long long num_key_heads, long long group_size) {
    __shared__ Stage stage;
    const unsigned int num_value_heads = static_cast<unsigned int>(num_key_heads * group_size);
    const unsigned int value_head = blockIdx.x / NUM_TILES % num_value_heads;
    const unsigned int row_of_layers = blockIdx.x / NUM_TILES / num_value_heads;
    const unsigned int row = row_of_layers % static_cast<unsigned int>(batch_size);
    const long long layer = row_of_layers / static_cast<unsigned int>(batch_size);
    const int tile_column = static_cast<int>(blockIdx.x % NUM_TILES) * TILE_COLUMNS;

    const unsigned int count = num_accepted[row * num_accepted_stride];
    if (count == 0 || count > RING_LEN) return;
    const long long slot = valid_index(row_ids[layer * row_ids_layer_stride + row * row_ids_row_stride], max_slots);
    const long long ring_row =
        valid_index(ring_row_ids[layer * ring_row_ids_layer_stride + row * ring_row_ids_row_stride], ring_rows);
    if (slot < 0 || ring_row < 0) return;

    STATE_TYPE* const pool = lane_state(recurrent_state, slot, state_slot_stride, value_head, tile_column);
    StoredState stored_state;
    stored_state.load(pool);

    const LanePlace lane = lane_place();
    const unsigned int key_head = value_head / static_cast<unsigned int>(group_size);
    const int head_of_group = static_cast<int>(value_head % static_cast<unsigned int>(group_size));
    const int num_records = static_cast<int>(count);
    const RING_TYPE* const records = ring + first_record_offset(ring_row, num_key_heads, key_head, record_stride);
    const long long tile_delta_offset = delta_offset(head_of_group) + tile_column;
    const long long head_decay_offset = decay_offset(head_of_group, group_size);
    StagePart part;
    part.load(records, num_records, record_stride, tile_delta_offset, head_decay_offset);
    LaneState state;
    stored_state.widen(state);
    for (int first = 0; first < num_records; first += STAGE_RECORDS) {
        const int num_left = num_records - first;
        const int num_staged = num_left < STAGE_RECORDS ? num_left : STAGE_RECORDS;
        part.store(stage, num_staged);
        part.load(records + (first + STAGE_RECORDS) * record_stride, num_left - STAGE_RECORDS, record_stride,
                  tile_delta_offset, head_decay_offset);
        __syncthreads();
        for (int place = 0; place < num_staged; ++place) {
            float delta[COLUMNS_PER_LANE];
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column)
                delta[column] = stage.delta[place][lane.first_column + column];
            update_state(state, stage.key[place] + lane.first_row, delta, stage.decay[place]);
        }
        __syncthreads();  // the next stage overwrites records that slower warps may still read
    }
    store_state(state, pool);
}
