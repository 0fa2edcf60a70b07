// Attention of whole sequences in bfloat16, forward and backward, for AVX-512 with products of bfloat16.
//
// FlashAttention (Dao et al., 2022): scores exist a block of queries and a block of keys at a time, sums are
// in float32, and of the forward pass the logarithm of each query's sum is kept.  The backward pass holds
// scores with keys as rows, so that every product reads its left factor as rows and its right one as pairs:
// two rows of it side by side, the layout of the instruction.  Each head is computed by one thread, with the
// same sums whatever the number of threads.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "functions.hpp"
#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

using Half = std::uint16_t;   // bfloat16
using Pair = std::uint32_t;   // two of them, the first in the lower bits
using Index = std::int64_t;

constexpr Index kBlockRows = 64;  // queries, or keys, of a block
constexpr Index kWidth = 16;      // of a vector

inline Index blocks_of(Index rows) { return (rows + kBlockRows - 1) / kBlockRows; }

inline __m256i narrowed_vector(__m512 values) {
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
}

inline __m512i paired(__m256i first, __m256i second) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

// c[4, 16 * kColumns] += a[4, 2 * pairs] @ b; b holds pairs of rows.
template <int kColumns>
inline void multiply_rows(const Half *a, Index a_stride, const Pair *b, Index b_stride, float *c,
                          Index c_stride, Index pairs, bool adds) {
  constexpr int kRows = 4;
  __m512 sums[kRows][kColumns];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      sums[m][n] = adds ? _mm512_loadu_ps(c + m * c_stride + n * kWidth) : _mm512_setzero_ps();
    }
  }
  for (Index p = 0; p < pairs; ++p) {
    __m512bh right[kColumns];
    for (int n = 0; n < kColumns; ++n) {
      right[n] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + p * b_stride + n * kWidth));
    }
    for (int m = 0; m < kRows; ++m) {
      int pair;
      std::memcpy(&pair, a + m * a_stride + 2 * p, sizeof pair);
      const auto left = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int n = 0; n < kColumns; ++n) {
        sums[m][n] = _mm512_dpbf16_ps(sums[m][n], left, right[n]);
      }
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kColumns; ++n) {
      _mm512_storeu_ps(c + m * c_stride + n * kWidth, sums[m][n]);
    }
  }
}

// c[rows, columns] (+)= a[rows, 2 * pairs] @ b[2 * pairs, columns]; rows is a multiple of 4, columns of 32.
inline void multiply(const Half *a, Index a_stride, const Pair *b, Index b_stride, float *c,
                     Index c_stride, Index rows, Index columns, Index pairs, bool adds) {
  Index n = 0;
  for (; n + 4 * kWidth <= columns; n += 4 * kWidth) {
    for (Index m = 0; m < rows; m += 4) {
      multiply_rows<4>(a + m * a_stride, a_stride, b + n, b_stride, c + m * c_stride + n, c_stride,
                       pairs, adds);
    }
  }
  for (; n < columns; n += 2 * kWidth) {
    for (Index m = 0; m < rows; m += 4) {
      multiply_rows<2>(a + m * a_stride, a_stride, b + n, b_stride, c + m * c_stride + n, c_stride,
                       pairs, adds);
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

// Rows of a head: copied without gaps, zeros after the last one to the end of its block.
inline void gather(const Half *from, Index stride, Index rows, Index channels, Half *to) {
  for (Index row = 0; row < rows; ++row) {
    std::memcpy(to + row * channels, from + row * stride, channels * sizeof(Half));
  }
  std::fill(to + rows * channels, to + blocks_of(rows) * kBlockRows * channels, Half{0});
}

// to[rows / 2, channels]: two rows side by side.
inline void pair_rows(const Half *from, Index rows, Index channels, Pair *to) {
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
inline void pair_channels(const Half *from, Index rows, Index channels, Pair *to) {
  for (Index row = 0; row < rows; row += kBlockRows) {
    transpose_block(reinterpret_cast<const Pair *>(from + row * channels), channels / 2,
                    to + row * channels / 2);
  }
}

// [channels, kBlockRows] from the pairs of a block of rows.
inline void split_pairs(const Pair *from, Index channels, Half *to) {
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

inline void write_scaled(const float *from, Index rows, Index channels, float scale,
                         const SequenceRows &to) {
  for (Index row = 0; row < rows; ++row) {
    for (Index d = 0; d < channels; d += kWidth) {
      const __m512 values =
          _mm512_mul_ps(_mm512_loadu_ps(from + row * channels + d), _mm512_set1_ps(scale));
      char *const at = static_cast<char *>(to.at) + (row * to.strides[2] + d) * (to.is_wide ? 4 : 2);
      if (to.is_wide) {
        _mm512_storeu_ps(at, values);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), narrowed_vector(values));
      }
    }
  }
}

// Rows of a head, from a row on.
inline SequenceRows rows_of(const SequenceRows &all, Index sequence, Index head, Index row = 0) {
  SequenceRows found = all;
  const Index shift = sequence * all.strides[0] + head * all.strides[1] + row * all.strides[2];
  found.at = static_cast<char *>(all.at) + shift * (all.is_wide ? 4 : 2);
  return found;
}

// Memory of a thread, kept for its next call.
template <class Value>
class Room {
 public:
  Value *of(Index size) {
    constexpr Index kAligned = 64 / sizeof(Value);
    if (static_cast<Index>(memory_.size()) < size + kAligned) {
      memory_.resize(size + kAligned);
    }
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return reinterpret_cast<Value *>((address + 63) / 64 * 64);
  }

 private:
  std::vector<Value> memory_;
};

inline __mmask16 first_lanes(Index count) {
  return count >= kWidth ? static_cast<__mmask16>(0xFFFF)
                         : static_cast<__mmask16>(count > 0 ? (1U << count) - 1 : 0);
}

struct Softmax {
  alignas(64) float highest[kBlockRows];
  alignas(64) float total[kBlockRows];
};

// Replaces a row's scores by bfloat16 probabilities up to a factor; scales what the row has summed before.
// seen: keys of the block that the query sees.
inline void update_row(const float *scores, Index seen, float scale, Softmax &softmax, Index row,
                       Half *probabilities, float *sums, Index channels) {
  constexpr int kVectorsOfBlock = kBlockRows / kWidth;
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __m512 values[kVectorsOfBlock];
  __m512 most = hidden;
  for (int n = 0; n < kVectorsOfBlock; ++n) {
    const __m512 scaled =
        _mm512_mul_ps(_mm512_loadu_ps(scores + n * kWidth), _mm512_set1_ps(scale));
    values[n] = _mm512_mask_mov_ps(hidden, first_lanes(seen - n * kWidth), scaled);
    most = _mm512_max_ps(values[n], most);  // the second one if the first is NaN
  }
  const float before = softmax.highest[row];
  const float highest = std::max(before, _mm512_reduce_max_ps(most));
  const __m512 offset = _mm512_set1_ps(highest);
  __m512 total = _mm512_setzero_ps();
  for (int n = 0; n < kVectorsOfBlock; ++n) {
    const __mmask16 visible = first_lanes(seen - n * kWidth);
    const __m512 found = _mm512_maskz_mov_ps(visible, exponential(_mm512_sub_ps(values[n], offset)));
    total = _mm512_add_ps(total, found);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(probabilities + n * kWidth),
                        narrowed_vector(found));
  }
  softmax.highest[row] = highest;
  if (highest == before) {
    softmax.total[row] += _mm512_reduce_add_ps(total);
    return;
  }
  const float factor = std::exp(before - highest);
  softmax.total[row] = softmax.total[row] * factor + _mm512_reduce_add_ps(total);
  for (Index d = 0; d < channels; d += kWidth) {
    _mm512_storeu_ps(sums + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(factor)));
  }
}

void attend_head(const SequenceAttention &call, Index sequence, Index head, bool has_keys) {
  static thread_local Room<Half> query_room, key_room, probability_room;
  static thread_local Room<Pair> key_pairs_room, value_pairs_room;
  static thread_local Room<float> score_room, sum_room;
  const Index channels = call.head_dim, key_blocks = blocks_of(call.keys);
  const Index padded_keys = key_blocks * kBlockRows;
  Pair *const key_pairs = key_pairs_room.of(padded_keys * channels / 2);
  Pair *const value_pairs = value_pairs_room.of(padded_keys * channels / 2);
  if (!has_keys) {
    const Index group = head / (call.heads / call.groups);
    Half *const rows = key_room.of(padded_keys * channels);
    const SequenceRows k = rows_of(call.k, sequence, group), v = rows_of(call.v, sequence, group);
    gather(static_cast<const Half *>(k.at), k.strides[2], call.keys, channels, rows);
    pair_channels(rows, padded_keys, channels, key_pairs);
    gather(static_cast<const Half *>(v.at), v.strides[2], call.keys, channels, rows);
    pair_rows(rows, padded_keys, channels, value_pairs);
  }
  const Index query_blocks = blocks_of(call.queries);
  Half *const queries = query_room.of(query_blocks * kBlockRows * channels);
  const SequenceRows q = rows_of(call.q, sequence, head);
  gather(static_cast<const Half *>(q.at), q.strides[2], call.queries, channels, queries);
  float *const scores = score_room.of(kBlockRows * kBlockRows);
  float *const sums = sum_room.of(kBlockRows * channels);
  Half *const probabilities = probability_room.of(kBlockRows * kBlockRows);
  for (Index i = 0; i < query_blocks; ++i) {
    Softmax softmax;
    std::fill_n(softmax.highest, kBlockRows, -std::numeric_limits<float>::infinity());
    std::fill_n(softmax.total, kBlockRows, 0.0F);
    std::fill_n(sums, kBlockRows * channels, 0.0F);
    const Index end = call.causal ? std::min(i + 1, key_blocks) : key_blocks;
    for (Index j = 0; j < end; ++j) {
      multiply(queries + i * kBlockRows * channels, channels,
               key_pairs + j * kBlockRows * channels / 2, kBlockRows, scores, kBlockRows,
               kBlockRows, kBlockRows, channels / 2, false);
      const Index left = std::min(kBlockRows, call.keys - j * kBlockRows);
      for (Index row = 0; row < kBlockRows; ++row) {
        const Index seen = call.causal && j == i ? std::min(row + 1, left) : left;
        update_row(scores + row * kBlockRows, seen, call.scale, softmax, row,
                   probabilities + row * kBlockRows, sums + row * channels, channels);
      }
      multiply(probabilities, kBlockRows, value_pairs + j * kBlockRows * channels / 2, channels,
               sums, channels, kBlockRows, channels, kBlockRows / 2, true);
    }
    const Index rows = std::min(kBlockRows, call.queries - i * kBlockRows);
    float *const logs = call.logs + (sequence * call.heads + head) * call.queries + i * kBlockRows;
    for (Index row = 0; row < rows; ++row) {
      logs[row] = softmax.highest[row] + std::log(softmax.total[row]);
      write_scaled(sums + row * channels, 1, channels, 1.0F / softmax.total[row],
                   rows_of(call.out, sequence, head, i * kBlockRows + row));
    }
  }
}

// Memory of a head's backward pass.
struct BackwardRoom {
  Room<Half> queries, grads, keys, values, key_columns, probabilities, score_grads;
  Room<Pair> query_channels, query_rows, grad_channels, grad_rows, key_channels, score_pairs;
  Room<float> logs, deltas, scores, probability_grads, query_sums, key_sums, value_sums;
};

// Turns scores and gradients of probabilities, keys as rows, into probabilities and gradients of scores.
// is_diagonal: both blocks begin at the same position, and a query sees the keys up to its own.
inline void differentiate(const float *scores, const float *probability_grads, const float *logs,
                          const float *deltas, float scale, bool is_diagonal, Half *probabilities,
                          Half *score_grads, Pair *score_pairs) {
  for (Index key = 0; key < kBlockRows; key += 2) {
    for (Index column = 0; column < kBlockRows; column += kWidth) {
      const __m512 log = _mm512_loadu_ps(logs + column), delta = _mm512_loadu_ps(deltas + column);
      __m256i narrow_grads[2];
      for (Index m = 0; m < 2; ++m) {
        const Index at = (key + m) * kBlockRows + column;
        const __m512 score = _mm512_loadu_ps(scores + at);
        __m512 p = exponential(_mm512_fmsub_ps(score, _mm512_set1_ps(scale), log));
        if (is_diagonal) {
          const auto visible = static_cast<__mmask16>(~first_lanes(key + m - column));
          p = _mm512_maskz_mov_ps(visible, p);
        }
        const __m512 grad =
            _mm512_mul_ps(p, _mm512_sub_ps(_mm512_loadu_ps(probability_grads + at), delta));
        narrow_grads[m] = narrowed_vector(grad);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(probabilities + at), narrowed_vector(p));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(score_grads + at), narrow_grads[m]);
      }
      _mm512_storeu_si512(score_pairs + key / 2 * kBlockRows + column,
                          paired(narrow_grads[0], narrow_grads[1]));
    }
  }
}

// Sums over the channels of the products of the output and its gradient.
inline void sum_products(const Half *out, Index stride, const Half *grads, Index rows,
                         Index channels, float *sums) {
  for (Index row = 0; row < rows; ++row) {
    __m512 sum = _mm512_setzero_ps();
    for (Index d = 0; d < channels; d += kWidth) {
      sum = _mm512_fmadd_ps(Lanes::load(out + row * stride + d),
                            Lanes::load(grads + row * channels + d), sum);
    }
    sums[row] = _mm512_reduce_add_ps(sum);
  }
}

void differentiate_head(const SequenceAttention &call, Index sequence, Index head) {
  static thread_local BackwardRoom room;
  const Index channels = call.head_dim, group = head / (call.heads / call.groups);
  const Index query_blocks = blocks_of(call.queries), key_blocks = blocks_of(call.keys);
  const Index padded = query_blocks * kBlockRows, size = padded * channels;
  const Index block_size = kBlockRows * channels, block_pairs = block_size / 2;
  const SequenceRows q = rows_of(call.q, sequence, head);
  const SequenceRows k = rows_of(call.k, sequence, group), v = rows_of(call.v, sequence, group);
  const SequenceRows out = rows_of(call.out, sequence, head);
  const SequenceRows grad = rows_of(call.out_grad, sequence, head);

  Half *const queries = room.queries.of(size), *const grads = room.grads.of(size);
  gather(static_cast<const Half *>(q.at), q.strides[2], call.queries, channels, queries);
  gather(static_cast<const Half *>(grad.at), grad.strides[2], call.queries, channels, grads);
  Pair *const query_channels = room.query_channels.of(size / 2);
  Pair *const query_rows = room.query_rows.of(size / 2);
  Pair *const grad_channels = room.grad_channels.of(size / 2);
  Pair *const grad_rows = room.grad_rows.of(size / 2);
  pair_channels(queries, padded, channels, query_channels);
  pair_rows(queries, padded, channels, query_rows);
  pair_channels(grads, padded, channels, grad_channels);
  pair_rows(grads, padded, channels, grad_rows);
  // A query of padding has the probability 0 of every key.
  float *const logs = room.logs.of(padded), *const deltas = room.deltas.of(padded);
  std::fill(std::copy_n(call.logs + (sequence * call.heads + head) * call.queries, call.queries, logs),
            logs + padded, std::numeric_limits<float>::infinity());
  std::fill_n(deltas, padded, 0.0F);
  sum_products(static_cast<const Half *>(out.at), out.strides[2], grads, call.queries, channels,
               deltas);

  float *const query_sums = room.query_sums.of(size);
  std::fill_n(query_sums, size, 0.0F);
  float *const key_sums = room.key_sums.of(block_size), *const value_sums = room.value_sums.of(block_size);
  float *const scores = room.scores.of(kBlockRows * kBlockRows);
  float *const probability_grads = room.probability_grads.of(kBlockRows * kBlockRows);
  Half *const probabilities = room.probabilities.of(kBlockRows * kBlockRows);
  Half *const score_grads = room.score_grads.of(kBlockRows * kBlockRows);
  Pair *const score_pairs = room.score_pairs.of(kBlockRows * kBlockRows / 2);
  Half *const keys = room.keys.of(block_size), *const values = room.values.of(block_size);
  Half *const key_columns = room.key_columns.of(block_size);
  Pair *const key_channels = room.key_channels.of(block_pairs);
  for (Index j = 0; j < key_blocks; ++j) {
    const Index rows = std::min(kBlockRows, call.keys - j * kBlockRows);
    const Index shift = j * kBlockRows;
    gather(static_cast<const Half *>(k.at) + shift * k.strides[2], k.strides[2], rows, channels, keys);
    gather(static_cast<const Half *>(v.at) + shift * v.strides[2], v.strides[2], rows, channels, values);
    pair_channels(keys, kBlockRows, channels, key_channels);
    split_pairs(key_channels, channels, key_columns);
    std::fill_n(key_sums, block_size, 0.0F);
    std::fill_n(value_sums, block_size, 0.0F);
    for (Index i = call.causal ? j : 0; i < query_blocks; ++i) {
      multiply(keys, channels, query_channels + i * block_pairs, kBlockRows, scores, kBlockRows,
               kBlockRows, kBlockRows, channels / 2, false);
      multiply(values, channels, grad_channels + i * block_pairs, kBlockRows, probability_grads,
               kBlockRows, kBlockRows, kBlockRows, channels / 2, false);
      differentiate(scores, probability_grads, logs + i * kBlockRows, deltas + i * kBlockRows,
                    call.scale, call.causal && i == j, probabilities, score_grads, score_pairs);
      multiply(probabilities, kBlockRows, grad_rows + i * block_pairs, channels, value_sums,
               channels, kBlockRows, channels, kBlockRows / 2, true);
      multiply(score_grads, kBlockRows, query_rows + i * block_pairs, channels, key_sums, channels,
               kBlockRows, channels, kBlockRows / 2, true);
      multiply(key_columns, kBlockRows, score_pairs, kBlockRows, query_sums + i * block_size,
               kBlockRows, channels, kBlockRows, kBlockRows / 2, true);
    }
    write_scaled(key_sums, rows, channels, call.scale, rows_of(call.k_grad, sequence, head, shift));
    write_scaled(value_sums, rows, channels, 1.0F, rows_of(call.v_grad, sequence, head, shift));
  }
  for (Index i = 0; i < query_blocks; ++i) {
    const Index rows = std::min(kBlockRows, call.queries - i * kBlockRows);
    const auto *const sums = reinterpret_cast<const Pair *>(query_sums + i * block_size);
    for (Index d = 0; d < channels; d += kWidth) {  // [channels, rows] to [rows, channels]
      for (Index row = 0; row < kBlockRows; row += kWidth) {
        transpose_tile(sums + d * kBlockRows + row, kBlockRows,
                       reinterpret_cast<Pair *>(key_sums) + row * channels + d, channels);
      }
    }
    write_scaled(key_sums, rows, channels, call.scale,
                 rows_of(call.q_grad, sequence, head, i * kBlockRows));
  }
}

// Computes the heads from first to end, of all sequences.
void attend_sequences(const SequenceAttention &call, Index first, Index end) {
  Index keys_of = -1;
  for (Index number = first; number < end; ++number) {
    const Index sequence = number / call.heads, head = number % call.heads;
    if (call.out_grad.at != nullptr) {
      differentiate_head(call, sequence, head);
      continue;
    }
    const Index group = sequence * call.groups + head / (call.heads / call.groups);
    attend_head(call, sequence, head, group == keys_of);
    keys_of = group;
  }
}

}  // namespace
}  // namespace lmcore::cpu
