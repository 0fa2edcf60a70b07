// Attention of whole sequences, forward and backward, for AVX-512: in float32, and in bfloat16 where the
// processor has its products.
//
// FlashAttention (Dao et al., 2022): scores exist a block of queries and a block of keys at a time, sums are
// in float32, and of the forward pass the logarithm of each query's sum is kept.  The backward pass holds
// scores with keys as rows, so that every product reads its left factor as rows and its right one as steps
// (block_products.hpp).  Each head is computed by one thread, with the same sums whatever the number of
// threads.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "block_products.hpp"
#include "functions.hpp"
#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

// Rows of a head: copied without gaps, zeros after the last one to the end of its block.
template <class Value>
inline void gather(const SequenceRows &rows_from, Index first, Index rows, Index channels,
                   Value *to) {
  const Index stride = rows_from.strides[2];
  const Value *const from = static_cast<const Value *>(rows_from.at) + first * stride;
  for (Index row = 0; row < rows; ++row) {
    std::memcpy(to + row * channels, from + row * stride, channels * sizeof(Value));
  }
  std::fill(to + rows * channels, to + blocks_of(rows) * kBlockRows * channels, Value{0});
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
        Lanes::store(reinterpret_cast<Half *>(at), values);
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

// Replaces a row's scores by probabilities up to a factor; scales what the row has summed before.
// seen: keys of the block that the query sees.
template <class Format>
inline void update_row(const float *scores, Index seen, float scale, Softmax &softmax, Index row,
                       typename Format::Value *probabilities, float *sums, Index channels) {
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
    Format::store(probabilities + n * kWidth, found);
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

template <class Format>
void attend_head(const SequenceAttention &call, Index sequence, Index head, bool has_keys) {
  using Value = typename Format::Value;
  using Step = typename Format::Step;
  static thread_local Room<Value> query_room, key_room, probability_room;
  static thread_local Room<Step> key_steps_room, value_steps_room;
  static thread_local Room<float> score_room, sum_room;
  const Index channels = call.head_dim, key_blocks = blocks_of(call.keys);
  const Index padded_keys = key_blocks * kBlockRows;
  const Index block_steps = kBlockRows * channels / Format::kRowsOfStep;
  Step *const key_steps = key_steps_room.of(key_blocks * block_steps);
  Step *const value_steps = value_steps_room.of(key_blocks * block_steps);
  if (!has_keys) {
    const Index group = head / (call.heads / call.groups);
    Value *const rows = key_room.of(padded_keys * channels);
    gather(rows_of(call.k, sequence, group), 0, call.keys, channels, rows);
    Format::step_channels(rows, padded_keys, channels, key_steps);
    gather(rows_of(call.v, sequence, group), 0, call.keys, channels, rows);
    Format::step_rows(rows, padded_keys, channels, value_steps);
  }
  const Index query_blocks = blocks_of(call.queries);
  Value *const queries = query_room.of(query_blocks * kBlockRows * channels);
  gather(rows_of(call.q, sequence, head), 0, call.queries, channels, queries);
  float *const scores = score_room.of(kBlockRows * kBlockRows);
  float *const sums = sum_room.of(kBlockRows * channels);
  Value *const probabilities = probability_room.of(kBlockRows * kBlockRows);
  for (Index i = 0; i < query_blocks; ++i) {
    Softmax softmax;
    std::fill_n(softmax.highest, kBlockRows, -std::numeric_limits<float>::infinity());
    std::fill_n(softmax.total, kBlockRows, 0.0F);
    std::fill_n(sums, kBlockRows * channels, 0.0F);
    const Index end = call.causal ? std::min(i + 1, key_blocks) : key_blocks;
    for (Index j = 0; j < end; ++j) {
      multiply<Format>(queries + i * kBlockRows * channels, channels, key_steps + j * block_steps,
                       kBlockRows, scores, kBlockRows, kBlockRows, kBlockRows,
                       channels / Format::kRowsOfStep, false);
      const Index left = std::min(kBlockRows, call.keys - j * kBlockRows);
      for (Index row = 0; row < kBlockRows; ++row) {
        const Index seen = call.causal && j == i ? std::min(row + 1, left) : left;
        update_row<Format>(scores + row * kBlockRows, seen, call.scale, softmax, row,
                           probabilities + row * kBlockRows, sums + row * channels, channels);
      }
      multiply<Format>(probabilities, kBlockRows, value_steps + j * block_steps, channels, sums,
                       channels, kBlockRows, channels, kBlockRows / Format::kRowsOfStep, true);
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
template <class Format>
struct BackwardRoom {
  Room<typename Format::Value> queries, grads, keys, values, key_columns, probabilities, score_grads;
  Room<typename Format::Step> query_channels, query_rows, grad_channels, grad_rows, key_channels,
      score_steps;
  Room<float> logs, deltas, scores, probability_grads, query_sums, key_sums, value_sums;
};

// Turns scores and gradients of probabilities, keys as rows, into probabilities and gradients of scores.
// is_diagonal: both blocks begin at the same position, and a query sees the keys up to its own.
template <class Format>
inline void differentiate(const float *scores, const float *probability_grads, const float *logs,
                          const float *deltas, float scale, bool is_diagonal,
                          typename Format::Value *probabilities,
                          typename Format::Value *score_grads) {
  for (Index key = 0; key < kBlockRows; ++key) {
    for (Index column = 0; column < kBlockRows; column += kWidth) {
      const __m512 log = _mm512_loadu_ps(logs + column), delta = _mm512_loadu_ps(deltas + column);
      const Index at = key * kBlockRows + column;
      const __m512 score = _mm512_loadu_ps(scores + at);
      __m512 p = exponential(_mm512_fmsub_ps(score, _mm512_set1_ps(scale), log));
      if (is_diagonal) {
        p = _mm512_maskz_mov_ps(static_cast<__mmask16>(~first_lanes(key - column)), p);
      }
      Format::store(probabilities + at, p);
      Format::store(score_grads + at, _mm512_mul_ps(p, _mm512_sub_ps(_mm512_loadu_ps(probability_grads + at), delta)));
    }
  }
}

// Sums over the channels of the products of the output and its gradient.
template <class Value>
inline void sum_products(const SequenceRows &outs, const Value *grads, Index rows, Index channels,
                         float *sums) {
  const Value *const out = static_cast<const Value *>(outs.at);
  const Index stride = outs.strides[2];
  for (Index row = 0; row < rows; ++row) {
    __m512 sum = _mm512_setzero_ps();
    for (Index d = 0; d < channels; d += kWidth) {
      sum = _mm512_fmadd_ps(Lanes::load(out + row * stride + d),
                            Lanes::load(grads + row * channels + d), sum);
    }
    sums[row] = _mm512_reduce_add_ps(sum);
  }
}

template <class Format>
void differentiate_head(const SequenceAttention &call, Index sequence, Index head) {
  using Value = typename Format::Value;
  using Step = typename Format::Step;
  static thread_local BackwardRoom<Format> room;
  constexpr Index kOf = Format::kRowsOfStep;
  const Index channels = call.head_dim, group = head / (call.heads / call.groups);
  const Index query_blocks = blocks_of(call.queries), key_blocks = blocks_of(call.keys);
  const Index padded = query_blocks * kBlockRows, size = padded * channels;
  const Index block_size = kBlockRows * channels, block_steps = block_size / kOf;
  const SequenceRows k = rows_of(call.k, sequence, group), v = rows_of(call.v, sequence, group);

  Value *const queries = room.queries.of(size), *const grads = room.grads.of(size);
  gather(rows_of(call.q, sequence, head), 0, call.queries, channels, queries);
  gather(rows_of(call.out_grad, sequence, head), 0, call.queries, channels, grads);
  Step *const query_channels = room.query_channels.of(size / kOf);
  Step *const query_rows = room.query_rows.of(size / kOf);
  Step *const grad_channels = room.grad_channels.of(size / kOf);
  Step *const grad_rows = room.grad_rows.of(size / kOf);
  Format::step_channels(queries, padded, channels, query_channels);
  Format::step_rows(queries, padded, channels, query_rows);
  Format::step_channels(grads, padded, channels, grad_channels);
  Format::step_rows(grads, padded, channels, grad_rows);
  // A query of padding has the probability 0 of every key.
  float *const logs = room.logs.of(padded), *const deltas = room.deltas.of(padded);
  std::fill(std::copy_n(call.logs + (sequence * call.heads + head) * call.queries, call.queries, logs),
            logs + padded, std::numeric_limits<float>::infinity());
  std::fill_n(deltas, padded, 0.0F);
  sum_products(rows_of(call.out, sequence, head), grads, call.queries, channels, deltas);

  float *const query_sums = room.query_sums.of(size);
  std::fill_n(query_sums, size, 0.0F);
  float *const key_sums = room.key_sums.of(block_size), *const value_sums = room.value_sums.of(block_size);
  float *const scores = room.scores.of(kBlockRows * kBlockRows);
  float *const probability_grads = room.probability_grads.of(kBlockRows * kBlockRows);
  Value *const probabilities = room.probabilities.of(kBlockRows * kBlockRows);
  Value *const score_grads = room.score_grads.of(kBlockRows * kBlockRows);
  Step *const score_steps = room.score_steps.of(kBlockRows * kBlockRows / kOf);
  Value *const keys = room.keys.of(block_size), *const values = room.values.of(block_size);
  Value *const key_columns = room.key_columns.of(block_size);
  Step *const key_channels = room.key_channels.of(block_steps);
  for (Index j = 0; j < key_blocks; ++j) {
    const Index rows = std::min(kBlockRows, call.keys - j * kBlockRows);
    const Index shift = j * kBlockRows;
    gather(k, shift, rows, channels, keys);
    gather(v, shift, rows, channels, values);
    Format::step_channels(keys, kBlockRows, channels, key_channels);
    Format::columns_of(key_channels, channels, key_columns);
    std::fill_n(key_sums, block_size, 0.0F);
    std::fill_n(value_sums, block_size, 0.0F);
    for (Index i = call.causal ? j : 0; i < query_blocks; ++i) {
      multiply<Format>(keys, channels, query_channels + i * block_steps, kBlockRows, scores,
                       kBlockRows, kBlockRows, kBlockRows, channels / kOf, false);
      multiply<Format>(values, channels, grad_channels + i * block_steps, kBlockRows,
                       probability_grads, kBlockRows, kBlockRows, kBlockRows, channels / kOf, false);
      differentiate<Format>(scores, probability_grads, logs + i * kBlockRows, deltas + i * kBlockRows,
                            call.scale, call.causal && i == j, probabilities, score_grads);
      Format::step_rows(score_grads, kBlockRows, kBlockRows, score_steps);
      multiply<Format>(probabilities, kBlockRows, grad_rows + i * block_steps, channels, value_sums,
                       channels, kBlockRows, channels, kBlockRows / kOf, true);
      multiply<Format>(score_grads, kBlockRows, query_rows + i * block_steps, channels, key_sums,
                       channels, kBlockRows, channels, kBlockRows / kOf, true);
      multiply<Format>(key_columns, kBlockRows, score_steps, kBlockRows, query_sums + i * block_size,
                       kBlockRows, channels, kBlockRows, kBlockRows / kOf, true);
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

template <class Format>
void attend_heads(const SequenceAttention &call, Index first, Index end) {
  Index keys_of = -1;
  for (Index number = first; number < end; ++number) {
    const Index sequence = number / call.heads, head = number % call.heads;
    if (call.out_grad.at != nullptr) {
      differentiate_head<Format>(call, sequence, head);
      continue;
    }
    const Index group = sequence * call.groups + head / (call.heads / call.groups);
    attend_head<Format>(call, sequence, head, group == keys_of);
    keys_of = group;
  }
}

// Computes the heads from first to end, of all sequences; in bfloat16 where it is compiled for its products.
void attend_sequences(const SequenceAttention &call, Index first, Index end) {
#if defined(__AVX512BF16__)
  if (!call.q.is_wide) {
    attend_heads<Bfloat16>(call, first, end);
    return;
  }
#endif
  attend_heads<Float32>(call, first, end);
}

}  // namespace
}  // namespace lmcore::cpu
