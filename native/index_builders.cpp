// The index builders of lmcore.data, for corpora where Python loops and temporary arrays are slow.
//
// Every builder has a twin in Python (lmcore/data/gpt_index.py, lmcore/data/blending.py) that
// gives the same bytes; the tests compare them.  Input arrays are read in place, never copied or
// converted; input is checked in full before the first write; the interpreter is free meanwhile.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

// Without py::array::forcecast an array of another type or layout is refused, not converted.
using Int32Array = py::array_t<std::int32_t, py::array::c_style>;
using Float64Array = py::array_t<double, py::array::c_style>;

template <typename Array>
const typename Array::value_type *in_place(const py::array &values, const char *name) {
  if (!Array::check_(values) || values.ndim() != 1) {
    throw std::invalid_argument(std::string(name) + " has the wrong type, layout or rank");
  }
  const auto *data = static_cast<const typename Array::value_type *>(values.data());
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(typename Array::value_type) != 0) {
    throw std::invalid_argument(std::string(name) + " is not aligned");
  }
  return data;
}

// Tokens of the whole stream; raises unless every entry and size is in range.
std::int64_t checked_total(const std::int32_t *sizes, std::int64_t num_sizes,
                           const std::int32_t *documents, std::int64_t num_documents) {
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < num_documents; ++i) {
    const std::int64_t document = documents[i];
    if (document < 0 || document >= num_sizes) {
      throw std::invalid_argument(
          "the document index names a sequence that the dataset does not have");
    }
    if (sizes[document] < 0) {
      throw std::invalid_argument("a sequence has a negative size");
    }
    total += sizes[document];  // at most 2^31 entries of 2^31 - 1: no overflow
  }
  return total;
}

void fill_samples(const std::int32_t *sizes, const std::int32_t *documents,
                  std::int64_t sequence_length, std::int64_t num_samples, std::int32_t *out) {
  std::int64_t position = 0;
  std::int64_t offset = 0;
  out[0] = 0;
  out[1] = 0;
  for (std::int64_t sample = 1; sample <= num_samples; ++sample) {
    offset += sequence_length;
    // Stops within the stream: the caller has compared its length with the samples'.
    while (offset >= sizes[documents[position]]) {
      offset -= sizes[documents[position]];
      ++position;
    }
    out[2 * sample] = static_cast<std::int32_t>(position);
    out[2 * sample + 1] = static_cast<std::int32_t>(offset);
  }
}

py::array_t<std::int32_t> build_sample_index(const py::array &sizes, const py::array &documents,
                                             std::int64_t sequence_length,
                                             std::int64_t num_samples) {
  const std::int32_t *size_data = in_place<Int32Array>(sizes, "sizes");
  const std::int32_t *document_data = in_place<Int32Array>(documents, "document_index");
  const std::int64_t num_sizes = sizes.size();
  const std::int64_t num_documents = documents.size();
  if (sequence_length < 1 || num_samples < 0) {
    throw std::invalid_argument("sequence length " + std::to_string(sequence_length) + ", " +
                                std::to_string(num_samples) + " samples");
  }
  if (num_documents > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("the document index has more entries than int32 counts");
  }
  std::int64_t total = 0;
  {
    py::gil_scoped_release release;
    total = checked_total(size_data, num_sizes, document_data, num_documents);
  }
  // Division, not multiplication: the product may not fit.  Bounds the allocation below, too.
  const std::int64_t most = total > 0 ? (total - 1) / sequence_length : 0;
  if (num_samples > most) {
    throw std::invalid_argument(std::to_string(total) + " tokens do not make " +
                                std::to_string(num_samples) + " samples of " +
                                std::to_string(sequence_length) + " tokens");
  }
  py::array_t<std::int32_t> result({static_cast<py::ssize_t>(num_samples + 1), py::ssize_t{2}});
  std::int32_t *out = result.mutable_data();
  {
    py::gil_scoped_release release;
    fill_samples(size_data, document_data, sequence_length, num_samples, out);
  }
  return result;
}

void fill_blend(const double *weights, std::int64_t num_datasets, std::int64_t size,
                std::int16_t *dataset, std::int64_t *sample) {
  std::vector<std::int64_t> taken(static_cast<std::size_t>(num_datasets), 0);
  for (std::int64_t i = 0; i < size; ++i) {
    const double n = static_cast<double>(i > 1 ? i : 1);
    std::int64_t chosen = 0;
    double largest = weights[0] * n - static_cast<double>(taken[0]);
    for (std::int64_t d = 1; d < num_datasets; ++d) {
      const double error =
          weights[d] * n - static_cast<double>(taken[static_cast<std::size_t>(d)]);
      if (error > largest) {
        largest = error;
        chosen = d;
      }
    }
    dataset[i] = static_cast<std::int16_t>(chosen);
    sample[i] = taken[static_cast<std::size_t>(chosen)]++;
  }
}

py::tuple build_blend_index(const py::array &weights, std::int64_t size) {
  const double *data = in_place<Float64Array>(weights, "weights");
  const std::int64_t num_datasets = weights.size();
  if (num_datasets < 1 || num_datasets > std::numeric_limits<std::int16_t>::max() || size < 0) {
    throw std::invalid_argument("a blend of " + std::to_string(num_datasets) + " datasets and " +
                                std::to_string(size) + " samples");
  }
  py::array_t<std::int16_t> dataset(static_cast<py::ssize_t>(size));
  py::array_t<std::int64_t> sample(static_cast<py::ssize_t>(size));
  std::int16_t *dataset_out = dataset.mutable_data();
  std::int64_t *sample_out = sample.mutable_data();
  {
    py::gil_scoped_release release;
    fill_blend(data, num_datasets, size, dataset_out, sample_out);
  }
  return py::make_tuple(dataset, sample);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Index builders in C++; lmcore.data.native says whether they are in use.";
  module.def("build_sample_index", &build_sample_index, py::arg("sizes"),
             py::arg("document_index"), py::arg("sequence_length"), py::arg("num_samples"));
  module.def("build_blend_index", &build_blend_index, py::arg("weights"), py::arg("size"));
}
