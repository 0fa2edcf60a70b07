// The kernels of kernels.hpp with AVX-512; compiled for it, called only where the processor has it.

#include "kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include <immintrin.h>

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

#include "adamw.hpp"
#include "attention.hpp"
#include "projection.hpp"

namespace lmcore::cpu {

const Kernels *avx512_kernels() {
  static constexpr Kernels kernels{"avx512", kBlock, project, attend, adamw};
  return &kernels;
}

}  // namespace lmcore::cpu

#else

namespace lmcore::cpu {

const Kernels *avx512_kernels() { return nullptr; }

}  // namespace lmcore::cpu

#endif
