// Reads GPT samples out of a mapped dataset: lmcore/data/dataset/gpt.py.

#include <utility>

#include "array.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

// Keeps the arrays alive, which lie in mapped files; holds no tokens itself.
class SampleReader {
 public:
  SampleReader(py::array tokens, const py::array &starts, std::int64_t unit,
               const py::array &sizes, const py::array &documents, const py::array &samples,
               std::int64_t sequence_length)
      : owners_(py::make_tuple(tokens, starts, sizes, documents, samples)),
        tokens_(static_cast<const char *>(tokens.data())),
        num_tokens_(tokens.size()),
        width_(tokens.itemsize()),
        copy_(copier(tokens)),
        starts_(values_of<std::int64_t>(starts, "starts")),
        unit_(unit),
        sizes_(values_of<std::int32_t>(sizes, "sizes")),
        documents_(values_of<std::int32_t>(documents, "document_index")),
        samples_(values_of<std::int32_t>(samples, "sample_index", 2)),
        length_(sequence_length + 1) {
    require(tokens.ndim() == 1 && (tokens.flags() & py::array::c_style) != 0,
            "tokens has the wrong layout or rank");
    require(samples.shape(1) == 2 && starts.size() == sizes.size() && unit >= 1 &&
                sequence_length >= 1 && sequence_length < std::int64_t{1} << 40,
            "arrays that do not belong together");
  }

  py::array_t<std::int64_t> read(std::int64_t sample) const {
    py::array_t<std::int64_t> result(static_cast<py::ssize_t>(length_));
    std::int64_t *out = result.mutable_data();
    bool good = false;
    {
      py::gil_scoped_release release;  // the tokens may have to come from a disk
      good = fill(sample, out);
    }
    if (!good) {
      throw std::invalid_argument("sample " + std::to_string(sample) +
                                  " does not lie within the dataset");
    }
    return result;
  }

 private:
  using Copy = void (*)(const char *, std::int64_t, std::int64_t *);

  template <typename T>
  static void copy_as(const char *from, std::int64_t count, std::int64_t *to) {
    const Values<T> values{from, count};
    for (std::int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<std::int64_t>(values[i]);
    }
  }

  template <typename T>
  static Copy copy_if(const py::array &tokens) {
    return has_type<T>(tokens) ? &copy_as<T> : nullptr;
  }

  static Copy copier(const py::array &tokens) {
    for (const Copy copy : {copy_if<std::uint16_t>(tokens), copy_if<std::int32_t>(tokens),
                            copy_if<std::uint8_t>(tokens), copy_if<std::int8_t>(tokens),
                            copy_if<std::int16_t>(tokens), copy_if<std::int64_t>(tokens)}) {
      if (copy != nullptr) {
        return copy;
      }
    }
    throw std::invalid_argument("tokens has the wrong type");
  }

  // Whatever the arrays hold, nothing outside them is read or written.
  bool fill(std::int64_t sample, std::int64_t *out) const {
    if (sample < 0 || sample >= samples_.count / 2 - 1) {
      return false;
    }
    const std::int64_t first = samples_[2 * sample];
    const std::int64_t last = samples_[2 * sample + 2];
    std::int64_t offset = samples_[2 * sample + 1];
    std::int64_t filled = 0;
    if (first < 0 || last >= documents_.count) {
      return false;
    }
    for (std::int64_t at = first; at <= last; ++at, offset = 0) {
      const std::int64_t document = documents_[at];
      if (document < 0 || document >= sizes_.count) {
        return false;
      }
      const std::int64_t end = at == last ? std::int64_t{samples_[2 * sample + 3]} + 1
                                          : std::int64_t{sizes_[document]};
      const std::int64_t start = starts_[document] / unit_;
      const std::int64_t count = end - offset;
      if (offset < 0 || count < 0 || end > sizes_[document] || filled + count > length_ ||
          start < 0 || start > num_tokens_ - end) {
        return false;
      }
      copy_(tokens_ + (start + offset) * width_, count, out + filled);
      filled += count;
    }
    return filled == length_;
  }

  py::tuple owners_;
  const char *tokens_;
  std::int64_t num_tokens_;
  std::int64_t width_;
  Copy copy_;
  Values<std::int64_t> starts_;  // of each sequence, `unit_` to a token
  std::int64_t unit_;
  Values<std::int32_t> sizes_;
  Values<std::int32_t> documents_;
  Values<std::int32_t> samples_;
  std::int64_t length_;
};

}  // namespace

void register_sample_reader(py::module_ &module) {
  py::class_<SampleReader>(module, "SampleReader")
      .def(py::init<py::array, const py::array &, std::int64_t, const py::array &,
                    const py::array &, const py::array &, std::int64_t>(),
           py::arg("tokens"), py::arg("starts"), py::arg("unit"), py::arg("sizes"),
           py::arg("document_index"), py::arg("sample_index"), py::arg("sequence_length"))
      .def("read", &SampleReader::read, py::arg("sample"));
}

}  // namespace lmcore
