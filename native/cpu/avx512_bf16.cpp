// The kernels of kernels.hpp with AVX-512 and its products of bfloat16; compiled for them, called only where
// the processor has them.

#include "kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)

#include "avx512.hpp"

#include "activation.hpp"
#include "adamw.hpp"
#include "attention.hpp"
#include "projection.hpp"
#include "sequence_attention.hpp"

namespace lmcore::cpu {

const Kernels *avx512_bf16_kernels() {
  static constexpr Kernels kernels{"avx512_bf16", kBlock, 0, project, attend,
                                   adamw, attend_sequences, true, activate};
  return &kernels;
}

}  // namespace lmcore::cpu

#else

namespace lmcore::cpu {

const Kernels *avx512_bf16_kernels() { return nullptr; }

}  // namespace lmcore::cpu

#endif
