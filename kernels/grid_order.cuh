// Kernels of one stream that overlap: where a launch allows it (compute capability 9.0), a grid may begin before the one in
// front of it has ended, and must then say itself what it waits for. Elsewhere both functions do nothing, as a grid only
// begins when all before it have ended.
#pragma once

// The next grid may begin once all blocks of this one have called this or ended.
__device__ __forceinline__ void let_next_grid_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the grid in front has ended and what it wrote can be read.
__device__ __forceinline__ void wait_for_grid_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
