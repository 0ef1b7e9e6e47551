// What tensor_core.cuh takes from the machine, for a CPU. Sums are float32, in the order of the products.
#pragma once

namespace gdn_on_cpu {

struct ProductOfLane {
    float* sums;
    const unsigned* left;
    unsigned right[2];
};

// Words of lane 4 * group + place: see tensor_core.cuh.
inline void multiply_matrices(void* const (&lanes)[WARP_LANES]) {
    float left[16][16], right[16][8], sums[16][8];
    for (unsigned lane = 0; lane < WARP_LANES; ++lane) {
        const ProductOfLane& mine = *static_cast<const ProductOfLane*>(lanes[lane]);
        const unsigned group = lane / 4, place = lane % 4;
        for (unsigned i = 0; i < 8; ++i) {
            const unsigned short half = static_cast<unsigned short>(mine.left[i / 2] >> i % 2 * 16);
            left[group + i / 2 % 2 * 8][2 * place + i % 2 + i / 4 * 8] = float16_bits_to_float(half);
        }
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned short half = static_cast<unsigned short>(mine.right[i / 2] >> i % 2 * 16);
            right[2 * place + i % 2 + i / 2 * 8][group] = float16_bits_to_float(half);
            sums[group + i / 2 * 8][2 * place + i % 2] = mine.sums[i];
        }
    }
    for (unsigned row = 0; row < 16; ++row)
        for (unsigned inner = 0; inner < 16; ++inner)
            for (unsigned column = 0; column < 8; ++column)
                sums[row][column] += left[row][inner] * right[inner][column];
    for (unsigned lane = 0; lane < WARP_LANES; ++lane)
        for (unsigned i = 0; i < 4; ++i)
            static_cast<ProductOfLane*>(lanes[lane])->sums[i] = sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
}

struct LoadOfLane {
    unsigned* words;
    const void* row;
};

template <bool TRANSPOSED>
void load_matrices_of_lanes(void* const (&lanes)[WARP_LANES]) {
    unsigned short matrices[4][8][8];
    for (unsigned lane = 0; lane < WARP_LANES; ++lane)
        memcpy(matrices[lane / 8][lane % 8], static_cast<const LoadOfLane*>(lanes[lane])->row, 16);
    for (unsigned lane = 0; lane < WARP_LANES; ++lane) {
        const unsigned group = lane / 4, first = lane % 4 * 2;
        for (unsigned i = 0; i < 4; ++i) {
            const auto& matrix = matrices[i];
            const unsigned low = TRANSPOSED ? matrix[first][group] : matrix[group][first];
            const unsigned high = TRANSPOSED ? matrix[first + 1][group] : matrix[group][first + 1];
            static_cast<const LoadOfLane*>(lanes[lane])->words[i] = low | high << 16;
        }
    }
}

template <bool TRANSPOSED>
void load_together(unsigned (&words)[4], const void* row) {
    if (reinterpret_cast<size_t>(row) % 16 != 0) refuse("loads a row of a matrix that is not aligned");
    LoadOfLane mine = {words, row};
    together(load_matrices_of_lanes<TRANSPOSED>, &mine);
}

inline void transpose_matrix(void* const (&lanes)[WARP_LANES]) {
    unsigned short matrix[8][8];
    for (unsigned lane = 0; lane < WARP_LANES; ++lane) memcpy(&matrix[lane / 4][lane % 4 * 2], lanes[lane], 4);
    for (unsigned lane = 0; lane < WARP_LANES; ++lane) {
        const unsigned low = matrix[lane % 4 * 2][lane / 4], high = matrix[lane % 4 * 2 + 1][lane / 4];
        *static_cast<unsigned*>(lanes[lane]) = low | high << 16;
    }
}

}  // namespace gdn_on_cpu

inline unsigned int transposed(unsigned int word) {
    gdn_on_cpu::together(gdn_on_cpu::transpose_matrix, &word);
    return word;
}
inline void multiply_add(
    float (&sums)[4], const unsigned int (&left)[4], unsigned int right_low, unsigned int right_high) {
    gdn_on_cpu::ProductOfLane mine = {sums, left, {right_low, right_high}};
    gdn_on_cpu::together(gdn_on_cpu::multiply_matrices, &mine);
}
inline void load_matrices(unsigned int (&words)[4], const void* row) { gdn_on_cpu::load_together<false>(words, row); }
inline void load_matrices_transposed(unsigned int (&words)[4], const void* row) {
    gdn_on_cpu::load_together<true>(words, row);
}
inline unsigned int float16_pair(float first, float second) {
    return float_to_float16_bits(first) | static_cast<unsigned int>(float_to_float16_bits(second)) << 16;
}
inline float power_of_two(float exponent) { return exp2f(exponent); }
