// Kernels for the CPU, for each instruction set: lmcore_cpu/kernel/native.py.
//
// amx.cpp, avx512_bf16.cpp, avx512.cpp and avx2.cpp include the templates of activation.hpp, adamw.hpp,
// attention.hpp and projection.hpp with their vectors; all but the last sequence_attention.hpp too.

#pragma once

#include <cstdint>
#include <cstring>

namespace lmcore::cpu {

namespace {  // internal: each file is compiled for other instructions

// To nearest, ties to even; NaN stays NaN.
inline std::uint16_t to_bfloat16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return static_cast<std::uint16_t>(is_nan ? 0x7FC0U
                                           : (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

}  // namespace

enum class Type : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };

// y[M, O] = gelu(x[M, I] @ weight[O, I].T * scale[O] + bias[O])
struct Projection {
  const void *weight;  // packed in blocks of outputs, the last one padded; see projection.hpp
  Type weight_type;
  const float *x;
  // Instead of x where the kernels multiply bfloat16: rows of padded_inputs, zeros after the inputs.
  const std::uint16_t *narrow_x;
  std::int64_t padded_inputs;
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
  const float *scale;  // null: 1
  const float *bias;   // null: 0
  bool gelu;           // the tanh form; false: none
  void *y;
  Type y_type;  // kFloat32 or kBfloat16
};

// Attention of one new token of each sequence, whose key and value are written into its slot first.
struct NextToken {
  Type type;        // of all arrays: kFloat32 or kBfloat16
  const void *q;    // [B, N, D], with the strides below, in elements
  const void *k;    // [B, K, D]
  const void *v;    // [B, K, D]
  std::int64_t q_strides[2];
  std::int64_t k_strides[2];
  std::int64_t v_strides[2];
  void *k_slots;  // [B, K, C, D], positions contiguous
  void *v_slots;
  std::int64_t slot_strides[2];
  const std::int64_t *lengths;  // [B], tokens before the new one
  void *out;                    // [B, N, D], contiguous
  std::int64_t sequences;
  std::int64_t heads;
  std::int64_t groups;  // heads of keys and values
  std::int64_t head_dim;
  float scale;  // of scores
};

// Rows of the heads of sequences: an array [B, N, S, D] whose channels are adjacent.
struct SequenceRows {
  void *at;
  std::int64_t strides[3];  // of sequence, head and row, in elements
  bool is_wide;             // float32; false: bfloat16
};

// Attention of whole sequences, in float32 if q is wide, else in bfloat16.  With out_grad the backward pass, which reads out and logs and writes the
// gradients; without it the forward pass, which writes out and logs.
struct SequenceAttention {
  SequenceRows q;       // [B, N, S, D]
  SequenceRows k;       // [B, K, T, D]
  SequenceRows v;       // [B, K, T, D]
  SequenceRows out;     // [B, N, S, D]
  float *logs;          // [B, N, S], contiguous: logarithms of the sums of exponentials of scores
  SequenceRows out_grad;
  SequenceRows q_grad;
  SequenceRows k_grad;  // [B, N, T, D]: of each query head
  SequenceRows v_grad;
  std::int64_t heads;
  std::int64_t groups;
  std::int64_t queries;
  std::int64_t keys;
  std::int64_t head_dim;  // a multiple of 32
  bool causal;            // queries and keys are then as many
  float scale;            // of scores
};

// GELU of x + bias in its tanh form, or SwiGLU where there is no bias.  With y_grad the backward pass, without
// it the forward pass.
struct Activation {
  Type type;           // of all arrays but those of the bias: kFloat32 or kBfloat16
  const void *x;       // [M, F], or [M, 2, F]: gate, then up; contiguous
  const float *bias;   // [F]; null: SwiGLU
  void *y;             // [M, F]
  const void *y_grad;  // [M, F]
  void *x_grad;        // as x
  float *bias_grad;    // [F]
  std::int64_t rows;
  std::int64_t columns;  // F, a multiple of 16
};

// Arrays of a weight.
struct AdamwTensor {
  const float *from[4];  // weight, first and second moment, gradient
  float *to[3];          // new weight, first and second moment; in place if they are the same
  std::uint16_t *copy;   // new weight in bfloat16; null: none
  std::int64_t size;
};

// Factors of one step of AdamW.
struct AdamwStep {
  float decay;     // 1 - learning rate * weight decay
  float first;     // 1 - beta1
  float second;    // beta2
  float gradient;  // 1 - beta2
  float root;      // square root of 1 - beta2^step
  float epsilon;
  float rate;   // -learning rate / (1 - beta1^step)
  float scale;  // of gradients
};

struct Kernels {
  const char *instructions;
  std::int64_t block;  // outputs of a block
  // Divisor of the padded inputs of bfloat16, which are packed in pairs (matrix_units.hpp); 0: not so.
  std::int64_t paired_inputs;
  // Computes the outputs of some blocks.
  void (*project)(const Projection &, std::int64_t first_block, std::int64_t end_block);
  // Computes some pairs of a sequence and a head of keys; *scores* has room for one sequence.
  void (*attend)(const NextToken &, std::int64_t first, std::int64_t step, float *scores);
  // Updates the elements of a weight from start, a multiple of 64 bytes, to end.
  void (*adamw)(const AdamwStep &, const AdamwTensor &, std::int64_t start, std::int64_t end);
  // Computes the heads from first to end of all sequences, numbered in order; null: not here.
  void (*attend_sequences)(const SequenceAttention &, std::int64_t first, std::int64_t end);
  bool attends_in_bfloat16;  // false: only in float32
  // Computes the columns from first to end, multiples of 16, of all rows.
  void (*activate)(const Activation &, std::int64_t first, std::int64_t end);
};

// Null where the compiler cannot build them.
const Kernels *amx_kernels();
const Kernels *avx512_bf16_kernels();
const Kernels *avx512_kernels();
const Kernels *avx2_kernels();

}  // namespace lmcore::cpu
