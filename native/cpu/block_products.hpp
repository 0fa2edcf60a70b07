// Products of blocks of rows for AVX-512, in float32, and in bfloat16 where the processor has its products.
//
// The left factor is read as rows, the right one as steps: of bfloat16 two rows side by side, the layout of
// the instruction; of float32 a row.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

using Half = std::uint16_t;   // bfloat16
using Pair = std::uint32_t;   // two of them, the first in the lower bits
using Index = std::int64_t;

constexpr Index kBlockRows = 64;  // queries, or keys, of a block
constexpr Index kWidth = 16;      // of a vector

inline Index blocks_of(Index rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// Numbers of float32, and their products.
struct Float32 {
  using Value = float;
  using Step = float;
  static constexpr Index kRowsOfStep = 1;
  static __m512 add_product(__m512 sum, const Value *left, __m512i right) {
    return _mm512_fmadd_ps(_mm512_set1_ps(*left), _mm512_castsi512_ps(right), sum);
  }
  static void store(Value *to, __m512 values) { _mm512_storeu_ps(to, values); }
  static void step_channels(const Value *from, Index rows, Index channels, Step *to);
  static void step_rows(const Value *from, Index rows, Index channels, Step *to) {
    std::copy_n(from, rows * channels, to);
  }
  static void columns_of(const Step *from, Index channels, Value *to) {
    std::copy_n(from, channels * kBlockRows, to);
  }
};

#if defined(__AVX512BF16__)

inline __m256i narrowed_vector(__m512 values) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
}

inline __m512i paired(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

// Numbers of bfloat16; products of two pairs are one instruction.
struct Bfloat16 {
  using Value = Half;
  using Step = Pair;
  static constexpr Index kRowsOfStep = 2;
  static __m512 add_product(__m512 sum, const Value *left, __m512i right) {
    int pair;
    std::memcpy(&pair, left, sizeof pair);
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)),
                            reinterpret_cast<__m512bh>(right));
  }
  static void store(Value *to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), narrowed_vector(values));
  }
  static void step_channels(const Value *from, Index rows, Index channels, Step *to);
  static void step_rows(const Value *from, Index rows, Index channels, Step *to);
  static void columns_of(const Step *from, Index channels, Value *to);
};

#endif

// c[4, 16 * kColumns] (+)= a[4, rows of all steps] @ b[steps].
template <class Format, int kColumns>
inline void multiply_rows(const typename Format::Value *a, Index a_stride,
                          const typename Format::Step *b, Index b_stride, float *c, Index c_stride,
                          Index steps, bool adds) {
  constexpr int kRows = 4;
  __m512 sums[kRows][kColumns];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      sums[m][n] = _mm512_setzero_ps();
    }
  }
  for (Index p = 0; p < steps; ++p) {
    __m512i right[kColumns];
    for (int n = 0; n < kColumns; ++n) {
      right[n] = _mm512_loadu_si512(b + p * b_stride + n * kWidth);
    }
    for (int m = 0; m < kRows; ++m) {
      const typename Format::Value *const left = a + m * a_stride + Format::kRowsOfStep * p;
      for (int n = 0; n < kColumns; ++n) {
        sums[m][n] = Format::add_product(sums[m][n], left, right[n]);
      }
    }
  }
  // Added at the end: a sum over many blocks keeps more digits than one term after the other.
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      float *const at = c + m * c_stride + n * kWidth;
      _mm512_storeu_ps(at, adds ? _mm512_add_ps(_mm512_loadu_ps(at), sums[m][n]) : sums[m][n]);
    }
  }
}

// c[rows, columns] (+)= a[rows, rows of all steps] @ b[steps, columns]; rows is a multiple of 4, columns of 32.
template <class Format>
inline void multiply(const typename Format::Value *a, Index a_stride,
                     const typename Format::Step *b, Index b_stride, float *c, Index c_stride,
                     Index rows, Index columns, Index steps, bool adds) {
  Index n = 0;
  for (; n + 4 * kWidth <= columns; n += 4 * kWidth) {
    for (Index m = 0; m < rows; m += 4) {
      multiply_rows<Format, 4>(a + m * a_stride, a_stride, b + n, b_stride, c + m * c_stride + n,
                               c_stride, steps, adds);
    }
  }
  for (; n < columns; n += 2 * kWidth) {
    for (Index m = 0; m < rows; m += 4) {
      multiply_rows<Format, 2>(a + m * a_stride, a_stride, b + n, b_stride, c + m * c_stride + n,
                               c_stride, steps, adds);
    }
  }
}

// to[j, i] = from[i, j] for 16 by 16 elements of 32 bits.
inline void transpose_tile(const Pair *from, Index from_stride, Pair *to, Index to_stride) {
  __m512i r[16];
  __m512i t[16];
  for (int i = 0; i < 16; ++i) {
    r[i] = _mm512_loadu_si512(from + i * from_stride);
  }
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    const Index row = i * to_stride;
    _mm512_storeu_si512(to + row, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(to + row + 4 * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(to + row + 8 * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD));
    _mm512_storeu_si512(to + row + 12 * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD));
  }
}

// to[columns, kBlockRows] = the transpose of from[kBlockRows, columns], of 32 bits each.
inline void transpose_block(const Pair *from, Index columns, Pair *to) {
  for (Index row = 0; row < kBlockRows; row += kWidth) {
    for (Index column = 0; column < columns; column += kWidth) {
      transpose_tile(from + row * columns + column, columns, to + column * kBlockRows + row,
                     kBlockRows);
    }
  }
}

// Of each block of rows, [channels, kBlockRows].
inline void Float32::step_channels(const Value *from, Index rows, Index channels, Step *to) {
  for (Index row = 0; row < rows; row += kBlockRows) {
    transpose_block(reinterpret_cast<const Pair *>(from + row * channels), channels,
                    reinterpret_cast<Pair *>(to + row * channels));
  }
}

#if defined(__AVX512BF16__)

// to[rows / 2, channels]: two rows side by side.
inline void Bfloat16::step_rows(const Value *from, Index rows, Index channels, Step *to) {
  for (Index row = 0; row < rows; row += 2) {
    const Half *const at = from + row * channels;
    for (Index d = 0; d < channels; d += kWidth) {
      const auto first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + d));
      const auto second = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at + channels + d));
      _mm512_storeu_si512(to + row / 2 * channels + d, paired(first, second));
    }
  }
}

// Of each block of rows, [channels / 2, kBlockRows]: two channels side by side.
inline void Bfloat16::step_channels(const Value *from, Index rows, Index channels, Step *to) {
  for (Index row = 0; row < rows; row += kBlockRows) {
    transpose_block(reinterpret_cast<const Pair *>(from + row * channels), channels / 2,
                    to + row * channels / 2);
  }
}

// [channels, kBlockRows] from the steps of a block of rows.
inline void Bfloat16::columns_of(const Step *from, Index channels, Value *to) {
  for (Index d = 0; d < channels; d += 2) {
    for (Index row = 0; row < kBlockRows; row += kWidth) {
      const __m512i both = _mm512_loadu_si512(from + d / 2 * kBlockRows + row);
      Half *const at = to + d * kBlockRows + row;
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_cvtepi32_epi16(both));
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(at + kBlockRows),
                          _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
    }
  }
}

#endif

}  // namespace
}  // namespace lmcore::cpu
