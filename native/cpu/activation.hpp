// Activations of the feed-forward layer with vectors `Lanes`, forward and backward, computed in float32.
//
// GELU of x + bias in its tanh form, and SwiGLU: the SiLU of a row's first half times its second half.

#pragma once

#include <algorithm>
#include <cstdint>

#include "functions.hpp"
#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

inline Lanes::Vector sigmoid(Lanes::Vector x) {
  const Lanes::Vector one = Lanes::all(1.0F);
  return Lanes::divide(one, Lanes::add(one, exponential(Lanes::subtract(Lanes::zero(), x))));
}

// The derivative of x * sigmoid(r(x)) is s + x s (1 - s) r'(x) for the sigmoid s.
inline Lanes::Vector slope(Lanes::Vector x, Lanes::Vector s, Lanes::Vector inner) {
  const Lanes::Vector rest = Lanes::multiply(s, Lanes::subtract(Lanes::all(1.0F), s));
  return Lanes::multiply_add(Lanes::multiply(x, rest), inner, s);
}

inline Lanes::Vector gelu_slope(Lanes::Vector x) {
  const Lanes::Vector square = Lanes::multiply(x, x);
  const Lanes::Vector factor =
      Lanes::multiply_add(square, Lanes::all(0.044715F), Lanes::all(1.0F));
  const Lanes::Vector s =
      sigmoid(Lanes::multiply(Lanes::multiply(x, factor), Lanes::all(1.5957691216F)));
  const Lanes::Vector inner = Lanes::multiply_add(square, Lanes::all(0.2140644489F),
                                                  Lanes::all(1.5957691216F));
  return slope(x, s, inner);
}

template <class Value>
void bias_gelu(const Activation &call, std::int64_t first, std::int64_t end) {
  for (std::int64_t row = 0; row < call.rows; ++row) {
    const Value *const x = static_cast<const Value *>(call.x) + row * call.columns;
    Value *const y = static_cast<Value *>(call.y) + row * call.columns;
    for (std::int64_t at = first; at < end; at += Lanes::kCount) {
      Lanes::store(y + at, gelu(Lanes::add(Lanes::load(x + at), Lanes::load(call.bias + at))));
    }
  }
}

// Sums of the bias are taken over kSummedRows rows, and then of those sums.
template <class Value>
void bias_gelu_backward(const Activation &call, std::int64_t first, std::int64_t end) {
  constexpr std::int64_t kSummedRows = 128, kColumns = 512;
  std::fill(call.bias_grad + first, call.bias_grad + end, 0.0F);
  for (std::int64_t left = first; left < end; left += kColumns) {
    const std::int64_t right = std::min(end, left + kColumns);
    for (std::int64_t start = 0; start < call.rows; start += kSummedRows) {
      float sums[kColumns] = {};
      for (std::int64_t row = start; row < std::min(call.rows, start + kSummedRows); ++row) {
        const Value *const x = static_cast<const Value *>(call.x) + row * call.columns;
        const Value *const y_grad = static_cast<const Value *>(call.y_grad) + row * call.columns;
        Value *const x_grad = static_cast<Value *>(call.x_grad) + row * call.columns;
        for (std::int64_t at = left; at < right; at += Lanes::kCount) {
          const Lanes::Vector sum = Lanes::add(Lanes::load(x + at), Lanes::load(call.bias + at));
          const Lanes::Vector grad = Lanes::multiply(Lanes::load(y_grad + at), gelu_slope(sum));
          Lanes::store(x_grad + at, grad);
          float *const total = sums + (at - left);
          Lanes::store(total, Lanes::add(Lanes::load(total), grad));
        }
      }
      for (std::int64_t at = left; at < right; ++at) {
        call.bias_grad[at] += sums[at - left];
      }
    }
  }
}

template <class Value>
void swiglu(const Activation &call, std::int64_t first, std::int64_t end) {
  for (std::int64_t row = 0; row < call.rows; ++row) {
    const Value *const gate = static_cast<const Value *>(call.x) + 2 * row * call.columns;
    const Value *const up = gate + call.columns;
    Value *const y = static_cast<Value *>(call.y) + row * call.columns;
    for (std::int64_t at = first; at < end; at += Lanes::kCount) {
      const Lanes::Vector value = Lanes::load(gate + at);
      const Lanes::Vector open = Lanes::multiply(value, sigmoid(value));
      Lanes::store(y + at, Lanes::multiply(open, Lanes::load(up + at)));
    }
  }
}

template <class Value>
void swiglu_backward(const Activation &call, std::int64_t first, std::int64_t end) {
  for (std::int64_t row = 0; row < call.rows; ++row) {
    const Value *const gate = static_cast<const Value *>(call.x) + 2 * row * call.columns;
    const Value *const up = gate + call.columns;
    const Value *const y_grad = static_cast<const Value *>(call.y_grad) + row * call.columns;
    Value *const gate_grad = static_cast<Value *>(call.x_grad) + 2 * row * call.columns;
    Value *const up_grad = gate_grad + call.columns;
    for (std::int64_t at = first; at < end; at += Lanes::kCount) {
      const Lanes::Vector value = Lanes::load(gate + at), grad = Lanes::load(y_grad + at);
      const Lanes::Vector s = sigmoid(value);
      const Lanes::Vector factor = Lanes::multiply(grad, Lanes::load(up + at));
      Lanes::store(up_grad + at, Lanes::multiply(grad, Lanes::multiply(value, s)));
      Lanes::store(gate_grad + at, Lanes::multiply(factor, slope(value, s, Lanes::all(1.0F))));
    }
  }
}

template <class Value>
void activate_columns(const Activation &call, std::int64_t first, std::int64_t end) {
  const bool is_backward = call.y_grad != nullptr;
  if (call.bias != nullptr) {
    (is_backward ? bias_gelu_backward<Value> : bias_gelu<Value>)(call, first, end);
  } else {
    (is_backward ? swiglu_backward<Value> : swiglu<Value>)(call, first, end);
  }
}

// Computes the columns from first to end, multiples of a vector, of all rows.
void activate(const Activation &call, std::int64_t first, std::int64_t end) {
  if (call.type == Type::kFloat32) {
    activate_columns<float>(call, first, end);
  } else {
    activate_columns<std::uint16_t>(call, first, end);
  }
}

}  // namespace
}  // namespace lmcore::cpu
