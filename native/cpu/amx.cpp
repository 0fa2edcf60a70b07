// The kernels of kernels.hpp with AVX-512 and matrix units (AMX) for bfloat16; compiled for them, called
// only where the processor and the system have them.

#include "kernels.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && \
    defined(__AMX_BF16__) && defined(__linux__)

#include "avx512.hpp"

#include "activation.hpp"
#include "adamw.hpp"
#include "attention.hpp"
#include "matrix_units.hpp"
#include "projection.hpp"
#include "sequence_attention.hpp"

namespace lmcore::cpu {
namespace {

void project_all(const Projection &call, std::int64_t first_block, std::int64_t end_block) {
  if (call.weight_type == Type::kBfloat16) {
    multiply_blocks(call, first_block, end_block);
  } else {
    project(call, first_block, end_block);
  }
}

}  // namespace

const Kernels *amx_kernels() {
  static constexpr Kernels kernels{"amx", kBlock, kStepInputs, project_all,
                                   attend, adamw, attend_sequences, true, activate};
  return &kernels;
}

}  // namespace lmcore::cpu

#else

namespace lmcore::cpu {

const Kernels *amx_kernels() { return nullptr; }

}  // namespace lmcore::cpu

#endif
