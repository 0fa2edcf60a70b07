// MinHash signatures: plugins/data-tools/src/lmcore_data_tools/clean/minhash.py.

#include <algorithm>
#include <limits>
#include <vector>

#include "array.hpp"
#include "registration.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define WIDE_VECTORS 1
#endif

namespace lmcore {
namespace {

// Shingles at a time: they stay in a processor's nearest cache for all functions.
constexpr std::int64_t kTile = 2048;

// The least of factor * value + term.  One loop that compilers turn into vectors of any width.
__attribute__((always_inline)) inline std::uint32_t least_of(const std::uint32_t *values,
                                                             std::int64_t count,
                                                             std::uint32_t factor,
                                                             std::uint32_t term) {
  std::uint32_t least = std::numeric_limits<std::uint32_t>::max();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t value = values[i] * factor + term;
    least = value < least ? value : least;
  }
  return least;
}

using Least = std::uint32_t (*)(const std::uint32_t *, std::int64_t, std::uint32_t, std::uint32_t);

std::uint32_t least_anywhere(const std::uint32_t *values, std::int64_t count, std::uint32_t factor,
                             std::uint32_t term) {
  return least_of(values, count, factor, term);
}

#ifdef WIDE_VECTORS
__attribute__((target("avx2"))) std::uint32_t least_avx2(const std::uint32_t *values,
                                                         std::int64_t count, std::uint32_t factor,
                                                         std::uint32_t term) {
  return least_of(values, count, factor, term);
}

__attribute__((target("avx512f"))) std::uint32_t least_avx512(const std::uint32_t *values,
                                                              std::int64_t count,
                                                              std::uint32_t factor,
                                                              std::uint32_t term) {
  return least_of(values, count, factor, term);
}
#endif

Least fastest() {
#ifdef WIDE_VECTORS
  if (__builtin_cpu_supports("avx512f")) {
    return least_avx512;
  }
  if (__builtin_cpu_supports("avx2")) {
    return least_avx2;
  }
#endif
  return least_anywhere;
}

// The last step of MurmurHash3.
std::uint32_t mixed(std::uint32_t value) {
  value ^= value >> 16;
  value *= 0x85EBCA6BU;
  value ^= value >> 13;
  value *= 0xC2B2AE35U;
  return value ^ (value >> 16);
}

struct Family {
  std::vector<std::uint32_t> weights;  // of a shingle's characters
  std::vector<std::uint32_t> factors;
  std::vector<std::uint32_t> terms;
};

void sign(const Values<std::uint32_t> &characters, std::int64_t start, std::int64_t end,
          const Family &family, Least least, std::vector<std::uint32_t> &tile,
          std::uint32_t *signature) {
  const std::int64_t size = static_cast<std::int64_t>(family.weights.size());
  const std::int64_t shingles = std::max<std::int64_t>(1, end - start - size + 1);
  std::fill_n(signature, family.factors.size(), std::numeric_limits<std::uint32_t>::max());
  for (std::int64_t first = 0; first < shingles; first += kTile) {
    const std::int64_t count = std::min(kTile, shingles - first);
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint32_t value = 0;
      // A text shorter than a shingle has noughts behind it.
      const std::int64_t there = std::min(size, end - start - first - i);
      for (std::int64_t k = 0; k < there; ++k) {
        value += characters[start + first + i + k] * family.weights[static_cast<std::size_t>(k)];
      }
      tile[static_cast<std::size_t>(i)] = mixed(value);
    }
    for (std::size_t j = 0; j < family.factors.size(); ++j) {
      const std::uint32_t found = least(tile.data(), count, family.factors[j], family.terms[j]);
      signature[j] = std::min(signature[j], found);
    }
  }
}

std::vector<std::uint32_t> copied(const py::array &array, const char *name) {
  const Values<std::uint32_t> values = values_of<std::uint32_t>(array, name);
  std::vector<std::uint32_t> copy(static_cast<std::size_t>(values.count));
  for (std::int64_t i = 0; i < values.count; ++i) {
    copy[static_cast<std::size_t>(i)] = values[i];
  }
  return copy;
}

py::array_t<std::uint32_t> minhash_signatures(const py::array &characters, const py::array &ends,
                                              const py::array &weights, const py::array &factors,
                                              const py::array &terms) {
  const Values<std::uint32_t> text = values_of<std::uint32_t>(characters, "characters");
  const Values<std::int64_t> stops = values_of<std::int64_t>(ends, "ends");
  const Family family{copied(weights, "weights"), copied(factors, "factors"),
                      copied(terms, "terms")};
  require(family.factors.size() == family.terms.size(), "factors and terms differ in number");
  require(!family.weights.empty(), "a shingle has no characters");
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < stops.count; ++i) {
    require(stops[i] >= last && stops[i] <= text.count, "ends are not in order");
    last = stops[i];
  }
  py::array_t<std::uint32_t> signatures(
      {static_cast<py::ssize_t>(stops.count), static_cast<py::ssize_t>(family.factors.size())});
  std::uint32_t *out = signatures.mutable_data();
  {
    py::gil_scoped_release release;
    const Least least = fastest();
    std::vector<std::uint32_t> tile(static_cast<std::size_t>(kTile));
    std::int64_t start = 0;
    for (std::int64_t i = 0; i < stops.count; ++i) {
      const std::int64_t end = stops[i];
      sign(text, start, end, family, least, tile, out);
      out += family.factors.size();
      start = end;
    }
  }
  return signatures;
}

}  // namespace

void register_minhash(py::module_ &module) {
  module.def("minhash_signatures", &minhash_signatures, py::arg("characters"), py::arg("ends"),
             py::arg("weights"), py::arg("factors"), py::arg("terms"));
}

}  // namespace lmcore
