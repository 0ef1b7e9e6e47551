// Products of a warpgroup (four warps) on the tensor cores of compute capability 9.0, and the barriers of its blocks.
//
// A product adds left [64 x 16] times right [16 x N] to sums [64 x N]. Warp w has rows 16 w to 16 w + 15 of the left operand
// and of the sums, in its registers as in tensor_core.cuh; the right operand is read from shared memory, from tiles as
// tensor_core.cuh describes them (rows of 128 bytes), which begin on multiples of 1024 bytes. Products run while the warps go
// on: registers they read or write are left alone until they are waited for.
#pragma once
#include "tensor_core.cuh"

// Where a right operand lies: the lower half of a descriptor. Bits 0-13: address / 16; 16-29: the distance of neighbouring
// blocks of 64 columns, / 16. The upper half is the same for all: bits 32-45: the distance of neighbouring groups of 8 rows
// of the tile, / 16; 62: rows of 128 bytes with swapped pieces (PTX ISA, "Matrix Descriptor Format").
__device__ __forceinline__ unsigned int operand_at(const unsigned char* tile, int block_distance) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(tile)) >> 4 |
           static_cast<unsigned int>(block_distance >> 4) << 16;
}

// The operand `num_bytes` on.
__device__ __forceinline__ unsigned int moved(unsigned int operand, int num_bytes) {
    return operand + static_cast<unsigned int>(num_bytes >> 4);
}

// Before products, when registers that they read or write have been written.
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most COUNT groups of products are under way.
template <int COUNT>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

#define GDN_SUMS_8(sums, first) \
    "+f"(sums[first][0]), "+f"(sums[first][1]), "+f"(sums[first][2]), "+f"(sums[first][3]), \
    "+f"(sums[first + 1][0]), "+f"(sums[first + 1][1]), "+f"(sums[first + 1][2]), "+f"(sums[first + 1][3])
#define GDN_SUMS_32(sums, first) \
    GDN_SUMS_8(sums, first), GDN_SUMS_8(sums, first + 2), GDN_SUMS_8(sums, first + 4), GDN_SUMS_8(sums, first + 6)

// sums (+)= left * right, N = 64. IS_BLOCK: the operand is 16 rows of a tile; otherwise its columns are 64 rows of one.
template <bool IS_BLOCK, bool ADDS>
__device__ __forceinline__ void multiply_group(float (&sums)[8][4], const unsigned int (&left)[4], unsigned int right) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 operand;\nsetp.ne.b32 adds, %37, 0;\nmov.b64 operand, {%36, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, operand, adds, 1, 1, %38;\n}"
        : GDN_SUMS_32(sums, 0)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "n"(ADDS ? 1 : 0), "n"(IS_BLOCK ? 1 : 0));
}

// The same, N = 128.
template <bool IS_BLOCK, bool ADDS>
__device__ __forceinline__ void multiply_group(float (&sums)[16][4], const unsigned int (&left)[4], unsigned int right) {
    asm volatile(
        "{\n.reg .pred adds;\n.reg .b64 operand;\nsetp.ne.b32 adds, %69, 0;\nmov.b64 operand, {%68, 0x40000040};\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, operand, adds, 1, 1, %70;\n}"
        : GDN_SUMS_32(sums, 0), GDN_SUMS_32(sums, 8)
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "n"(ADDS ? 1 : 0), "n"(IS_BLOCK ? 1 : 0));
}

// ---- Barriers in shared memory ----

__device__ __forceinline__ unsigned int shared_address(const void* shared) {
    return static_cast<unsigned int>(__cvta_generic_to_shared(shared));
}

// Opens when `count` have arrived, again and again. By one thread; the block must meet before it is used.
__device__ __forceinline__ void prepare_barrier_of(CopyBarrier& barrier, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(CopyBarrier& barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Arrive when the copies that this thread has started are over.
__device__ __forceinline__ void arrive_behind_copies(CopyBarrier& barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
// Copy 16 bytes, or write 16 of zeros where nothing is there to be copied.
__device__ __forceinline__ void start_copy_16_or_zeros(void* shared, const void* global, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(is_there ? 16 : 0) : "memory");
}

// A barrier of the block by its number, for `num_threads` in all: some say that they have come, others wait for all.
__device__ __forceinline__ void announce(int number, int num_threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void wait_for_all(int number, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(num_threads) : "memory");
}

// Bring memory into the L2 cache. Address and `num_bytes` are multiples of 16.
__device__ __forceinline__ void start_prefetch(const void* global, int num_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(num_bytes) : "memory");
}

// Give registers of a warpgroup back, or take more of them.
template <int COUNT>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Four 8 x 8 matrices, transposed, into shared memory: the reverse of load_matrices_transposed.
__device__ __forceinline__ void store_matrices_transposed(
    void* row, unsigned int word0, unsigned int word1, unsigned int word2, unsigned int word3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
                 "r"(word0), "r"(word1), "r"(word2), "r"(word3) : "memory");
}

// The larger magnitudes of two pairs, but for their signs, which mean nothing; NaN if there is one.
__device__ __forceinline__ unsigned int larger_pair(unsigned int a, unsigned int b, float16) {
    unsigned int result;
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
__device__ __forceinline__ unsigned int larger_pair(unsigned int a, unsigned int b, bfloat16) {
    unsigned int result;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// The largest magnitudes of two pairs, each over the lanes that share a row of an operand. NaN if there is one.
template <typename Stored>
__device__ __forceinline__ void largest_of_pairs(float (&largest)[2], unsigned int first, unsigned int second, Stored kind) {
    // From here on the lower half is of the first pair, the upper one of the second.
    unsigned int both = larger_pair(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632), kind);
    both = larger_pair(both, __shfl_xor_sync(0xFFFFFFFFu, both, 1), kind);
    both = larger_pair(both, __shfl_xor_sync(0xFFFFFFFFu, both, 2), kind);
    largest[0] = to_float(Stored{static_cast<unsigned short>(both & 0x7FFFu)});
    largest[1] = to_float(Stored{static_cast<unsigned short>(both >> 16 & 0x7FFFu)});
}
