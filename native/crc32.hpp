// CRC-32 as zlib computes it.
//
// The remainder of bytes that are folded 64 at a time by carry-less products, where the processor has
// them (V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction",
// 2009); else eight bytes at a time from tables.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define LMCORE_CRC32_FOLDED 1
#endif

namespace lmcore {

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

inline CrcTables crc_tables() {
  CrcTables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320u : 0u);
    }
    tables[0][i] = value;
  }
  for (std::size_t i = 0; i < 256; ++i) {
    for (std::size_t k = 1; k < 8; ++k) {
      const std::uint32_t before = tables[k - 1][i];
      tables[k][i] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

// Advances an inverted CRC by bytes, from tables.
inline std::uint32_t crc_by_tables(std::uint32_t crc, const unsigned char *bytes, std::size_t size) {
  static const CrcTables tables = crc_tables();
  for (; size >= 8; size -= 8, bytes += 8) {
    std::uint32_t value = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      value ^= tables[7 - i][(bytes[i] ^ (crc >> (8 * i))) & 0xff] ^ tables[3 - i][bytes[4 + i]];
    }
    crc = value;
  }
  for (; size > 0; --size, ++bytes) {
    crc = (crc >> 8) ^ tables[0][(crc ^ *bytes) & 0xff];
  }
  return crc;
}

#ifdef LMCORE_CRC32_FOLDED

constexpr std::size_t kSmallestFolded = 64;

__attribute__((target("pclmul,sse4.1"))) inline __m128i crc_fold(__m128i value, __m128i constants,
                                                                 __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Advances an inverted CRC by bytes: at least 64, a multiple of 16.
__attribute__((target("pclmul,sse4.1"))) inline std::uint32_t crc_by_folding(
    std::uint32_t crc, const unsigned char *bytes, std::size_t size) {
  // Powers of x modulo the polynomial, bits in reverse order; of the exponents 512 + 32, 512 - 32,
  // 128 + 32, 128 - 32 and 64, the quotient of x^64, and the polynomial.
  const __m128i by_four = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_one = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i to_64_bits = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i reduction = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const auto load = [](const unsigned char *from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
  };
  __m128i value[4];
  for (int i = 0; i < 4; ++i) {
    value[i] = load(bytes + 16 * i);
  }
  value[0] = _mm_xor_si128(value[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  bytes += 64;
  size -= 64;
  for (; size >= 64; size -= 64, bytes += 64) {
    for (int i = 0; i < 4; ++i) {
      value[i] = crc_fold(value[i], by_four, load(bytes + 16 * i));
    }
  }
  __m128i folded = value[0];
  for (int i = 1; i < 4; ++i) {
    folded = crc_fold(folded, by_one, value[i]);
  }
  for (; size >= 16; size -= 16, bytes += 16) {
    folded = crc_fold(folded, by_one, load(bytes));
  }
  // 128 bits to 96, to 64, and by Barrett's reduction to 32.
  const __m128i low_bits = _mm_set_epi32(0, ~0, 0, ~0);
  folded = _mm_xor_si128(_mm_srli_si128(folded, 8), _mm_clmulepi64_si128(folded, by_one, 0x10));
  folded = _mm_xor_si128(
      _mm_srli_si128(folded, 4),
      _mm_clmulepi64_si128(_mm_and_si128(folded, low_bits), to_64_bits, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(folded, low_bits), reduction, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_bits), reduction, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(folded, quotient), 1));
}

#endif

// Returns the CRC-32 of bytes that follow those of *crc*.
inline std::uint32_t crc32(std::uint32_t crc, const char *content, std::size_t size) {
  const auto *bytes = reinterpret_cast<const unsigned char *>(content);
  crc = ~crc;
#ifdef LMCORE_CRC32_FOLDED
  static const bool can_fold =
      __builtin_cpu_supports("pclmul") != 0 && __builtin_cpu_supports("sse4.1") != 0;
  if (can_fold && size >= kSmallestFolded) {
    const std::size_t folded = size - size % 16;
    crc = crc_by_folding(crc, bytes, folded);
    bytes += folded;
    size -= folded;
  }
#endif
  return ~crc_by_tables(crc, bytes, size);
}

}  // namespace lmcore
