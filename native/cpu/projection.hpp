// The product of a few rows with a weight that does not change, with vectors `Lanes`.
//
// With few rows the time goes into reading the weight.  It is packed so that a thread reads it from front
// to back: in blocks of kVectors vectors of outputs, of each block all inputs one after the other.

#pragma once

#include <algorithm>

#include "functions.hpp"
#include "kernels.hpp"

namespace lmcore::cpu {
namespace {

constexpr int kVectors = 2;  // of outputs in a block
constexpr int kUnrolled = 4;  // inputs between two prefetches
// A core alone does not ask for enough of the memory's bandwidth; measured beside 1024 to 16384.
constexpr int kPrefetchBytes = 8192;

constexpr std::int64_t kBlock = kVectors * Lanes::kCount;

// Adds the products with one input to the sums.
template <class Weight, int kRows>
inline void add_input(const Weight *weight, const float *x, std::int64_t inputs,
                      Lanes::Vector (&sums)[kRows][kVectors]) {
  Lanes::Vector values[kVectors];
  for (int n = 0; n < kVectors; ++n) {
    values[n] = Lanes::load(weight + n * Lanes::kCount);
  }
  for (int m = 0; m < kRows; ++m) {
    const Lanes::Vector factor = Lanes::broadcast(x + m * inputs);
    for (int n = 0; n < kVectors; ++n) {
      sums[m][n] = Lanes::multiply_add(factor, values[n], sums[m][n]);
    }
  }
}

// Scales the sums of a row, adds the bias, applies GELU and writes the outputs, all of a block.
inline void write_whole_row(const Projection &call, std::int64_t row, std::int64_t output,
                            const Lanes::Vector (&sums)[kVectors]) {
  const std::int64_t at = row * call.outputs + output;
  for (int n = 0; n < kVectors; ++n) {
    const int shift = n * Lanes::kCount;
    Lanes::Vector value = sums[n];
    if (call.scale != nullptr) {
      value = Lanes::multiply(value, Lanes::load(call.scale + output + shift));
    }
    if (call.bias != nullptr) {
      value = Lanes::add(value, Lanes::load(call.bias + output + shift));
    }
    if (call.gelu) {
      value = gelu(value);
    }
    if (call.y_type == Type::kFloat32) {
      Lanes::store(static_cast<float *>(call.y) + at + shift, value);
    } else {
      Lanes::store(static_cast<std::uint16_t *>(call.y) + at + shift, value);
    }
  }
}

// The same for a block with outputs of padding.
inline void write_row(const Projection &call, std::int64_t row, std::int64_t output,
                      const Lanes::Vector (&sums)[kVectors]) {
  const std::int64_t count = call.outputs - output;
  if (count >= kBlock) {
    write_whole_row(call, row, output, sums);
    return;
  }
  float scale[kBlock];
  float bias[kBlock];
  float values[kBlock];
  std::uint16_t narrow_values[kBlock];
  Projection padded = call;
  if (call.scale != nullptr) {
    std::fill(std::copy_n(call.scale + output, count, scale), scale + kBlock, 0.0F);
    padded.scale = scale;
  }
  if (call.bias != nullptr) {
    std::fill(std::copy_n(call.bias + output, count, bias), bias + kBlock, 0.0F);
    padded.bias = bias;
  }
  const std::int64_t at = row * call.outputs + output;
  if (call.y_type == Type::kFloat32) {
    padded.y = values;
    write_whole_row(padded, 0, 0, sums);
    std::copy_n(values, count, static_cast<float *>(call.y) + at);
  } else {
    padded.y = narrow_values;
    write_whole_row(padded, 0, 0, sums);
    std::copy_n(narrow_values, count, static_cast<std::uint16_t *>(call.y) + at);
  }
}

template <class Weight, int kRows>
void project_block(const Projection &call, std::int64_t row, std::int64_t block) {
  const std::int64_t inputs = call.inputs;
  const Weight *weight = static_cast<const Weight *>(call.weight) + block * kBlock * inputs;
  const float *x = call.x + row * inputs;
  Lanes::Vector sums[kRows][kVectors];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kVectors; ++n) {
      sums[m][n] = Lanes::zero();
    }
  }
  std::int64_t i = 0;
  for (; i + kUnrolled <= inputs; i += kUnrolled) {
    const char *ahead = reinterpret_cast<const char *>(weight) + kPrefetchBytes;
    for (int byte = 0; byte < static_cast<int>(kUnrolled * kBlock * sizeof(Weight)); byte += 64) {
      Lanes::prefetch(ahead + byte);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kUnrolled; ++k) {
      add_input<Weight, kRows>(weight + k * kBlock, x + k, inputs, sums);
    }
    weight += kUnrolled * kBlock;
    x += kUnrolled;
  }
  for (; i < inputs; ++i, weight += kBlock, ++x) {
    add_input<Weight, kRows>(weight, x, inputs, sums);
  }
  for (int m = 0; m < kRows; ++m) {
    write_row(call, row + m, block * kBlock, sums[m]);
  }
}

// Calls project_block for a number of rows up to kRows.
template <class Weight, int kRows>
void project_rows(const Projection &call, std::int64_t row, std::int64_t rows,
                  std::int64_t block) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      project_block<Weight, kRows>(call, row, block);
    } else {
      project_rows<Weight, kRows - 1>(call, row, rows, block);
    }
  }
}

// Computes all rows, as many at a time as there are registers for their sums; the block stays in the
// core's cache meanwhile.
template <class Weight>
void project_all_rows(const Projection &call, std::int64_t block) {
  std::int64_t passes = (call.rows + Lanes::kMostRows - 1) / Lanes::kMostRows;
  for (std::int64_t row = 0; passes > 0; --passes) {
    const std::int64_t rows = (call.rows - row + passes - 1) / passes;
    project_rows<Weight, Lanes::kMostRows>(call, row, rows, block);
    row += rows;
  }
}

void project(const Projection &call, std::int64_t first_block, std::int64_t end_block) {
  for (std::int64_t block = first_block; block < end_block; ++block) {
    switch (call.weight_type) {
      case Type::kFloat32:
        project_all_rows<float>(call, block);
        break;
      case Type::kBfloat16:
        project_all_rows<std::uint16_t>(call, block);
        break;
      case Type::kInt8:
        project_all_rows<std::int8_t>(call, block);
        break;
    }
  }
}

}  // namespace
}  // namespace lmcore::cpu
