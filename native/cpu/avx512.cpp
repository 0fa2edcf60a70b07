// The kernels of kernels.hpp with AVX-512; compiled for it, called only where the processor has it.

#include "kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)

#include "avx512.hpp"

#include "activation.hpp"
#include "adamw.hpp"
#include "attention.hpp"
#include "projection.hpp"
#include "sequence_attention.hpp"

namespace lmcore::cpu {

const Kernels *avx512_kernels() {
  static constexpr Kernels kernels{"avx512", kBlock, 0, project, attend,
                                   adamw, attend_sequences, false, activate};
  return &kernels;
}

}  // namespace lmcore::cpu

#else

namespace lmcore::cpu {

const Kernels *avx512_kernels() { return nullptr; }

}  // namespace lmcore::cpu

#endif
