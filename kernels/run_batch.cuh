// run_batch(arrays, batch, pool, records) runs the calling block's share of a recurrence, in one of two forms that give the
// same bits: the threads of a block share a tile of the state, or each warp streams through tiles of its own.
#pragma once
#include "recurrence.cuh"

#if STREAMED_WARPS > 0
#include "streamed_tokens.cuh"
#else
#include "block_tokens.cuh"
#endif
