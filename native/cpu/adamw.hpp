// AdamW (Loshchilov and Hutter, 2019) over vectors `Lanes`, in the order of operations of torch's fused kernel.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

struct AdamwFactors {
  Lanes::Vector decay, first, second, gradient, root, epsilon, rate, scale;
  bool toward_gradient;  // the first moment moves by more than half of the way

  explicit AdamwFactors(const AdamwStep &step)
      : decay(Lanes::all(step.decay)),
        first(Lanes::all(step.first < 0.5F ? step.first : step.first - 1.0F)),
        second(Lanes::all(step.second)),
        gradient(Lanes::all(step.gradient)),
        root(Lanes::all(step.root)),
        epsilon(Lanes::all(step.epsilon)),
        rate(Lanes::all(step.rate)),
        scale(Lanes::all(step.scale)),
        toward_gradient(!(step.first < 0.5F)) {}
};

template <bool kStream>
inline void put(float *to, Lanes::Vector values) {
  if constexpr (kStream) {
    Lanes::stream(to, values);
  } else {
    Lanes::store(to, values);
  }
}

// Updates Lanes::kCount elements from an index on.
template <bool kStream>
inline void adamw_vector(const AdamwFactors &by, const AdamwTensor &tensor, std::int64_t at) {
  const float *const *const from = tensor.from;
  float *const *const to = tensor.to;
  const Lanes::Vector g = Lanes::multiply(Lanes::load(from[3] + at), by.scale);
  Lanes::Vector m = Lanes::load(from[1] + at);
  m = Lanes::multiply_add(by.first, Lanes::subtract(g, m), by.toward_gradient ? g : m);
  const Lanes::Vector kept = Lanes::multiply(Lanes::load(from[2] + at), by.second);
  const Lanes::Vector v = Lanes::multiply_add(Lanes::multiply(by.gradient, g), g, kept);
  const Lanes::Vector root = Lanes::add(Lanes::divide(Lanes::square_root(v), by.root), by.epsilon);
  const Lanes::Vector change = Lanes::divide(Lanes::multiply(by.rate, m), root);
  const Lanes::Vector decayed = Lanes::multiply(Lanes::load(from[0] + at), by.decay);
  const Lanes::Vector weight = Lanes::add(decayed, change);
  put<kStream>(to[0] + at, weight);
  put<kStream>(to[1] + at, m);
  put<kStream>(to[2] + at, v);
  if (tensor.copy != nullptr) {
    Lanes::store(tensor.copy + at, weight);
  }
}

// The last elements, fewer than a vector, by the same instructions: the result of an element does not
// depend on its place.
inline void adamw_rest(const AdamwFactors &by, const AdamwTensor &tensor, std::int64_t start,
                       std::int64_t count) {
  float values[4][Lanes::kCount] = {};
  std::uint16_t narrow[Lanes::kCount];
  const AdamwTensor last{{values[0], values[1], values[2], values[3]},
                         {values[0], values[1], values[2]},
                         tensor.copy == nullptr ? nullptr : narrow,
                         count};
  for (int i = 0; i < 4; ++i) {
    std::copy_n(tensor.from[i] + start, count, values[i]);
  }
  adamw_vector<false>(by, last, 0);
  for (int i = 0; i < 3; ++i) {
    std::copy_n(values[i], count, tensor.to[i] + start);
  }
  if (tensor.copy != nullptr) {
    std::copy_n(narrow, count, tensor.copy + start);
  }
}

// New memory is written past the caches: it would be read first otherwise.
inline bool streams(const AdamwTensor &tensor) {
  for (int i = 0; i < 3; ++i) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.to[i]);
    if (tensor.to[i] == tensor.from[i] || address % (sizeof(float) * Lanes::kCount) != 0) {
      return false;
    }
  }
  return true;
}

// start is a multiple of Lanes::kCount.
void adamw(const AdamwStep &step, const AdamwTensor &tensor, std::int64_t start,
           std::int64_t end) {
  const AdamwFactors by(step);
  const std::int64_t whole = end - (end - start) % Lanes::kCount;
  if (streams(tensor)) {
    for (std::int64_t at = start; at < whole; at += Lanes::kCount) {
      adamw_vector<true>(by, tensor, at);
    }
    Lanes::fence();
  } else {
    for (std::int64_t at = start; at < whole; at += Lanes::kCount) {
      adamw_vector<false>(by, tensor, at);
    }
  }
  if (whole < end) {
    adamw_rest(by, tensor, whole, end - whole);
  }
}

}  // namespace
}  // namespace lmcore::cpu
