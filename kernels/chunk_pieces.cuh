// Which part of the rows a walk takes: pieces of rows that lie in a slab, and where their states come from and go to.
#pragma once
#include "chunk_workspace.cuh"

// A pool of float32 holds the state of a row that goes on in another slab as it is; others need carries.
constexpr bool HAS_CARRIES = sizeof(STATE_TYPE) < sizeof(float);

// The chunks of one row that lie in a slab; none where begin is end.
struct RowPiece {
    unsigned int row;
    unsigned int slot;
    unsigned int begin;
    unsigned int end;
    bool is_first;  // whether the row begins here
    bool is_last;
};

// Rows with chunks in a slab, and among them others that are taken at the same time, which may have none.
struct SlabPieces {
    unsigned int first_row;
    unsigned int num_pieces;
    unsigned int begin;  // places of the plan
    unsigned int end;
    unsigned int rows_at_once;

    __device__ __forceinline__ SlabPieces(
        const ChunkPlan& plan, long long first_place, long long slab_chunks, long long rows_at_once)
        : first_row(0), num_pieces(0), rows_at_once(static_cast<unsigned int>(rows_at_once)) {
        begin = static_cast<unsigned int>(first_place);
        end = min(begin + static_cast<unsigned int>(slab_chunks), plan.num_chunks());
        if (begin >= end) return;
        first_row = first_at_once(plan.chunk(plan.chunk_at(begin)).row);
        const unsigned int last_rows = first_at_once(plan.chunk(plan.chunk_at(end - 1)).row);
        num_pieces = min(last_rows + this->rows_at_once, plan.num_rows()) - first_row;
    }

    // The first of the rows that are taken at the same time as this one.
    __device__ __forceinline__ unsigned int first_at_once(unsigned int row) const { return row / rows_at_once * rows_at_once; }

    // Call it with a whole warp, which looks for the ends together.
    __device__ __forceinline__ RowPiece piece(const ChunkPlan& plan, unsigned int number) const {
        const PlannedRow row = plan.row(first_row + number);
        const unsigned int next = next_chunk(plan, first_row + number);  // looked for in any case: nothing waits for `row`
        const bool is_first = plan.chunk(row.first_chunk).place >= begin;
        const unsigned int piece_begin = is_first ? row.first_chunk : min(next, row.end_chunk);
        unsigned int piece_end = piece_begin;
        unsigned int found = 32;
        while (found == 32) {
            const unsigned int chunk = piece_end + threadIdx.x % 32;
            found = __popc(__ballot_sync(0xFFFFFFFFu, chunk < row.end_chunk && plan.chunk(chunk).place < end));
            piece_end += found;
        }
        return {first_row + number, row.slot, piece_begin, piece_end, is_first, piece_end == row.end_chunk};
    }

    // The first chunk in the slab of a row that began before it, the largest number if there is none. Rows that are taken at
    // the same time take turns, so each that goes on has a chunk among the first `rows_at_once` of the slab.
    __device__ __forceinline__ unsigned int next_chunk(const ChunkPlan& plan, unsigned int row) const {
        const unsigned int places_end = min(end, begin + rows_at_once);
        for (unsigned int first = begin; first < places_end; first += 32) {
            const unsigned int place = first + threadIdx.x % 32;
            const unsigned int chunk = plan.chunk_at(min(place, places_end - 1));
            const unsigned int lanes = __ballot_sync(0xFFFFFFFFu, plan.chunk(chunk).row == row);
            if (lanes != 0) return __shfl_sync(0xFFFFFFFFu, chunk, __ffs(static_cast<int>(lanes)) - 1);
        }
        return 0xFFFFFFFFu;
    }

    // The state of the row in a carry, as a multiple of the states that one row has.
    __device__ __forceinline__ long long carried(const RowPiece& piece) const { return piece.row % rows_at_once; }
};
