// Attention of one new token of each sequence over its slot of a key-value cache, with vectors `Lanes`.
//
// A sequence reads the positions that it has and no others, so that neither a mask is made nor numbers of
// other sequences take part.  Sums are in float32.

#pragma once

#include "functions.hpp"
#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

constexpr std::int64_t kMostChannels = 256;

// The product of two rows.
template <class Value>
inline float dot(const float *q, const Value *k, std::int64_t channels) {
  Lanes::Vector sum = Lanes::zero();
  std::int64_t d = 0;
  for (; d + Lanes::kCount <= channels; d += Lanes::kCount) {
    sum = Lanes::multiply_add(Lanes::load(q + d), Lanes::load(k + d), sum);
  }
  float total = Lanes::total(sum);
  for (; d < channels; ++d) {
    total += q[d] * to_float(k[d]);
  }
  return total;
}

// Replaces scores by e^(score - highest) and returns their sum.
inline float exponentials(float *scores, std::int64_t count, float highest) {
  float total = 0.0F;
  std::int64_t t = 0;
  Lanes::Vector sum = Lanes::zero();
  const Lanes::Vector offset = Lanes::all(-highest);
  for (; t + Lanes::kCount <= count; t += Lanes::kCount) {
    const Lanes::Vector values = exponential(Lanes::add(Lanes::load(scores + t), offset));
    Lanes::store(scores + t, values);
    sum = Lanes::add(sum, values);
  }
  if (t < count) {
    float rest[Lanes::kCount];
    for (int i = 0; i < Lanes::kCount; ++i) {
      rest[i] = t + i < count ? scores[t + i] - highest : 0.0F;
    }
    Lanes::store(rest, exponential(Lanes::load(rest)));
    for (int i = 0; t + i < count; ++i) {
      scores[t + i] = rest[i];
      total += rest[i];
    }
  }
  return total + Lanes::total(sum);
}

// out[D] = sum of weights[t] * v[t, D], divided.
template <class Value>
inline void weighted_sum(const float *weights, const Value *v, std::int64_t count,
                         std::int64_t channels, float divisor, Value *out) {
  float sums[kMostChannels];
  std::int64_t d = 0;
  constexpr int kColumns = 4;
  for (; d + kColumns * Lanes::kCount <= channels; d += kColumns * Lanes::kCount) {
    Lanes::Vector sum[kColumns] = {Lanes::zero(), Lanes::zero(), Lanes::zero(), Lanes::zero()};
    const Value *row = v + d;
    for (std::int64_t t = 0; t < count; ++t, row += channels) {
      const Lanes::Vector weight = Lanes::broadcast(weights + t);
      for (int n = 0; n < kColumns; ++n) {
        sum[n] = Lanes::multiply_add(weight, Lanes::load(row + n * Lanes::kCount), sum[n]);
      }
    }
    for (int n = 0; n < kColumns; ++n) {
      Lanes::store(sums + d + n * Lanes::kCount, sum[n]);
    }
  }
  for (; d + Lanes::kCount <= channels; d += Lanes::kCount) {
    Lanes::Vector sum = Lanes::zero();
    for (std::int64_t t = 0; t < count; ++t) {
      sum = Lanes::multiply_add(Lanes::broadcast(weights + t), Lanes::load(v + t * channels + d),
                                sum);
    }
    Lanes::store(sums + d, sum);
  }
  for (; d < channels; ++d) {
    sums[d] = 0.0F;
    for (std::int64_t t = 0; t < count; ++t) {
      sums[d] += weights[t] * to_float(v[t * channels + d]);
    }
  }
  for (d = 0; d < channels; ++d) {
    narrow(sums[d] / divisor, out + d);
  }
}

template <class Value>
void attend_group(const NextToken &call, std::int64_t sequence, std::int64_t group,
                  float *scores) {
  const std::int64_t channels = call.head_dim, count = call.lengths[sequence] + 1;
  const std::int64_t at = sequence * call.slot_strides[0] + group * call.slot_strides[1];
  Value *const keys = static_cast<Value *>(call.k_slots) + at;
  Value *const values = static_cast<Value *>(call.v_slots) + at;
  const Value *const k = static_cast<const Value *>(call.k) + sequence * call.k_strides[0] +
                         group * call.k_strides[1];
  const Value *const v = static_cast<const Value *>(call.v) + sequence * call.v_strides[0] +
                         group * call.v_strides[1];
  std::memcpy(keys + (count - 1) * channels, k, channels * sizeof(Value));
  std::memcpy(values + (count - 1) * channels, v, channels * sizeof(Value));

  const std::int64_t shared = call.heads / call.groups;
  for (std::int64_t head = group * shared; head < (group + 1) * shared; ++head) {
    const Value *const q = static_cast<const Value *>(call.q) + sequence * call.q_strides[0] +
                           head * call.q_strides[1];
    float wide_q[kMostChannels];
    for (std::int64_t d = 0; d < channels; ++d) {
      wide_q[d] = to_float(q[d]) * call.scale;
    }
    float highest = -__builtin_inff();
    bool is_nan = false;
    for (std::int64_t t = 0; t < count; ++t) {
      scores[t] = dot(wide_q, keys + t * channels, channels);
      highest = scores[t] > highest ? scores[t] : highest;
      is_nan |= scores[t] != scores[t];
    }
    if (is_nan) {
      highest = __builtin_nanf("");
    }
    const float total = exponentials(scores, count, highest);
    Value *const out =
        static_cast<Value *>(call.out) + (sequence * call.heads + head) * channels;
    weighted_sum(scores, values, count, channels, is_nan ? highest : total, out);
  }
}

void attend(const NextToken &call, std::int64_t first, std::int64_t step, float *scores) {
  const std::int64_t count = call.sequences * call.groups;
  for (std::int64_t pair = first; pair < count; pair += step) {
    const std::int64_t sequence = pair / call.groups, group = pair % call.groups;
    if (call.type == Type::kFloat32) {
      attend_group<float>(call, sequence, group, scores);
    } else {
      attend_group<std::uint16_t>(call, sequence, group, scores);
    }
  }
}

}  // namespace
}  // namespace lmcore::cpu
