// lmcore_cpu._kernels: kernels for what torch's libraries are slow at, or do not have.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.hpp"
#include "openmp.hpp"

namespace py = pybind11;

namespace lmcore::cpu {
namespace {

// Products below which another thread takes longer to begin than to compute.
constexpr std::int64_t kLeastWork = 1 << 14;
constexpr std::int64_t kMostChannels = 256;  // as in attention.hpp

#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__)

// Asks Linux once for the matrix units' registers, which a process has to do before their first use.
bool may_use_matrix_units() {
  static const bool granted = [] {
    constexpr unsigned kTileData = 18;
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) {
      return false;
    }
    const bool has_units = (d >> 22 & 1U) != 0 && (d >> 24 & 1U) != 0;  // AMX-BF16, AMX-TILE
    return has_units && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
}

#else

bool may_use_matrix_units() { return false; }

#endif

// The kernels of each instruction set that this processor has, the fastest first.
std::vector<const Kernels *> available() {
  std::vector<const Kernels *> found;
#if defined(__x86_64__) && defined(__GNUC__)
  const bool has_avx512 =
      __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0;
  const bool has_bfloat16 = has_avx512 && __builtin_cpu_supports("avx512bf16") != 0;
  if (amx_kernels() != nullptr && has_bfloat16 && may_use_matrix_units()) {
    found.push_back(amx_kernels());
  }
  if (avx512_bf16_kernels() != nullptr && has_bfloat16) {
    found.push_back(avx512_bf16_kernels());
  }
  if (avx512_kernels() != nullptr && has_avx512) {
    found.push_back(avx512_kernels());
  }
  if (avx2_kernels() != nullptr && __builtin_cpu_supports("avx2") &&
      __builtin_cpu_supports("fma")) {
    found.push_back(avx2_kernels());
  }
#endif
  return found;
}

const Kernels *required(const std::string &instructions) {
  static const std::vector<const Kernels *> here = available();
  for (const Kernels *one : here) {
    if (instructions == one->instructions) {
      return one;
    }
  }
  throw std::invalid_argument("this processor has no kernels for " + instructions);
}

int threads_for(std::int64_t work, std::int64_t parts, int threads) {
  const std::int64_t most = work / kLeastWork < parts ? work / kLeastWork : parts;
  return threads > most ? static_cast<int>(most) : threads;
}

const float *widened(const std::uint16_t *x, std::int64_t count) {
  static thread_local std::vector<float> wide;
  if (static_cast<std::int64_t>(wide.size()) < count) {
    wide.resize(count);
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x[i]) << 16;
    std::memcpy(&wide[i], &bits, sizeof bits);
  }
  return wide.data();
}

// Returns bfloat16 rows of *padded* inputs, zeros after the given ones; *x* itself where nothing is to do.
const std::uint16_t *narrowed(std::uintptr_t x, bool wide_x, std::int64_t rows,
                              std::int64_t inputs, std::int64_t padded) {
  const auto *const narrow_x = reinterpret_cast<const std::uint16_t *>(x);
  if (!wide_x && inputs == padded) {
    return narrow_x;
  }
  static thread_local std::vector<std::uint16_t> narrow;
  if (static_cast<std::int64_t>(narrow.size()) < rows * padded) {
    narrow.resize(rows * padded);
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    std::uint16_t *const to = narrow.data() + row * padded;
    if (wide_x) {
      const float *const from = reinterpret_cast<const float *>(x) + row * inputs;
      for (std::int64_t i = 0; i < inputs; ++i) {
        to[i] = to_bfloat16(from[i]);
      }
    } else {
      std::memcpy(to, narrow_x + row * inputs, inputs * sizeof *to);
    }
    std::fill(to + inputs, to + padded, std::uint16_t{0});
  }
  return narrow.data();
}

// A projection by a constant weight; the addresses are of contiguous arrays that live as long as it.
class ConstantProjection {
 public:
  ConstantProjection(const std::string &instructions, std::uintptr_t weight, int weight_type,
                     std::int64_t inputs, std::int64_t outputs, std::uintptr_t scale,
                     std::uintptr_t bias, bool gelu)
      : kernels_(required(instructions)), call_{} {
    if (weight_type < 0 || weight_type > 2 || inputs < 1 || outputs < 1 || weight == 0) {
      throw std::invalid_argument("not a weight");
    }
    call_.weight = reinterpret_cast<const void *>(weight);
    call_.weight_type = static_cast<Type>(weight_type);
    call_.inputs = inputs;
    if (const std::int64_t by = kernels_->paired_inputs;
        by != 0 && call_.weight_type == Type::kBfloat16) {
      call_.padded_inputs = (inputs + by - 1) / by * by;
    }
    call_.outputs = outputs;
    call_.scale = reinterpret_cast<const float *>(scale);
    call_.bias = reinterpret_cast<const float *>(bias);
    call_.gelu = gelu;
  }

  // x and y are the addresses of contiguous arrays [rows, inputs] and [rows, outputs], each of float32 if
  // it is wide, of bfloat16 if not.
  void project(std::uintptr_t x, bool wide_x, std::uintptr_t y, bool wide_y, std::int64_t rows,
               int threads) const {
    py::gil_scoped_release released;
    Projection call = call_;
    if (call.padded_inputs != 0) {
      call.narrow_x = narrowed(x, wide_x, rows, call.inputs, call.padded_inputs);
    } else {
      call.x = wide_x ? reinterpret_cast<const float *>(x)
                      : widened(reinterpret_cast<const std::uint16_t *>(x), rows * call.inputs);
    }
    call.rows = rows;
    call.y = reinterpret_cast<void *>(y);
    call.y_type = wide_y ? Type::kFloat32 : Type::kBfloat16;
    const std::int64_t blocks = (call.outputs + kernels_->block - 1) / kernels_->block;
    on_threads(threads_for(rows * call.inputs * call.outputs, blocks, threads),
               [&](std::int64_t thread, std::int64_t count) {
                 kernels_->project(call, blocks * thread / count, blocks * (thread + 1) / count);
               });
  }

 private:
  const Kernels *kernels_;
  Projection call_;
};

using Strides = std::array<std::int64_t, 2>;

// See NextToken.  The caller has checked the slots against the longest length: next_token_attention.py.
void attend_next_token(const std::string &instructions, bool is_bfloat16, std::uintptr_t q,
                       const Strides &q_strides, std::uintptr_t k, const Strides &k_strides,
                       std::uintptr_t v, const Strides &v_strides, std::uintptr_t k_slots,
                       std::uintptr_t v_slots, const Strides &slot_strides,
                       std::uintptr_t lengths, std::uintptr_t out, std::int64_t sequences,
                       std::int64_t heads, std::int64_t groups, std::int64_t head_dim,
                       std::int64_t longest, float scale, int threads) {
  const Kernels *const kernels = required(instructions);
  if (head_dim < 1 || head_dim > kMostChannels || groups < 1 || heads % groups != 0) {
    throw std::invalid_argument("not heads of attention");
  }
  py::gil_scoped_release released;
  const NextToken call{is_bfloat16 ? Type::kBfloat16 : Type::kFloat32,
                       reinterpret_cast<const void *>(q),
                       reinterpret_cast<const void *>(k),
                       reinterpret_cast<const void *>(v),
                       {q_strides[0], q_strides[1]},
                       {k_strides[0], k_strides[1]},
                       {v_strides[0], v_strides[1]},
                       reinterpret_cast<void *>(k_slots),
                       reinterpret_cast<void *>(v_slots),
                       {slot_strides[0], slot_strides[1]},
                       reinterpret_cast<const std::int64_t *>(lengths),
                       reinterpret_cast<void *>(out),
                       sequences,
                       heads,
                       groups,
                       head_dim,
                       scale};
  const std::int64_t work = sequences * heads * head_dim * (longest + 1);
  const int used = threads_for(work, sequences * groups, threads);
  std::vector<float> scores(static_cast<std::size_t>(longest + 1) * (used < 1 ? 1 : used));
  on_threads(used, [&](std::int64_t thread, std::int64_t count) {
    kernels->attend(call, thread, count, scores.data() + thread * (longest + 1));
  });
}

// Address, strides of sequence, head and row, and whether it is float32; address 0: none.
using RowsGiven = std::tuple<std::uintptr_t, std::array<std::int64_t, 3>, bool>;

SequenceRows rows_given(const RowsGiven &given) {
  const auto &[at, strides, is_wide] = given;
  return {reinterpret_cast<void *>(at), {strides[0], strides[1], strides[2]}, is_wide};
}

// See SequenceAttention.  arrays: q, k, v, out, then for the backward pass out_grad, q_grad, k_grad, v_grad;
// sizes: sequences, heads, groups, queries, keys, channels.
void attend_sequences(const std::string &instructions, const std::vector<RowsGiven> &arrays,
                      std::uintptr_t logs, const std::array<std::int64_t, 6> &sizes, bool causal,
                      float scale, int threads) {
  const Kernels *const kernels = required(instructions);
  const auto [sequences, heads, groups, queries, keys, head_dim] = sizes;
  const bool is_backward = arrays.size() == 8;
  if (kernels->attend_sequences == nullptr || (arrays.size() != 4 && !is_backward) ||
      head_dim < 32 || head_dim % 32 != 0 || groups < 1 || heads % groups != 0 || queries < 1 ||
      keys < 1 || (causal && queries != keys) ||
      !(kernels->attends_in_bfloat16 || std::get<2>(arrays[0]))) {
    throw std::invalid_argument("not sequences of attention");
  }
  SequenceAttention call{};
  SequenceRows *const places[] = {&call.q,        &call.k,      &call.v,      &call.out,
                                  &call.out_grad, &call.q_grad, &call.k_grad, &call.v_grad};
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    *places[i] = rows_given(arrays[i]);
  }
  call.logs = reinterpret_cast<float *>(logs);
  call.heads = heads;
  call.groups = groups;
  call.queries = queries;
  call.keys = keys;
  call.head_dim = head_dim;
  call.causal = causal;
  call.scale = scale;
  py::gil_scoped_release released;
  const std::int64_t count = sequences * heads;
  on_threads(threads_for(count * queries * keys * head_dim, count, threads),
             [&](std::int64_t thread, std::int64_t of) {
               kernels->attend_sequences(call, count * thread / of, count * (thread + 1) / of);
             });
}

constexpr std::int64_t kColumnsOfPart = 16;

// See Activation.  arrays: x, bias or 0, y; for the backward pass x, bias or 0, y_grad, x_grad, bias_grad or 0.
void activate(const std::string &instructions, bool is_bfloat16,
              const std::vector<std::uintptr_t> &arrays, std::int64_t rows, std::int64_t columns,
              int threads) {
  const Kernels *const kernels = required(instructions);
  if ((arrays.size() != 3 && arrays.size() != 5) || rows < 1 || columns < 1 ||
      columns % kColumnsOfPart != 0) {
    throw std::invalid_argument("not rows of an activation");
  }
  Activation call{};
  call.type = is_bfloat16 ? Type::kBfloat16 : Type::kFloat32;
  call.x = reinterpret_cast<const void *>(arrays[0]);
  call.bias = reinterpret_cast<const float *>(arrays[1]);
  if (arrays.size() == 3) {
    call.y = reinterpret_cast<void *>(arrays[2]);
  } else {
    call.y_grad = reinterpret_cast<const void *>(arrays[2]);
    call.x_grad = reinterpret_cast<void *>(arrays[3]);
    call.bias_grad = reinterpret_cast<float *>(arrays[4]);
  }
  call.rows = rows;
  call.columns = columns;
  py::gil_scoped_release released;
  const std::int64_t parts = columns / kColumnsOfPart;
  on_threads(threads_for(rows * columns, parts, threads),
             [&](std::int64_t thread, std::int64_t of) {
               kernels->activate(call, parts * thread / of * kColumnsOfPart,
                                 parts * (thread + 1) / of * kColumnsOfPart);
             });
}

constexpr std::int64_t kAdamwPart = 1 << 14;  // elements

struct AdamwPart {
  std::size_t tensor;
  std::int64_t start;
};

// Takes for each weight the addresses of the arrays of AdamwTensor, its size and the factors of AdamwStep.
void adamw(const std::string &instructions,
           const std::vector<std::array<std::uintptr_t, 9>> &tensors,
           const std::vector<std::array<double, 8>> &steps, int threads) {
  const Kernels *const kernels = required(instructions);
  if (tensors.size() != steps.size()) {
    throw std::invalid_argument("not as many steps as tensors");
  }
  py::gil_scoped_release released;
  std::vector<AdamwTensor> all;
  std::vector<AdamwStep> factors;
  std::vector<AdamwPart> parts;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto &at = tensors[i];
    AdamwTensor one{};
    for (int k = 0; k < 4; ++k) {
      one.from[k] = reinterpret_cast<const float *>(at[k]);
    }
    for (int k = 0; k < 3; ++k) {
      one.to[k] = reinterpret_cast<float *>(at[4 + k]);
    }
    one.copy = reinterpret_cast<std::uint16_t *>(at[7]);
    one.size = static_cast<std::int64_t>(at[8]);
    all.push_back(one);
    const auto &by = steps[i];
    factors.push_back({static_cast<float>(by[0]), static_cast<float>(by[1]),
                       static_cast<float>(by[2]), static_cast<float>(by[3]),
                       static_cast<float>(by[4]), static_cast<float>(by[5]),
                       static_cast<float>(by[6]), static_cast<float>(by[7])});
    for (std::int64_t start = 0; start < all.back().size; start += kAdamwPart) {
      parts.push_back({i, start});
    }
  }
  const auto count = static_cast<std::int64_t>(parts.size());
  on_threads(threads_for(count * kAdamwPart, count, threads),
             [&](std::int64_t thread, std::int64_t of) {
               for (std::int64_t i = count * thread / of; i < count * (thread + 1) / of; ++i) {
                 const AdamwPart &part = parts[static_cast<std::size_t>(i)];
                 const AdamwTensor &one = all[part.tensor];
                 const std::int64_t end = part.start + kAdamwPart;
                 kernels->adamw(factors[part.tensor], one, part.start,
                                end < one.size ? end : one.size);
               }
             });
}

py::dict blocks() {
  py::dict found;
  for (const Kernels *one : available()) {
    found[one->instructions] = py::make_tuple(one->block, one->paired_inputs);
  }
  return found;
}

}  // namespace
}  // namespace lmcore::cpu

PYBIND11_MODULE(_kernels, module) {
  using lmcore::cpu::ConstantProjection;
  module.doc() = "Kernels for the CPU; lmcore_cpu.kernel.native says when they are used.";
  module.attr("INTERFACE") = 7;  // as in lmcore_cpu/kernel/native.py
  module.def("blocks", &lmcore::cpu::blocks,
             "Return Blocks by instruction set, the fastest first: see lmcore_cpu/kernel/native.py.");
  module.def("has_threads", [] { return lmcore::cpu::openmp().found(); },
             "Return True if torch's threads were found.");
  module.def("attend_next_token", &lmcore::cpu::attend_next_token,
             "Write a key and a value into each slot, and attend to all of the slot.");
  module.def("attend_sequences", &lmcore::cpu::attend_sequences,
             "Compute attention of whole sequences, or its gradients.");
  module.def("activate", &lmcore::cpu::activate,
             "Compute an activation of the feed-forward layer, or its gradients.");
  module.def("adamw", &lmcore::cpu::adamw, "Update weights and moments by a step of AdamW.");
  py::class_<ConstantProjection>(module, "ConstantProjection")
      .def(py::init<const std::string &, std::uintptr_t, int, std::int64_t, std::int64_t,
                    std::uintptr_t, std::uintptr_t, bool>())
      .def("project", &ConstantProjection::project);
}
