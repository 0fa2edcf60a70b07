// AdamW (Loshchilov and Hutter, 2019) over vectors `Lanes`, in the order of operations of torch's fused kernel.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

struct AdamwFactors {
  Lanes::Vector decay, first, second, gradient, root, epsilon, rate;
  bool toward_gradient;  // the first moment moves by more than half of the way

  explicit AdamwFactors(const AdamwStep &step)
      : decay(Lanes::all(step.decay)),
        first(Lanes::all(step.first < 0.5F ? step.first : step.first - 1.0F)),
        second(Lanes::all(step.second)),
        gradient(Lanes::all(step.gradient)),
        root(Lanes::all(step.root)),
        epsilon(Lanes::all(step.epsilon)),
        rate(Lanes::all(step.rate)),
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

// Updates Lanes::kCount elements.
template <bool kStream>
inline void adamw_vector(const AdamwFactors &by, float *weight, const float *gradient,
                         const float *first, const float *second, float *new_first,
                         float *new_second) {
  const Lanes::Vector g = Lanes::load(gradient);
  Lanes::Vector m = Lanes::load(first);
  m = Lanes::multiply_add(by.first, Lanes::subtract(g, m), by.toward_gradient ? g : m);
  const Lanes::Vector kept = Lanes::multiply(Lanes::load(second), by.second);
  const Lanes::Vector v = Lanes::multiply_add(Lanes::multiply(by.gradient, g), g, kept);
  const Lanes::Vector root = Lanes::add(Lanes::divide(Lanes::square_root(v), by.root), by.epsilon);
  const Lanes::Vector change = Lanes::divide(Lanes::multiply(by.rate, m), root);
  Lanes::store(weight, Lanes::add(Lanes::multiply(Lanes::load(weight), by.decay), change));
  put<kStream>(new_first, m);
  put<kStream>(new_second, v);
}

// The last elements, fewer than a vector, by the same instructions: the result of an element does not
// depend on its place.
inline void adamw_rest(const AdamwFactors &by, const AdamwTensor &at, std::int64_t start,
                       std::int64_t count) {
  float values[4][Lanes::kCount] = {};
  const float *const from[4] = {at.weight, at.gradient, at.first, at.second};
  for (int i = 0; i < 4; ++i) {
    std::copy_n(from[i] + start, count, values[i]);
  }
  adamw_vector<false>(by, values[0], values[1], values[2], values[3], values[2], values[3]);
  std::copy_n(values[0], count, at.weight + start);
  std::copy_n(values[2], count, at.new_first + start);
  std::copy_n(values[3], count, at.new_second + start);
}

inline bool is_aligned(const float *at) {
  return reinterpret_cast<std::uintptr_t>(at) % (sizeof(float) * Lanes::kCount) == 0;
}

template <bool kStream>
inline void adamw_vectors(const AdamwFactors &by, const AdamwTensor &at, std::int64_t start,
                          std::int64_t end) {
  for (std::int64_t i = start; i < end; i += Lanes::kCount) {
    adamw_vector<kStream>(by, at.weight + i, at.gradient + i, at.first + i, at.second + i,
                          at.new_first + i, at.new_second + i);
  }
}

// start is a multiple of Lanes::kCount.
void adamw(const AdamwStep &step, const AdamwTensor &at, std::int64_t start, std::int64_t end) {
  const AdamwFactors by(step);
  const std::int64_t whole = end - (end - start) % Lanes::kCount;
  // New memory is written past the caches: it would be read first otherwise.
  if (at.new_first != at.first && is_aligned(at.new_first) && is_aligned(at.new_second)) {
    adamw_vectors<true>(by, at, start, whole);
    Lanes::fence();
  } else {
    adamw_vectors<false>(by, at, start, whole);
  }
  if (whole < end) {
    adamw_rest(by, at, whole, end - whole);
  }
}

}  // namespace
}  // namespace lmcore::cpu
