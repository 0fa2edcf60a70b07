// The kernels of kernels.hpp with AVX2 and FMA; compiled for them, called only where the processor has
// both.

#include "kernels.hpp"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace lmcore::cpu {
namespace {

struct Lanes {
  using Vector = __m256;
  static constexpr int kCount = 8;
  static constexpr int kMostRows = 6;  // sums in 12 of 16 registers

  static Vector zero() { return _mm256_setzero_ps(); }
  static Vector broadcast(const float *value) { return _mm256_broadcast_ss(value); }
  static Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
  static Vector all(float value) { return _mm256_set1_ps(value); }
  static Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
  static Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
  static Vector divide(Vector a, Vector b) { return _mm256_div_ps(a, b); }
  static Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
  static Vector square_root(Vector a) { return _mm256_sqrt_ps(a); }
  static Vector at_least(Vector a, Vector low) { return _mm256_max_ps(low, a); }
  static Vector at_most(Vector a, Vector high) { return _mm256_min_ps(high, a); }
  static Vector rounded(Vector a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // In two steps, since one power alone may be beyond the largest or the least number.
  static Vector scaled_by_power_of_2(Vector a, Vector power) {
    const __m256i whole = _mm256_cvtps_epi32(power), half = _mm256_srai_epi32(whole, 1);
    return multiply(multiply(a, power_of_2(half)), power_of_2(_mm256_sub_epi32(whole, half)));
  }
  static Vector power_of_2(__m256i power) {
    const __m256i biased = _mm256_add_epi32(power, _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
  static float total(Vector values) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static void store(float *to, Vector values) { _mm256_storeu_ps(to, values); }
  // To nearest, ties to even; NaN stays NaN.
  static void store(std::uint16_t *to, Vector values) {
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i found = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), is_nan);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to),
                     _mm_packus_epi32(_mm256_castsi256_si128(found), _mm256_extracti128_si256(found, 1)));
  }
  static void stream(float *to, Vector values) { _mm256_stream_ps(to, values); }  // to is aligned
  static void fence() { _mm_sfence(); }
  static void prefetch(const char *at) { _mm_prefetch(at, _MM_HINT_T1); }

  static Vector load(const float *from) { return _mm256_loadu_ps(from); }
  static Vector load(const std::uint16_t *from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  static Vector load(const std::int8_t *from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  }
};

}  // namespace
}  // namespace lmcore::cpu

#include "activation.hpp"
#include "adamw.hpp"
#include "attention.hpp"
#include "projection.hpp"

namespace lmcore::cpu {

const Kernels *avx2_kernels() {
  static constexpr Kernels kernels{"avx2", kBlock, 0, project, attend,
                                   adamw, nullptr, false, activate};
  return &kernels;
}

}  // namespace lmcore::cpu

#else

namespace lmcore::cpu {

const Kernels *avx2_kernels() { return nullptr; }

}  // namespace lmcore::cpu

#endif
