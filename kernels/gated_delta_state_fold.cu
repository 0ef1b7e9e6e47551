// gated_delta_state_fold: advance states over the first accepted records of their windows, all layers in one launch.
//
// For each layer and row with 1 <= num_accepted[row] <= RING_LEN, for each value head and accepted record in order:
//   S[k, v] <- fma(key[k], delta_factor[v], decay * S[k, v])
// which is the state update of the token that left the record, to the bit for a float32 ring. The state is read once,
// kept in float32 and rounded once, at its store.
//
// MACROS     KEY_HEAD_DIM, VALUE_HEAD_DIM, RING_LEN, STATE_TYPE, RING_TYPE, IS_PACKED, RING_IS_PACKED; MIN_BLOCKS and the
//            thread map of row_tile.cuh
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

// A thread widens and updates so many of its rows at a time; the others wait as they lie in the pool, which takes half
// the registers where that is a 16-bit one. So many bytes of state can be under way.
constexpr int PART_ROWS = ROWS_PER_LANE % 8 == 0 ? 8 : ROWS_PER_LANE;

// What a part needs of a record: the key at its rows, the delta factors of the lane's columns, the decay.
struct RecordPart {
    Run<RING_TYPE, PART_ROWS, RING_IS_PACKED> key;
    Run<RING_TYPE, COLUMNS_PER_LANE, RING_IS_PACKED> delta;
    RING_TYPE decay;

    __device__ __forceinline__ void load(
        const RING_TYPE* record, int first_row, long long lane_delta_offset, long long decay_offset) {
        key.load(record + first_row, 1);
        delta.load(record + lane_delta_offset, 1);
        decay = record[decay_offset];
    }

    __device__ __forceinline__ void apply(float (&state)[PART_ROWS][COLUMNS_PER_LANE]) const {
        float key_rows[PART_ROWS], delta_factors[COLUMNS_PER_LANE];
        #pragma unroll
        for (int row = 0; row < PART_ROWS; ++row) key_rows[row] = key[row];
        #pragma unroll
        for (int column = 0; column < COLUMNS_PER_LANE; ++column) delta_factors[column] = delta[column];
        update_state(state, key_rows, delta_factors, to_float(decay));
    }
};

extern "C" __global__ void __launch_bounds__(NUM_THREADS, BLOCKS_AT_ONCE) gated_delta_state_fold(
    STATE_TYPE* __restrict__ recurrent_state, long long state_slot_stride,
    long long max_slots,
    const unsigned int* __restrict__ row_ids, long long row_ids_layer_stride, long long row_ids_row_stride,
    const RING_TYPE* __restrict__ ring, long long ring_rows, long long record_stride,
    const unsigned int* __restrict__ ring_row_ids, long long ring_row_ids_layer_stride,
    long long ring_row_ids_row_stride,
    const unsigned int* __restrict__ num_accepted, long long num_accepted_stride,
    long long batch_size, long long num_key_heads, long long group_size) {
    const unsigned int num_value_heads = static_cast<unsigned int>(num_key_heads * group_size);
    const unsigned int value_head = blockIdx.x / NUM_TILES % num_value_heads;
    const unsigned int row_of_layers = blockIdx.x / NUM_TILES / num_value_heads;
    const unsigned int row = row_of_layers % static_cast<unsigned int>(batch_size);
    const long long layer = row_of_layers / static_cast<unsigned int>(batch_size);
    const int tile_column = static_cast<int>(blockIdx.x % NUM_TILES) * TILE_COLUMNS;

    const unsigned int count = num_accepted[row * num_accepted_stride];
    const long long slot = valid_index(row_ids[layer * row_ids_layer_stride + row * row_ids_row_stride], max_slots);
    const long long ring_row =
        valid_index(ring_row_ids[layer * ring_row_ids_layer_stride + row * ring_row_ids_row_stride], ring_rows);
    if (count == 0 || count > RING_LEN || slot < 0 || ring_row < 0) return;

    // Every load is under way before the first value is used, and then that of one record ahead.
    STATE_TYPE* const pool = StatePool{recurrent_state, state_slot_stride}.lane(slot, value_head, tile_column);
    StoredState stored_state;
    stored_state.load_from_pool(pool);
    const unsigned int key_head = value_head / static_cast<unsigned int>(group_size);
    const int head_of_group = static_cast<int>(value_head % static_cast<unsigned int>(group_size));
    const RING_TYPE* const first_record = ring + first_record_offset(ring_row, num_key_heads, key_head, record_stride);
    const long long lane_delta_offset = delta_offset(head_of_group) + tile_column + lane_place().first_column;
    const long long head_decay_offset = decay_offset(head_of_group, group_size);
    const int first_row = lane_place().first_row;
    RecordPart next;
    next.load(first_record, first_row, lane_delta_offset, head_decay_offset);
    #pragma unroll
    for (int part = 0; part < ROWS_PER_LANE; part += PART_ROWS) {
        constexpr int LAST_PART = ROWS_PER_LANE - PART_ROWS;
        float state[PART_ROWS][COLUMNS_PER_LANE];
        #pragma unroll
        for (int row = 0; row < PART_ROWS; ++row)
            #pragma unroll
            for (int column = 0; column < COLUMNS_PER_LANE; ++column)
                state[row][column] = stored_state.rows[part + row][column];
        const RING_TYPE* record = first_record;
        for (unsigned int i = 0; i < count; ++i) {
            const RecordPart current = next;
            // Behind the last record comes the first one, for the next part; behind the last part it is read in vain,
            // since a load in a branch would be waited for at the branch's end.
            const bool is_last = i + 1 == count;
            record = is_last ? first_record : record + record_stride;
            next.load(record, first_row + (is_last && part < LAST_PART ? part + PART_ROWS : part), lane_delta_offset,
                      head_decay_offset);
            current.apply(state);
        }
        store_state(state, pool + part * VALUE_HEAD_DIM);
    }
}
