// Which part of the rows a walk takes: pieces of rows that lie in a slab, and where their states come from and go to.
#pragma once
#include "chunk_workspace.cuh"

// The chunks of one row that lie in a slab.
struct RowPiece {
    unsigned int row;
    unsigned int begin;  // chunks of the plan
    unsigned int end;
    bool is_first;  // whether the row begins here
    bool is_last;
};

struct SlabPieces {
    unsigned int first_row;
    unsigned int num_pieces;
    unsigned int begin;  // chunks of the plan
    unsigned int end;

    __device__ __forceinline__ SlabPieces(const ChunkPlan& plan, long long first_chunk, long long slab_chunks) {
        begin = static_cast<unsigned int>(first_chunk);
        end = min(begin + static_cast<unsigned int>(slab_chunks), plan.num_chunks());
        first_row = begin < end ? plan.row(begin) : 0;
        num_pieces = begin < end ? plan.row(end - 1) - first_row + 1 : 0;
    }

    __device__ __forceinline__ RowPiece piece(const ChunkPlan& plan, unsigned int number) const {
        const unsigned int row = first_row + number;
        const unsigned int row_begin = plan.first_chunk(row);
        const unsigned int row_end = plan.first_chunk(row + 1);
        return {row, row_begin > begin ? row_begin : begin, row_end < end ? row_end : end, row_begin >= begin,
                row_end <= end};
    }
};
