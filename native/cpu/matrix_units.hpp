// The product of bfloat16 activations with a constant bfloat16 weight, by matrix units (AMX).
//
// The weight is packed in blocks of 32 outputs, each with all inputs; two inputs of an output are side by side,
// as the units read them: [P, I / 2, 32, 2].  Inputs are padded with zeros to a multiple of kStepInputs, in the
// weight and in the activations.  One row takes the units no longer than its weight takes to be read; and each
// row has the same sums, whatever other rows there are.

#pragma once

#include <immintrin.h>

#include <cstdint>

#include "functions.hpp"
#include "kernels.hpp"
#include "projection.hpp"

namespace lmcore::cpu {
namespace {

constexpr std::int64_t kStepInputs = 32;  // of a tile
constexpr std::int64_t kTileRows = 16;
// Activations that stay in a core's second cache while all blocks of the weight pass.
constexpr std::int64_t kCachedInputs = 1 << 19;

static_assert(kBlock == 2 * kTileRows);

// Sizes of the tile registers: 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Gives the upper and the lower tiles of rows their numbers of rows.
inline void configure(std::int64_t first, std::int64_t second) {
  TileConfig config;
  const std::int64_t rows[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<std::uint8_t>(rows[tile] > 0 ? rows[tile] : 1);
    config.bytes[tile] = 64;
  }
  _tile_loadconfig(&config);
}

inline void prefetch_step(const std::uint16_t *weight) {
  const char *const ahead = reinterpret_cast<const char *>(weight) + kPrefetchBytes;
  for (int byte = 0; byte < static_cast<int>(kStepInputs * kBlock * 2); byte += 64) {
    Lanes::prefetch(ahead + byte);
  }
}

// Computes up to 32 rows of a block; `configure` was called for them.
// kTwo: there are rows for the lower tiles.  kFirst: the weight comes from memory.
template <bool kTwo, bool kFirst>
void multiply_tile(const Projection &call, std::int64_t row, std::int64_t rows,
                   std::int64_t block) {
  const std::int64_t inputs = call.padded_inputs;
  const std::uint16_t *weight = static_cast<const std::uint16_t *>(call.weight) + block * kBlock * inputs;
  const std::uint16_t *x = call.narrow_x + row * inputs;
  const std::int64_t stride = inputs * 2;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::int64_t i = 0; i < inputs; i += kStepInputs) {
    if constexpr (kFirst) {
      prefetch_step(weight);
    }
    _tile_loadd(4, x, stride);
    _tile_loadd(6, weight, 2 * kBlock * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weight + kBlock, 2 * kBlock * 2);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, x + kTileRows * inputs, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    weight += kStepInputs * kBlock;
    x += kStepInputs;
  }
  alignas(64) float sums[2 * kTileRows][kBlock];
  constexpr std::int64_t kRowBytes = kBlock * sizeof(float);
  _tile_stored(0, sums[0], kRowBytes);
  _tile_stored(1, sums[0] + kTileRows, kRowBytes);
  if constexpr (kTwo) {
    _tile_stored(2, sums[kTileRows], kRowBytes);
    _tile_stored(3, sums[kTileRows] + kTileRows, kRowBytes);
  }
  for (std::int64_t m = 0; m < rows; ++m) {
    const Lanes::Vector values[kVectors] = {Lanes::load(sums[m]),
                                            Lanes::load(sums[m] + Lanes::kCount)};
    write_row(call, row + m, block * kBlock, values);
  }
}

inline void multiply_blocks(const Projection &call, std::int64_t first_block, std::int64_t end_block) {
  constexpr std::int64_t kRows = 2 * kTileRows;
  const std::int64_t cached = kCachedInputs / call.padded_inputs / kRows * kRows;
  const std::int64_t chunk = cached < kRows ? kRows : cached;
  for (std::int64_t start = 0; start < call.rows; start += chunk) {
    const std::int64_t end = start + chunk < call.rows ? start + chunk : call.rows;
    const std::int64_t whole = start + (end - start) / kRows * kRows;
    if (whole > start) {
      configure(kTileRows, kTileRows);
      for (std::int64_t block = first_block; block < end_block; ++block) {
        multiply_tile<true, true>(call, start, kRows, block);
        for (std::int64_t row = start + kRows; row < whole; row += kRows) {
          multiply_tile<true, false>(call, row, kRows, block);
        }
      }
    }
    if (const std::int64_t rest = end - whole; rest > 0) {
      configure(rest < kTileRows ? rest : kTileRows, rest - kTileRows);
      for (std::int64_t block = first_block; block < end_block; ++block) {
        if (rest > kTileRows) {
          multiply_tile<true, true>(call, whole, rest, block);
        } else {
          multiply_tile<false, true>(call, whole, rest, block);
        }
      }
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace lmcore::cpu
