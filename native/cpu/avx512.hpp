// Vectors of AVX-512: avx512.cpp, avx512_bf16.cpp and amx.cpp.

#pragma once

#include <immintrin.h>

#include <cstdint>

// GCC 12 takes the undefined vectors of its own intrinsics for a mistake (its bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace lmcore::cpu {
namespace {

struct Lanes {
  using Vector = __m512;
  static constexpr int kCount = 16;
  static constexpr int kMostRows = 12;  // sums in 24 of 32 registers

  static Vector zero() { return _mm512_setzero_ps(); }
  static Vector broadcast(const float *value) { return _mm512_set1_ps(*value); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
  static Vector all(float value) { return _mm512_set1_ps(value); }
  static Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
  static Vector divide(Vector a, Vector b) { return _mm512_div_ps(a, b); }
  static Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
  static Vector square_root(Vector a) { return _mm512_sqrt_ps(a); }
  // NaN if the first one is NaN.
  static Vector at_least(Vector a, Vector low) { return _mm512_max_ps(low, a); }
  static Vector at_most(Vector a, Vector high) { return _mm512_min_ps(high, a); }
  static Vector rounded(Vector a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static Vector scaled_by_power_of_2(Vector a, Vector power) { return _mm512_scalef_ps(a, power); }
  static float total(Vector values) { return _mm512_reduce_add_ps(values); }
  static void store(float *to, Vector values) { _mm512_storeu_ps(to, values); }
  // To nearest, ties to even; NaN stays NaN.
  static void store(std::uint16_t *to, Vector values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i found = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16(found));
  }
  static void stream(float *to, Vector values) { _mm512_stream_ps(to, values); }  // to is aligned
  static void fence() { _mm_sfence(); }
  static void prefetch(const char *at) { _mm_prefetch(at, _MM_HINT_T1); }

  static Vector load(const float *from) { return _mm512_loadu_ps(from); }
  static Vector load(const std::uint16_t *from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static Vector load(const std::int8_t *from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
};

}  // namespace
}  // namespace lmcore::cpu
