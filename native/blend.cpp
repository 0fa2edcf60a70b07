// The greedy blend of datasets: lmcore/data/blend/index.py.

#include <algorithm>
#include <limits>
#include <vector>

#include "array.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

void fill_blend(const std::vector<double> &weights, std::int64_t size, std::int16_t *dataset,
                std::int64_t *sample) {
  const std::size_t num_datasets = weights.size();
  std::vector<double> taken(num_datasets, 0.0);  // exact: fewer than 2^53
  for (std::int64_t i = 0; i < size; ++i) {
    const double n = static_cast<double>(i > 1 ? i : 1);
    std::size_t chosen = 0;
    double largest = weights[0] * n - taken[0];
    for (std::size_t d = 1; d < num_datasets; ++d) {
      const double error = weights[d] * n - taken[d];
      chosen = error > largest ? d : chosen;  // no branch: nobody could predict it
      largest = std::max(error, largest);
    }
    dataset[i] = static_cast<std::int16_t>(chosen);
    sample[i] = static_cast<std::int64_t>(taken[chosen]);
    taken[chosen] += 1.0;
  }
}

py::tuple build_blend_index(const py::array &weights, std::int64_t size) {
  const Values<double> shares = values_of<double>(weights, "weights");
  if (shares.count < 1 || shares.count > std::numeric_limits<std::int16_t>::max() || size < 0) {
    throw std::invalid_argument("a blend of " + std::to_string(shares.count) + " datasets and " +
                                std::to_string(size) + " samples");
  }
  std::vector<double> copied(static_cast<std::size_t>(shares.count));
  for (std::int64_t d = 0; d < shares.count; ++d) {
    copied[static_cast<std::size_t>(d)] = shares[d];
  }
  py::array_t<std::int16_t> dataset(static_cast<py::ssize_t>(size));
  py::array_t<std::int64_t> sample(static_cast<py::ssize_t>(size));
  std::int16_t *dataset_out = dataset.mutable_data();
  std::int64_t *sample_out = sample.mutable_data();
  {
    py::gil_scoped_release release;
    fill_blend(copied, size, dataset_out, sample_out);
  }
  return py::make_tuple(dataset, sample);
}

}  // namespace

void register_blend(py::module_ &module) {
  module.def("build_blend_index", &build_blend_index, py::arg("weights"), py::arg("size"));
}

}  // namespace lmcore
